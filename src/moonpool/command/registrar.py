"""External instances that come and go while the gateway runs: what `/cluster/instances` does with what it is given."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from moonpool.command.instances import External, Server, instance_of
from moonpool.core.vocabulary import PartId
from moonpool.errors import ConfigError
from moonpool.gateway.registry import Registry
from moonpool.live.external.config import Instance, Role
from moonpool.live.external.run import Instances

_ZMQ_HOST = re.compile(r"tcp://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}")


class Shown(Struct, frozen=True):
    """Of one instance; never its key."""

    id: PartId
    url: str
    role: Role


def registry_of(external: External, instances: Instances) -> Registry:
    """`external`: what the file says, above all where others may be."""

    async def add(body: bytes) -> Shown:
        instance = read_instance(external, body, {other.id for other in instances.all})
        await instances.add(instance)
        return _shown(instance)

    async def remove(id_: str) -> bool:
        return await instances.remove(PartId(id_))

    return Registry(lambda: [_shown(instance) for instance in instances.all], add, remove)


def read_instance(external: External, body: bytes, taken: set[PartId]) -> Instance:
    """One entry of the file's `instances`, as JSON. Raises ConfigError, also for an address that is not allowed."""
    try:
        server = msgspec.json.decode(body, type=Server)
    except msgspec.DecodeError as e:
        raise ConfigError(f"this is no instance: {e}") from None
    if server.api_key_env is not None and server.api_key_env not in external.key_names:
        # Else any secret of this process could be sent for.
        raise ConfigError(f"api-key-env: {server.api_key_env} is not one that the --instances file names")
    free = next(PartId(f"vllm-{at}") for at in range(len(taken) + 1) if f"vllm-{at}" not in taken)
    instance = instance_of("this instance", server, server.id or free)
    for address in (server.url, server.kv_events, server.kv_events_listen, server.kv_events_replay):
        if address is not None and not external.allowed.has(_host(address)):
            raise ConfigError(f"{address} is not among the allowed-addresses of the --instances file")
    return instance


def _host(address: str) -> str:
    """Empty where it has none, or may have more: ZMQ connects to a second one after a semicolon."""
    if address.lower().startswith("http"):
        return urlsplit(address).hostname or ""
    found = _ZMQ_HOST.fullmatch(address)
    return found[1].strip("[]") if found else ""


def _shown(instance: Instance) -> Shown:
    return Shown(instance.id, instance.url, instance.role)
