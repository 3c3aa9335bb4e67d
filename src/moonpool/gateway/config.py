"""What the gateway is told at start."""

from __future__ import annotations

from msgspec import Struct

from moonpool.core.classes import BATCH
from moonpool.core.vocabulary import PriorityClass


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
    max_requests: int = 512
    """Choices in flight; the next request gets 429 at once."""
    max_prompts: int = 128
    """Prompts in one completion request."""
    default_max_tokens: int = 4096
    """Bound of a chat answer whose request names none (the context bounds it too)."""
    stream_buffer: int = 1024
    """Tokens that a stream's reader may lag behind at the deadline and still be given a moment to take the rest."""
    answers_remembered: int = 4096
    classes: tuple[PriorityClass, ...] = ()
    """That are configured. None: a request may name any."""
    caching_dir: str | None = None
    """Where cached contexts are kept over restarts; None: nowhere."""
    caching_quota: int | None = None
    """Tokens that one owner's cached contexts may pin together."""
    allowed_hosts: tuple[str, ...] = ()
    """Names in `Host` besides loopback names and `host`; `*` allows any."""
    keys: str | None = None
    """File with API keys; required where `host` is not loopback. None: no keys are asked for."""

    @property
    def class_names(self) -> tuple[str, ...]:
        """That requests may name; none where none is configured."""
        return (*(c.name for c in self.classes), BATCH.name) if self.classes else ()
