"""What is to be simulated, from a YAML file: a setup's own keys and the Conductor's rules, in one flat list.

With the key `coupled` it is a cluster of so many coupled workers instead, which has few of those.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from moonpool.core.conductor import ConductorConfig
from moonpool.errors import ConfigError
from moonpool.sim.cluster import Setup
from moonpool.sim.coupled_cluster import CoupledSetup
from moonpool.sim.profile import Profile, load_profile

Given = dict[str, object]
"""What a file says, by key."""

MOST_INSTANCES = 4096
OWN_KEYS = ("name", "hardware", "dram-tokens", "ttft", "tbt")
ABOUT_MACHINES = ("name", "hardware", "dram-tokens")
COUPLED_KEYS = {"coupled": "workers", "coupled-mode": "mode", "chunk": "chunk_tokens", "routing": "routing"}
"""Of a cluster of coupled workers, with their names in `CoupledSetup`; it has `eviction` and its own keys besides."""
_NOT_KEYS = {"profile", "conductor", "seed", "slo", "prefill_cost", "decode_cost", "transfer_cost", "heartbeat_limit"}
"""Told by other keys, by the command line, or replaced by the hardware's."""


class Configuration(msgspec.Struct, frozen=True):
    name: str
    setup: Setup | CoupledSetup


def read_configuration(
    file: Path,
    base: Setup,
    hardware: Callable[[str], Profile] = load_profile,
    priorities: Callable[[Given, Setup, str], Setup] = lambda given, base, where: base,
) -> Configuration:
    """Keys that the file lacks are as in `base`; its name is the file's own without one. Raises ConfigError.

    `priorities` takes out what the file says of priority classes and gives `base` with that; `where` is the file.
    """
    given = _keys_of(file)
    if "hardware" in given:
        base = msgspec.structs.replace(base, profile=hardware(str(given["hardware"])))
    if "dram-tokens" in given:
        base = msgspec.structs.replace(base, profile=_with_dram(base.profile, given["dram-tokens"], file))
    name = str(given.get("name", file.stem))
    if "coupled" not in given:
        base = priorities(given, base, str(file))
    changes = {key: given[key] for key in given if key not in ABOUT_MACHINES}
    return Configuration(name, (_coupled if "coupled" in given else _changed)(base, changes, file))


def _keys_of(file: Path) -> Given:
    try:
        given = msgspec.yaml.decode(file.read_bytes())
    except OSError as e:
        raise ConfigError(f"cannot read the configuration {file}: {e.strerror}") from None
    except msgspec.DecodeError as e:
        raise ConfigError(f"{file} is no YAML: {' '.join(str(e).split())}") from None
    if given is None:
        given = {}
    if not isinstance(given, dict):
        raise ConfigError(f"{file}: must be keys with values, such as `placement: load-balance`")
    known = configuration_keys()
    for key in given:
        if key not in known:
            raise ConfigError(f"{file}: unknown key `{key}`; the keys are {', '.join(known)}")
        if key in COUPLED_KEYS and "coupled" not in given:
            raise ConfigError(f"{file}: `{key}` is of coupled workers; give `coupled`, their number")
    return given


def configuration_keys() -> tuple[str, ...]:
    """All that a file may say."""
    return (*OWN_KEYS, *(_kebab(name) for name in (*_setup_fields(), *_rule_fields())), *COUPLED_KEYS)


def _coupled(base: Setup, given: Given, file: Path) -> CoupledSetup:
    raw: Given = {"profile": msgspec.to_builtins(base.profile), "type": CoupledSetup.__name__}
    slo = msgspec.to_builtins(base.conductor.slo)
    for key, value in given.items():
        if key in ("ttft", "tbt"):
            slo[key] = value
        elif key in COUPLED_KEYS or key == "eviction":
            raw[COUPLED_KEYS.get(key, key)] = value
        else:
            raise ConfigError(
                f"{file}: coupled workers have no `{key}`; their keys are "
                f"{', '.join((*OWN_KEYS, 'eviction', *COUPLED_KEYS))}"
            )
    try:
        found = msgspec.convert(raw | {"slo": slo}, CoupledSetup)
    except msgspec.ValidationError as e:
        told = str(e).replace("$.", "")
        for key, field in COUPLED_KEYS.items():
            told = told.replace(f"`{field}`", f"`{key}`")
        raise ConfigError(f"{file}: {told}") from None
    for key, count in (("coupled", found.workers), ("chunk", found.chunk_tokens)):
        most = MOST_INSTANCES if key == "coupled" else found.profile.context_tokens
        if not 1 <= count <= most:
            raise ConfigError(f"{file}: `{key}` is {count}; give a number from 1 to {most}")
    return found


def _changed(base: Setup, given: Given, file: Path) -> Setup:
    raw = msgspec.to_builtins(base)
    rules = raw["conductor"]
    for key, value in given.items():
        field = key.replace("-", "_")
        if key in ("ttft", "tbt"):
            rules["slo"][key] = value
        elif field in _setup_fields():
            raw[field] = value
        else:
            rules[field] = value
    try:
        changed = msgspec.convert(raw, Setup)
    except msgspec.ValidationError as e:
        raise ConfigError(f"{file}: {str(e).replace('$.conductor.', '').replace('$.', '').replace('_', '-')}") from None
    for what, count in (("prefill", changed.prefill), ("decode", changed.decode)):
        if not 1 <= count <= MOST_INSTANCES:
            raise ConfigError(f"{file}: `{what}` is {count}; give a number from 1 to {MOST_INSTANCES}")
    check_pipeline(changed, f"{file}: `pipeline`")
    return changed


def _with_dram(profile: Profile, count: object, file: Path) -> Profile:
    if not isinstance(count, int) or isinstance(count, bool) or count < profile.block_tokens:
        raise ConfigError(
            f"{file}: `dram-tokens` is {count}; give the tokens of KVCache that a machine's DRAM holds, at least "
            f"{profile.block_tokens}"
        )
    return msgspec.structs.replace(profile, dram_tokens=count)


def check_pipeline(setup: Setup, where: str) -> None:
    """Raises ConfigError for machines that form no whole pipelines."""
    pipeline, layers = setup.pipeline, setup.profile.layers
    if not 1 <= pipeline <= layers or setup.prefill % pipeline:
        raise ConfigError(
            f"{where} is {pipeline}; it must divide the {setup.prefill} prefill machines and be at most {layers}, the "
            f"layers of {setup.profile.name}"
        )


def _setup_fields() -> tuple[str, ...]:
    return tuple(name for name in Setup.__struct_fields__ if name not in _NOT_KEYS)


def _rule_fields() -> tuple[str, ...]:
    return tuple(name for name in ConductorConfig.__struct_fields__ if name not in _NOT_KEYS)


def _kebab(name: str) -> str:
    return name.replace("_", "-")
