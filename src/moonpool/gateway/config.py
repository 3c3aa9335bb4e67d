"""What the gateway is told at start."""

from __future__ import annotations

from msgspec import Struct


class GatewayConfig(Struct, frozen=True, kw_only=True):
    """One gateway. Times in seconds."""

    host: str = "127.0.0.1"
    port: int = 8000
    """0: any free port."""
    model_path: str
    """Directory with `tokenizer.json`, `tokenizer_config.json` and, for its vocabulary size, `config.json`."""
    served_model_name: str
    request_timeout: float = 600.0
    """A request's deadline after its arrival."""
    body_timeout: float = 30.0
    """Most time a client may take to send a request's body."""
    max_body_bytes: int = 8 << 20
    max_concurrent: int = 512
    """Choices in flight; the next request gets 429 at once."""
    max_prompts: int = 128
    """Prompts in one completion request."""
    default_max_tokens: int = 4096
    """Bound of a chat answer whose request names none (the context bounds it too)."""
    stream_buffer: int = 1024
    """Tokens that a stream's reader may lag behind at the deadline and still be given a moment to take the rest."""
    answers_remembered: int = 4096
    classes: tuple[str, ...] = ()
    """Priority classes that a request may name. None: any name is taken."""
    allowed_hosts: tuple[str, ...] = ()
    """Names in `Host` besides loopback names and `host`; `*` allows any."""
    admin_key: str | None = None
    """Bearer key of the cluster paths; required where `host` is not loopback."""
