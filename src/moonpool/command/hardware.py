"""Hardware profiles by name: those that come with Moonpool, one's own files, and `local`, this machine as measured.

A live cluster on the timed engine can be such hardware: what it takes from a profile is here, too.
"""

from __future__ import annotations

from math import gcd
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from msgspec import Struct, structs

from moonpool.engine.model import home
from moonpool.errors import ConfigError
from moonpool.sim.profile import KV_GRAIN, Profile, load_profile, scaled

if TYPE_CHECKING:
    from moonpool.config import Config
    from moonpool.engine.timed import TimedConfig

LOCAL = "local"
MOST_LAYERS = 4
"""That the timed engine divides a token's KV into: as many sleeps and transfers has each step of it."""
LEAST_DRAM = 1 << 20
Section = TypeVar("Section", bound=Struct)


def local_file() -> Path:
    return home() / "profiles" / f"{LOCAL}.yaml"


def hardware_profile(name: str, slow_down: float = 1.0, shrink_kv: float = 1.0) -> Profile:
    """So many times slower, with so many times fewer bytes of KV. Raises ConfigError."""
    if name != LOCAL:
        return scaled(load_profile(name), slow_down, shrink_kv)
    file = local_file()
    if not file.is_file():
        raise ConfigError(f"this machine was not measured yet ({file} is missing); `moonpool calibrate` does it")
    return scaled(load_profile(str(file)), slow_down, shrink_kv)


def hardware_of(config: Config) -> Profile | None:
    """What the timed engine is to be; None where the configuration names nothing. Raises ConfigError."""
    model = config.model
    if model.hardware is None:
        for key, value in (("slow-down", model.slow_down), ("shrink-kv", model.shrink_kv)):
            if value != 1.0:
                raise ConfigError(
                    f"--{key} {value:g} is of a hardware profile: give --hardware, such as a800-llama2-70b"
                )
        return None
    if model.engine != "timed":
        raise ConfigError(
            f"--hardware {model.hardware} is for --engine timed: the {model.engine} engine is as fast as this machine"
        )
    return hardware_profile(model.hardware, model.slow_down, model.shrink_kv)


def sized(config: Config) -> Config:
    """With `hardware` the sizes that are at their defaults are the profile's, as a simulated cluster has them.

    Its SSD is not: that takes the room it says. Raises ConfigError.
    """
    profile = hardware_of(config)
    if profile is None:
        return config
    pool = {
        "block_size": profile.block_tokens,
        "dram_per_node": max(profile.dram_tokens * profile.kv_bytes_per_token, LEAST_DRAM),
        "decode_pages": profile.vram_tokens // profile.block_tokens,
        # What is prefilled needs no more than a few of the longest prompts (as in `sim/prefill.py`).
        "prefill_pages": 4 * (profile.context_tokens // profile.block_tokens + 1),
    }
    batch = {
        "prefill_chunk": profile.chunk_tokens,
        "pipeline_chunk": profile.chunk_tokens,
        "max_batch": profile.slots,
    }
    return structs.replace(config, pool=_filled(config.pool, pool), batch=_filled(config.batch, batch))


def timed_config(profile: Profile) -> TimedConfig:
    from moonpool.engine.timed import TimedConfig

    grains = profile.kv_bytes_per_token // KV_GRAIN
    if grains * KV_GRAIN != profile.kv_bytes_per_token:
        raise ConfigError(
            f"{profile.name}: {profile.kv_bytes_per_token} bytes of KV a token are no multiple of {KV_GRAIN}; "
            "--shrink-kv makes them one"
        )
    layers = gcd(grains, MOST_LAYERS)
    return TimedConfig(
        layers=layers,
        words_per_half=grains // layers,
        context_tokens=profile.context_tokens,
        prefill=profile.prefill,
        decode=profile.decode,
    )


def _filled(section: Section, own: dict[str, int]) -> Section:
    """Those of `own` that the section has at its default."""
    default = type(section)()
    return structs.replace(
        section, **{name: value for name, value in own.items() if getattr(section, name) == getattr(default, name)}
    )
