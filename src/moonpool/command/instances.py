"""The file of `moonpool gateway --instances`: vLLM servers, and the tokenizer of their model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import msgspec
import yaml
from msgspec import Meta, Struct

from moonpool.config import Config
from moonpool.core.vocabulary import PartId
from moonpool.errors import ConfigError
from moonpool.live.external.config import ExternalConfig, Instance, Role

MAX_FILE_BYTES = 1 << 20
ZMQ_ADDRESS = r"^(tcp|ipc)://\S+$"


class _Server(Struct, frozen=True, rename="kebab", forbid_unknown_fields=True):
    url: str
    id: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,55}$")] | None = None
    role: Role = "both"
    max_sequences: Annotated[int, Meta(ge=1, le=1 << 20)] = 256
    api_key_env: str | None = None
    priorities: bool = False
    kv_events: Annotated[str, Meta(pattern=ZMQ_ADDRESS)] | None = None
    kv_events_listen: Annotated[str, Meta(pattern=ZMQ_ADDRESS)] | None = None
    kv_events_replay: Annotated[str, Meta(pattern=ZMQ_ADDRESS)] | None = None
    pool: bool = False
    stall_seconds: Annotated[float, Meta(gt=0, le=86400)] = 120.0


class _File(Struct, frozen=True, rename="kebab", forbid_unknown_fields=True):
    model: Annotated[str, Meta(min_length=1)]
    tokenizer: Annotated[str, Meta(min_length=1)]
    instances: Annotated[list[_Server], Meta(min_length=1, max_length=1024)]
    kv_bytes_per_token: Annotated[int, Meta(ge=1, le=1 << 30)] = 131072
    pool_tokens: Annotated[int, Meta(ge=1, le=1 << 50)] = 1 << 20


class External(Struct, frozen=True):
    tokenizer: Path
    """A directory with `tokenizer.json`."""
    instances: ExternalConfig

    def named(self, config: Config) -> Config:
        """The same configuration, with the model's name in it."""
        model = msgspec.structs.replace(config.model, served_model_name=self.instances.model)
        return msgspec.structs.replace(config, model=model)


def read_instances(file: Path) -> External:
    """Raises ConfigError for any mistake in it, ModelError where there is no tokenizer."""
    read = _read(file)
    instances = tuple([_instance(file, at, server) for at, server in enumerate(read.instances)])
    for what, names in (("id", [i.id for i in instances]), ("url", [i.url for i in instances])):
        twice = next((name for at, name in enumerate(names) if name in names[:at]), None)
        if twice is not None:
            raise ConfigError(f"{file}: two instances have the {what} {twice}")
    roles = {i.role for i in instances}
    for one, other in (("prefill", "decode"), ("decode", "prefill")):
        if one in roles and not roles & {other, "both"}:
            raise ConfigError(f"{file}: there are {one} instances, but none of role {other} or both to go with them")
    config = ExternalConfig(read.model, instances, read.kv_bytes_per_token, read.pool_tokens)
    return External(_tokenizer(file, read.tokenizer), config)


def _read(file: Path) -> _File:
    try:
        data = file.read_bytes()
    except OSError as e:
        raise ConfigError(f"--instances: cannot read {file}: {e.strerror}") from None
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"{file} is larger than {MAX_FILE_BYTES} bytes: not a list of instances")
    try:
        return msgspec.convert(yaml.safe_load(data), _File)
    except yaml.YAMLError as e:
        mark = getattr(e, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{file}{line} is not YAML: {getattr(e, 'problem', None) or 'malformed'}") from None
    except msgspec.ValidationError as e:
        raise ConfigError(f"{file}: {e}") from None


def _instance(file: Path, at: int, server: _Server) -> Instance:
    where = f"{file}: instances[{at}]"
    url = server.url.rstrip("/").removesuffix("/v1")
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        port = 0
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or parts.query or parts.fragment:
        raise ConfigError(f"{where}: url {server.url!r} must be like http://host:8000")
    if server.kv_events is not None and server.kv_events_listen is not None:
        raise ConfigError(
            f"{where}: either this side connects (kv-events) or the server does (kv-events-listen), not both"
        )
    key = None
    if server.api_key_env is not None:
        key = os.environ.get(server.api_key_env)
        if not key:
            raise ConfigError(f"{where}: api-key-env: the environment has no {server.api_key_env}")
    return Instance(
        id=PartId(server.id or f"vllm-{at}"),
        url=url,
        role=server.role,
        max_sequences=server.max_sequences,
        api_key=key,
        priorities=server.priorities,
        kv_events=server.kv_events or server.kv_events_listen,
        listens_for_kv_events=server.kv_events_listen is not None,
        kv_events_replay=server.kv_events_replay,
        pool=server.pool,
        stall_seconds=server.stall_seconds,
    )


def _tokenizer(file: Path, name: str) -> Path:
    """A path is looked for beside the file."""
    directory = Path(name).expanduser()
    directory = directory if directory.is_absolute() else file.resolve().parent / directory
    if (directory / "tokenizer.json").is_file():
        return directory
    from moonpool.engine.model import resolve

    return resolve(name)
