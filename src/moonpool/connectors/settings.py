"""What `kv_connector_extra_config` says, and which vLLM it may be said to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from moonpool.errors import ConfigError

SUPPORTED = ((0, 32),)
"""(major, minor) of the vLLM versions that the connector is tested with."""
WHOLE = frozenset({"FullAttentionSpec", "MLAAttentionSpec"})
"""Kinds of KVCache whose blocks stay as long as their request."""

Seconds = Annotated[float, Meta(gt=0, le=600)]


class ConnectorSettings(Struct, frozen=True, forbid_unknown_fields=True):
    node: Annotated[str, Meta(min_length=1)]
    """The path of the socket of this host's node."""
    name: str = ""
    """For the node's log; by default vLLM's engine id."""
    model: str = ""
    """Names the weights where they cannot be read (no local safetensors): equal names must mean equal weights."""
    lookup_seconds: Seconds = 0.05
    """A pool that has not said by then what it has of a prompt has nothing of it."""
    load_seconds: Seconds = 5.0
    """Blocks that are not in vLLM's cache by then are computed."""
    save_seconds: Seconds = 1.0
    """The most that a step waits for what it stores; the rest is given up."""
    allow_untested_vllm: bool = False


def read_settings(extra: Mapping[str, Any] | None) -> ConnectorSettings:
    """Raises ConfigError."""
    try:
        settings = msgspec.convert(dict(extra or {}), ConnectorSettings)
    except msgspec.ValidationError as e:
        raise ConfigError(
            f"kv_connector_extra_config: {e}; it takes {', '.join(ConnectorSettings.__struct_fields__)}, of which only "
            '"node" is required'
        ) from None
    if "/" not in settings.node:
        raise ConfigError(
            f"kv_connector_extra_config: node is {settings.node!r}; give the path of the socket of a node on this host "
            "(RUN_DIR/NAME.sock of `moonpool node`): every host that runs vLLM has a node of its own"
        )
    return settings


def check_version(version: str, allows_others: bool) -> None:
    """Raises ConfigError for a vLLM that the connector is not tested with."""
    digits = version.split("+")[0].split(".")[:2]
    minor = tuple(int(part) for part in digits) if all(part.isdigit() for part in digits) else ()
    if minor in SUPPORTED or allows_others:
        return
    raise ConfigError(
        f'{untested(version)}, or say "allow_untested_vllm": true in kv_connector_extra_config (its connector '
        "interface changes between versions)"
    )


def untested(version: str) -> str:
    known = ", ".join(f"{major}.{minor}" for major, minor in SUPPORTED)
    return f"vLLM {version}: this Moonpool is tested with vLLM {known}; install one of those"


def check_policy(policy: str) -> None:
    """Raises ConfigError unless vLLM computes what cannot be loaded."""
    if policy != "recompute":
        raise ConfigError(
            f"kv_load_failure_policy is {policy!r}: vLLM would fail a request whose blocks leave the pool just "
            'before they are loaded; put "kv_load_failure_policy": "recompute" into --kv-transfer-config'
        )


def check_supported(config: Any, caches: Any) -> None:
    """`config`: vLLM's VllmConfig; `caches`: its KVCacheConfig. Raises ConfigError for what it cannot move right."""
    parallel = config.parallel_config
    for what in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, what, 1) > 1:
            raise ConfigError(f"{what} {getattr(parallel, what)} is not supported yet: use tensor parallelism")
    if config.speculative_config is not None:
        raise ConfigError("speculative decoding is not supported yet: the draft model's blocks would be shared too")
    specs = [spec for group in caches.kv_cache_groups for spec in layer_specs(group.kv_cache_spec)]
    kinds = sorted({type(spec).__name__ for spec in specs})
    # Others drop blocks of a request that goes on: what is known of its blocks by then is wrong.
    if len(caches.kv_cache_groups) != 1 or not WHOLE.issuperset(kinds):
        raise ConfigError(
            f"models whose KVCache is {', '.join(kinds)} in {len(caches.kv_cache_groups)} groups are not supported "
            "yet: only those that attend to all of a prompt in every layer"
        )


def layer_specs(spec: Any) -> list[Any]:
    """vLLM's KVCacheSpec of each layer of a group, or one for all."""
    inner = getattr(spec, "kv_cache_specs", None)
    return [spec] if inner is None else list(inner.values())
