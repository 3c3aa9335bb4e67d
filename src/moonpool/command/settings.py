"""Reads the configuration: defaults, then one YAML file, then flags. Every mistake is one line that names the key."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

import msgspec
import msgspec.inspect as shape
import yaml

from moonpool.command.classes import read_classes
from moonpool.config import Config
from moonpool.errors import ConfigError

SIZES = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40} | {
    "kB": 10**3,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
DURATIONS = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
MAX_FILE_BYTES = 1 << 20

Raw = str | int | float | bool | list[object] | None


class Key(msgspec.Struct, frozen=True):
    """One configuration key: where it lives in the tree and what it takes."""

    name: str
    """Kebab-case, as in YAML and as a flag."""
    section: str
    field: str
    description: str
    default: object
    type: shape.Type
    unit: str | None
    choices: tuple[str, ...]
    is_optional: bool
    is_switch: bool
    is_classes: bool
    """A list of priority classes."""


def keys_of(sections: Iterable[str] = Config.__struct_fields__) -> dict[str, Key]:
    """The keys of these sections of the tree, by name, in the tree's order."""
    wanted = set(sections)
    return {key.name: key for section in Config.__struct_fields__ if section in wanted for key in _keys(section)}


@cache
def _keys(section: str) -> tuple[Key, ...]:
    described = shape.type_info(_section_type(section))
    return tuple(_key(section, field) for field in described.fields) if isinstance(described, shape.StructType) else ()


def read_config(
    file: Path | None, flags: Mapping[str, Raw], sections: Iterable[str] = Config.__struct_fields__
) -> Config:
    """The tree from defaults, `file` and `flags` (None: not given). Raises ConfigError for any mistake in them."""
    keys = keys_of(sections)
    values: dict[str, tuple[str, Raw]] = {}
    if file is not None:
        values.update({name: (f"{file}: {name}", value) for name, value in _read_file(file, keys).items()})
    values.update({name: (f"--{name}", value) for name, value in flags.items() if value is not None})
    tree: dict[str, dict[str, object]] = {}
    for name, (where, raw) in values.items():
        key = keys[name]
        tree.setdefault(key.section, {})[key.field] = _value(key, where, raw)
    return msgspec.convert(tree, Config)


def duration(text: str) -> float:
    """Seconds of `30s`, `1.5m`, `200ms` or a plain number. Raises ValueError."""
    return _measure(text, DURATIONS)


def size(text: str) -> int:
    """Bytes of `1GiB`, `512 MiB`, `2GB` or a plain number. Raises ValueError."""
    return int(_measure(text, SIZES))


def _measure(text: str, units: Mapping[str, float]) -> float:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2] not in units:
        raise ValueError(text)
    return float(match[1]) * units[match[2]]


def _read_file(file: Path, keys: Mapping[str, Key]) -> dict[str, Raw]:
    try:
        text = file.read_bytes()[: MAX_FILE_BYTES + 1].decode()
        if len(text) > MAX_FILE_BYTES:
            raise ConfigError(f"{file} is larger than {MAX_FILE_BYTES} bytes: not a configuration file")
        document = yaml.compose(text, Loader=yaml.SafeLoader)
        values = yaml.safe_load(text)
    except OSError as e:
        raise ConfigError(f"cannot read {file}: {e.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{file} is not UTF-8 text") from None
    except yaml.YAMLError as e:
        mark = getattr(e, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{file}{line} is not YAML: {getattr(e, 'problem', None) or 'malformed'}") from None
    if document is None:
        return {}
    if not isinstance(document, yaml.MappingNode):
        raise ConfigError(f"{file} must hold `key: value` lines")
    _check_names(file, document, keys)
    return dict(values)


def _check_names(file: Path, document: yaml.MappingNode, keys: Mapping[str, Key]) -> None:
    seen: set[str] = set()
    for node, _ in document.value:
        name = str(node.value)
        where = f"{file} line {node.start_mark.line + 1}"
        if name not in keys:
            raise ConfigError(f"{where}: unknown key `{name}`{_nearest(name, keys)}")
        if name in seen:
            raise ConfigError(f"{where}: `{name}` is given twice")
        seen.add(name)


def _nearest(name: str, known: Iterable[str]) -> str:
    spelt = name.replace("_", "-").lower()
    near = difflib.get_close_matches(spelt, list(known), n=1, cutoff=0.5)
    return f", did you mean `{near[0]}`?" if near else ""


def _value(key: Key, where: str, raw: Raw) -> object:
    """`raw` as the key's type, limits checked."""
    if key.is_classes:
        return read_classes(raw, where, duration)
    given = raw
    try:
        if key.unit == "bytes" and isinstance(raw, str):
            raw = size(raw)
        elif key.unit == "seconds" and isinstance(raw, str):
            raw = duration(raw)
        if isinstance(raw, bool) and not key.is_switch:
            raise ValueError
        section = msgspec.convert({key.field: raw}, _section_type(key.section), strict=False)
    except (ValueError, msgspec.ValidationError):
        hint = _nearest(str(given), key.choices) if key.choices else ""
        raise ConfigError(f"{where} {given!r}: must be {_wanted(key)}{hint}") from None
    return getattr(section, key.field)


def _section_type(section: str) -> type[msgspec.Struct]:
    kind: type[msgspec.Struct] = type(getattr(Config(), section))
    return kind


def _wanted(key: Key) -> str:
    if key.choices:
        return "one of " + ", ".join(key.choices)
    if key.is_switch:
        return "true or false"
    if key.unit == "bytes":
        smallest = key.type.ge if isinstance(key.type, shape.IntType) and key.type.ge else 0
        return f"a size like 512MiB or 2GiB, at least {smallest >> 20} MiB"
    limits = _limits(key.type)
    if key.unit == "seconds":
        return f"a duration like 30s or 200ms{limits}"
    if isinstance(key.type, shape.IntType):
        return f"a whole number{limits}"
    if isinstance(key.type, shape.FloatType):
        return f"a number{limits}"
    if isinstance(key.type, shape.StrType) and key.type.pattern:
        return "a name of 1 to 64 letters, digits, dots, dashes"
    return "text" + (" that is not empty" if isinstance(key.type, shape.StrType) and key.type.min_length else "")


def _limits(kind: shape.Type) -> str:
    if not isinstance(kind, shape.IntType | shape.FloatType):
        return ""
    low = f"at least {kind.ge:g}" if kind.ge is not None else f"above {kind.gt:g}" if kind.gt is not None else ""
    high = f"at most {kind.le:{'g' if kind.le < 1 else '.0f'}}" if kind.le is not None and kind.le < 1 << 31 else ""
    return "".join(f", {limit}" for limit in (low, high) if limit)


def _key(section: str, field: shape.Field) -> Key:
    description, unit, optional = "", None, False
    kind = field.type
    while True:
        if isinstance(kind, shape.Metadata):
            description = (kind.extra_json_schema or {}).get("description", description)
            unit = (kind.extra or {}).get("unit", unit)
            kind = kind.type
        elif isinstance(kind, shape.UnionType):
            optional = True
            kind = next(member for member in kind.types if not isinstance(member, shape.NoneType))
        else:
            break
    return Key(
        name=field.name.replace("_", "-"),
        section=section,
        field=field.name,
        description=description,
        default=field.default,
        type=kind,
        unit=unit,
        choices=tuple(str(value) for value in kind.values) if isinstance(kind, shape.LiteralType) else (),
        is_optional=optional,
        is_switch=isinstance(kind, shape.BoolType),
        is_classes=isinstance(kind, shape.VarTupleType),
    )
