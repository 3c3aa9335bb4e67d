"""Hardware profiles by name: those that come with Moonpool, one's own files, and `local`, this machine as measured."""

from __future__ import annotations

from pathlib import Path

from moonpool.engine.model import home
from moonpool.errors import ConfigError
from moonpool.sim.profile import Profile, load_profile

LOCAL = "local"


def local_file() -> Path:
    return home() / "profiles" / f"{LOCAL}.yaml"


def hardware_profile(name: str) -> Profile:
    """Raises ConfigError."""
    if name != LOCAL:
        return load_profile(name)
    file = local_file()
    if not file.is_file():
        raise ConfigError(f"this machine was not measured yet ({file} is missing); `moonpool calibrate` does it")
    return load_profile(str(file))
