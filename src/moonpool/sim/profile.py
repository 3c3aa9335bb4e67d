"""What the simulated machines are made of: data files, one per hardware and model, each number with its source."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import msgspec
from msgspec import Struct

from moonpool.core.cost import DecodeCoefficients, PrefillCoefficients
from moonpool.errors import ConfigError

SUFFIX = ".yaml"
NONE_AT_ALL = ("ssd_bytes", "activation_bytes_per_token")
"""May be 0."""
KV_GRAIN = 16
"""Bytes: one word of K and one of V, the least of a token's KV that the timed engine keeps (`engine/timed.py`)."""


class Profile(Struct, frozen=True, forbid_unknown_fields=True):
    """One machine: a prefill or decode instance, the node beside it, and its link. Raises ValueError for nonsense."""

    name: str
    sources: str
    """Where the numbers come from."""
    block_tokens: int
    kv_bytes_per_token: int
    prefill: PrefillCoefficients
    decode: DecodeCoefficients
    chunk_tokens: int
    """Most prompt tokens of one prefill step."""
    context_tokens: int
    vram_tokens: int
    """Tokens of KV that the accelerators of one instance hold."""
    slots: int
    """Most requests in one decode batch."""
    dram_tokens: int
    """Tokens of KV that one node's arena holds."""
    link_bytes_per_second: float
    link_latency: float
    host_bytes_per_second: float
    """Between a machine's DRAM and its accelerators."""
    ssd_bytes: int = 0
    """Of the node's SSDs; 0: it has none."""
    ssd_read_bytes_per_second: float = 1e9
    ssd_write_bytes_per_second: float = 1e9
    layers: int = 1
    """That a pipeline group divides over its stages."""
    activation_bytes_per_token: int = 0
    """What a stage sends to the next for each token."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if not isinstance(value, int | float) or 0 < value < float("inf"):
                continue
            if value != 0 or name not in NONE_AT_ALL:
                raise ValueError(f"`{name}` is {value!r}; give a finite number above 0")
        if self.vram_tokens < self.block_tokens or self.dram_tokens < self.block_tokens:
            raise ValueError("`vram_tokens` and `dram_tokens` must hold at least one block")

    @property
    def block_bytes(self) -> int:
        return self.block_tokens * self.kv_bytes_per_token


def scaled(profile: Profile, slow_down: float = 1.0, shrink_kv: float = 1.0) -> Profile:
    """One that does the same in `slow_down` times the time with `shrink_kv` times fewer bytes of KV.

    Tokens, slots and layers stay as they are: what fits, and what is decided, stays the same. Bytes of a token are
    rounded to whole KV_GRAINs; bandwidths follow both factors, so that a token's KV takes `slow_down` times as long.
    """
    if slow_down == shrink_kv == 1.0:
        return profile
    kv = max(round(profile.kv_bytes_per_token / shrink_kv / KV_GRAIN), 1) * KV_GRAIN
    share = kv / profile.kv_bytes_per_token
    prefill, decode, rate = profile.prefill, profile.decode, share / slow_down
    return msgspec.structs.replace(
        profile,
        name=f"{profile.name}, {slow_down:g} times slower, {kv} bytes of KV a token",
        kv_bytes_per_token=kv,
        prefill=PrefillCoefficients(
            prefill.fixed * slow_down, prefill.per_token * slow_down, prefill.per_token_squared * slow_down
        ),
        decode=DecodeCoefficients(
            decode.fixed * slow_down, decode.per_request * slow_down, decode.per_context_token * slow_down
        ),
        link_bytes_per_second=profile.link_bytes_per_second * rate,
        link_latency=profile.link_latency * slow_down,
        host_bytes_per_second=profile.host_bytes_per_second * rate,
        ssd_bytes=round(profile.ssd_bytes * share),
        ssd_read_bytes_per_second=profile.ssd_read_bytes_per_second * rate,
        ssd_write_bytes_per_second=profile.ssd_write_bytes_per_second * rate,
        activation_bytes_per_token=round(profile.activation_bytes_per_token * share),
    )


def profile_names() -> list[str]:
    """Those that come with Moonpool."""
    folder = resources.files("moonpool.sim") / "profiles"
    return sorted(entry.name.removesuffix(SUFFIX) for entry in folder.iterdir() if entry.name.endswith(SUFFIX))


def load_profile(name: str) -> Profile:
    """By name, or from a YAML file of one's own. Raises ConfigError."""
    if name in profile_names():
        data = (resources.files("moonpool.sim") / "profiles" / f"{name}{SUFFIX}").read_bytes()
    elif Path(name).suffix in (SUFFIX, ".yml"):
        try:
            data = Path(name).read_bytes()
        except OSError as e:
            raise ConfigError(f"cannot read the hardware profile {name}: {e.strerror}") from None
    else:
        raise ConfigError(f"no hardware profile {name!r}; choose one of {', '.join(profile_names())}, or a .yaml file")
    try:
        return msgspec.yaml.decode(data, type=Profile)
    except (msgspec.MsgspecError, ValueError) as e:
        raise ConfigError(f"hardware profile {name}: {e}") from None
