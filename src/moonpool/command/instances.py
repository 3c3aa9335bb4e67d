"""The file of `moonpool gateway --instances`: vLLM servers, and the tokenizer of their model."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from pathlib import Path
from typing import Annotated, Literal
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
OWN_NAMES = r"conductor|external|(gateway|node|vllm-pool)(-[0-9]+)?|.*\.cache"
HOST_NAME = r"(?=.*[A-Za-z])[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?"


class Server(Struct, frozen=True, rename="kebab", forbid_unknown_fields=True):
    url: str
    id: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,55}$")] | None = None
    role: Role = "both"
    max_sequences: Annotated[int, Meta(ge=1, le=1 << 20)] = 256
    api_key_env: str | None = None
    priorities: bool = False
    kv_events: Annotated[str, Meta(pattern=ZMQ_ADDRESS)] | None = None
    kv_events_listen: Annotated[str, Meta(pattern=ZMQ_ADDRESS)] | None = None
    kv_events_replay: Annotated[str, Meta(pattern=ZMQ_ADDRESS)] | None = None
    pool: bool | Literal["estimated"] = False
    kv_transfer_params: bool = False
    stall_seconds: Annotated[float, Meta(gt=0, le=86400)] = 120.0


class _File(Struct, frozen=True, rename="kebab", forbid_unknown_fields=True):
    model: Annotated[str, Meta(min_length=1)]
    tokenizer: Annotated[str, Meta(min_length=1)]
    instances: Annotated[list[Server], Meta(max_length=1024)] = []
    allowed_addresses: Annotated[list[str], Meta(max_length=1024)] = []
    kv_bytes_per_token: Annotated[int, Meta(ge=1, le=1 << 30)] = 131072
    pool_tokens: Annotated[int, Meta(ge=1, le=1 << 50)] = 1 << 20


class Allowed(Struct, frozen=True):
    """Where servers may be that are registered while the gateway runs."""

    networks: tuple[IPv4Network | IPv6Network, ...] = ()
    names: frozenset[str] = frozenset()
    """Of hosts."""

    def has(self, host: str) -> bool:
        """A name counts only by itself, whatever it resolves to."""
        try:
            address = ip_address(host)
        except ValueError:
            return host.lower() in self.names
        return any(address in network for network in self.networks)


class External(Struct, frozen=True):
    tokenizer: Path
    """A directory with `tokenizer.json`."""
    instances: ExternalConfig
    allowed: Allowed = Allowed()
    key_names: frozenset[str] = frozenset()
    """Environment variables with keys of servers that the file names."""

    def named(self, config: Config) -> Config:
        """The same configuration, with the model's name in it."""
        model = msgspec.structs.replace(config.model, served_model_name=self.instances.model)
        return msgspec.structs.replace(config, model=model)


def read_instances(file: Path) -> External:
    """Raises ConfigError for any mistake in it, ModelError where there is no tokenizer."""
    read = _read(file)
    allowed = _allowed(file, read.allowed_addresses)
    if not read.instances and not read.allowed_addresses:
        raise ConfigError(f"{file}: instances: none is given, and no allowed-addresses from where others may come")
    instances = tuple(
        [
            instance_of(f"{file}: instances[{at}]", server, server.id or f"vllm-{at}")
            for at, server in enumerate(read.instances)
        ]
    )
    for what, names in (("id", [i.id for i in instances]), ("url", [i.url for i in instances])):
        twice = next((name for at, name in enumerate(names) if name in names[:at]), None)
        if twice is not None:
            raise ConfigError(f"{file}: two instances have the {what} {twice}")
    roles = {i.role for i in instances}
    for one, other in (("prefill", "decode"), ("decode", "prefill")):
        if one in roles and not roles & {other, "both"}:
            raise ConfigError(f"{file}: there are {one} instances, but none of role {other} or both to go with them")
    if len({i.kv_transfer_params for i in instances if i.role != "both"}) > 1:
        raise ConfigError(f"{file}: kv-transfer-params: all instances of role prefill and decode must have it, or none")
    config = ExternalConfig(read.model, instances, read.kv_bytes_per_token, read.pool_tokens)
    keys = frozenset(server.api_key_env for server in read.instances if server.api_key_env is not None)
    return External(_tokenizer(file, read.tokenizer), config, allowed, keys)


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


def instance_of(where: str, server: Server, id_: str) -> Instance:
    """`where`: for messages. Raises ConfigError."""
    url = server.url.rstrip("/").removesuffix("/v1")
    if not _is_url(url):
        raise ConfigError(f"{where}: url {server.url!r} must be like http://host:8000")
    if re.fullmatch(OWN_NAMES, id_):
        raise ConfigError(f"{where}: id {id_} is what a part of the cluster itself may be called: give it another")
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
        id=PartId(id_),
        url=url,
        role=server.role,
        max_sequences=server.max_sequences,
        api_key=key,
        priorities=server.priorities,
        kv_events=server.kv_events or server.kv_events_listen,
        listens_for_kv_events=server.kv_events_listen is not None,
        kv_events_replay=server.kv_events_replay,
        pool="exact" if server.pool is True else server.pool or "no",
        kv_transfer_params=server.kv_transfer_params,
        stall_seconds=server.stall_seconds,
    )


def _is_url(url: str) -> bool:
    """Whether everybody reads the same host out of it: whoever allows it, and whoever connects to it."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return False
    if not url.isascii() or not url.isprintable() or set(" \\@") & set(url) or parts.query or parts.fragment:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname) and port != 0


def _allowed(file: Path, entries: Sequence[str]) -> Allowed:
    networks: list[IPv4Network | IPv6Network] = []
    names: list[str] = []
    for entry in entries:
        try:
            networks.append(ip_network(entry, strict=False))
        except ValueError:
            if not re.fullmatch(HOST_NAME, entry):
                shown = f"{file}: allowed-addresses: {entry!r}"
                raise ConfigError(f"{shown} must be an address, a network like 10.0.0.0/24, or a host's name") from None
            names.append(entry.lower())
    return Allowed(tuple(networks), frozenset(names))


def _tokenizer(file: Path, name: str) -> Path:
    """A path is looked for beside the file."""
    directory = Path(name).expanduser()
    directory = directory if directory.is_absolute() else file.resolve().parent / directory
    if (directory / "tokenizer.json").is_file():
        return directory
    from moonpool.engine.model import resolve

    return resolve(name)
