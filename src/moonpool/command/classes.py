"""Priority classes as users write them: a list in YAML, in the configuration file or in a file of its own.

classes:
  - {name: interactive, rank: 0, slo-ttft: 2s, slo-tbt: 100ms, share: 0.3}
  - {name: standard, rank: 10, slo-ttft: 30s}
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import yaml

from moonpool.core.classes import BATCH, check_classes
from moonpool.core.vocabulary import PriorityClass, Slo
from moonpool.errors import ConfigError

MAX_FILE_BYTES = 1 << 20
FIELDS = ("name", "rank", "slo-ttft", "slo-tbt", "share")


def read_classes(raw: object, where: str, duration: Callable[[str], float]) -> tuple[PriorityClass, ...]:
    """From the list itself or the path of a file that holds it (alone, or under `classes`). Raises ConfigError.

    `where` begins every message; `duration` reads `30s`.
    """
    if isinstance(raw, str):
        where, raw = f"{where} {raw}", _read_file(raw, where)
    if not isinstance(raw, list):
        raise ConfigError(f"{where}: must be a list of classes, or a YAML file with one")
    classes = tuple(_read_class(entry, f"{where}[{at}]", duration) for at, entry in enumerate(raw))
    try:
        check_classes(classes)
    except ValueError as e:
        raise ConfigError(f"{where}: {e}") from None
    return classes


def _read_file(name: str, where: str) -> object:
    try:
        with Path(name).open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
        if len(text) > MAX_FILE_BYTES:
            raise ConfigError(f"{where} {name}: larger than {MAX_FILE_BYTES} bytes: not a list of classes")
        found = yaml.safe_load(text)
    except OSError as e:
        raise ConfigError(f"{where}: cannot read {name}: {e.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError):
        raise ConfigError(f"{where} {name}: not YAML") from None
    return found.get("classes") if isinstance(found, dict) else found


def _read_class(entry: object, where: str, duration: Callable[[str], float]) -> PriorityClass:
    if not isinstance(entry, dict):
        raise ConfigError(f"{where}: must be a mapping with {', '.join(FIELDS)}")
    for name in entry:
        if name not in FIELDS:
            raise ConfigError(f"{where}: unknown key {str(name)!r}; a class has {', '.join(FIELDS)}")
    name, rank, share = entry.get("name"), entry.get("rank", 0), entry.get("share", 0.0)
    if not isinstance(name, str):
        raise ConfigError(f"{where}.name: must be text")
    if isinstance(rank, bool) or not isinstance(rank, int):
        raise ConfigError(f"{where}.rank {rank!r}: must be a whole number")
    if isinstance(share, bool) or not isinstance(share, int | float):
        raise ConfigError(f"{where}.share {share!r}: must be a number from 0 to below 1")
    ttft, tbt = (_seconds(entry.get(key), f"{where}.{key}", duration) for key in ("slo-ttft", "slo-tbt"))
    return PriorityClass(name, rank, Slo(ttft, tbt), float(share))


def _seconds(value: object, where: str, duration: Callable[[str], float]) -> float | None:
    if value is None:
        return None
    try:
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ValueError
        return duration(value) if isinstance(value, str) else float(value)
    except ValueError:
        raise ConfigError(f"{where} {value!r}: must be a duration like 30s or 200ms, above 0") from None


def read_mix(
    text: str | None, classes: tuple[PriorityClass, ...], where: str = "--mix"
) -> tuple[tuple[str, float], ...]:
    """What share of requests asks for which class: `high=0.3,low=0.7`. Not given: all the same. Raises ConfigError."""
    known = [*(c.name for c in classes), BATCH.name]
    if text is None:
        return tuple((c.name, 1.0) for c in classes)
    found = []
    for word in text.split(","):
        name, _, share = (part.strip() for part in word.partition("="))
        if name not in known:
            raise ConfigError(f"{where} {word.strip()!r}: must be CLASS=SHARE, with one of {', '.join(known)}")
        try:
            found.append((name, float(share)))
        except ValueError:
            raise ConfigError(f"{where} {word.strip()!r}: {share!r} is not a number") from None
        if not 0 < found[-1][1] < float("inf"):
            raise ConfigError(f"{where} {word.strip()!r}: a share must be above 0")
    return tuple(found)
