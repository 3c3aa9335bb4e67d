"""The state of core objects as plain data, and back: with it a journal's segment replays alone (DESIGN §10).

It walks every attribute of every object, so a new one is in it without anybody's help. Two references to one object are
two references to one object again. What cannot be plain data (an iterator, a lambda) is an error that names its owner:
`Portable` is for such classes and for those whose memory depends on the process (its hash seed, say).

Nothing is unpickled: reading makes objects of `moonpool.core` only, attribute by attribute.
"""

from __future__ import annotations

import enum
import importlib
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from types import FunctionType, MethodType
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from msgspec import Struct

T = TypeVar("T")

_CORE = "moonpool.core."
_PLAIN = frozenset({type(None), bool, float, str, bytes})
_LEAST_INT, _MOST_INT = -(1 << 63), (1 << 64) - 1
_UNSET = "unset"


class Snapshot(Struct, frozen=True):
    """Plain data: what msgpack can hold."""

    shapes: tuple[tuple[str, tuple[str, ...]], ...]
    """Classes that occur, as `module:name`, and the attributes of an object of each."""
    root: object
    """None, bool, int, float, str, bytes as they are; all else as `[tag, ...]`, see `_Tag`."""


class Portable(Protocol):
    """A class that says itself what is to be kept of it."""

    def to_plain(self) -> object:
        """Anything that can be kept."""

    @classmethod
    def from_plain(cls, plain: Any) -> Portable: ...


class _Tag(enum.IntEnum):
    SEEN = 0
    """number: the object that was met as that one; tags from LIST on are numbered in the order in which they begin."""
    BIG = 1
    """hexadecimal digits of an int beyond 64 bits."""
    ENUM = 2
    """module:name, member."""
    FUNCTION = 3
    """module:name."""
    LIST = 4
    TUPLE = 5
    DICT = 6
    """[key, value, key, value, ...]."""
    ORDERED = 7
    DEQUE = 8
    """items, most."""
    SET = 9
    FROZENSET = 10
    OBJECT = 11
    """shape, values."""
    STRUCT = 12
    PORTABLE = 13
    """module:name, plain."""
    METHOD = 14
    """object, name."""
    RANDOM = 15
    """state of a PCG64."""
    ARRAY = 16
    """dtype, shape, bytes of a numpy array."""
    NUMBERS = 17
    """typecode, bytes of an array.array."""
    SCALAR = 18
    """dtype, bytes of a numpy number."""
    NAMED = 19
    """module:name, items of a NamedTuple."""


def freeze(root: object) -> Snapshot:
    """Raises TypeError for what cannot be kept, and says whose it is."""
    walk = _Freezer()
    frozen = walk.value(root, type(root).__name__)
    return Snapshot(tuple(walk.shapes), frozen)


def thaw(snapshot: Snapshot, kind: type[T]) -> T:
    """A copy of what was frozen. Raises ValueError where it is no snapshot of a `kind` of this code."""
    try:
        thawed = _Thawer(snapshot.shapes).value(snapshot.root)
    except (TypeError, LookupError, AttributeError, ImportError) as e:
        raise ValueError(f"the snapshot is damaged, or of other code: {type(e).__name__}: {e}") from e
    if not isinstance(thawed, kind):
        raise ValueError(f"the snapshot holds a {type(thawed).__name__}, not a {kind.__name__}")
    return thawed


class _Known(NamedTuple):
    """Of a class."""

    name: str
    tag: _Tag
    fields: tuple[str, ...]
    is_open: bool
    """Objects of it may have other attributes as well."""


class _Freezer:
    def __init__(self) -> None:
        self.shapes: dict[tuple[str, tuple[str, ...]], int] = {}
        self._seen: dict[int, int] = {}
        self._kept: list[object] = []
        """Whatever has a number: an id is good only as long as its object lives."""
        self._known: dict[type, _Known] = {}

    def value(self, value: Any, owner: str) -> object:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind is int:
            return value if _LEAST_INT <= value <= _MOST_INT else [_Tag.BIG, hex(value)]
        number = self._seen.get(id(value))
        if number is not None:
            return [_Tag.SEEN, number]
        pack = _BUILTIN.get(kind)
        if pack is None:
            if kind is FunctionType:
                return [_Tag.FUNCTION, _name_of(value, owner)]
            if isinstance(value, enum.Enum):
                return [_Tag.ENUM, _name_of(kind, owner), value.name]
        self._seen[id(value)] = len(self._seen)
        self._kept.append(value)
        return pack(self, value, owner) if pack is not None else self._other(kind, value, owner)

    def values(self, values: Any, owner: str) -> object:
        # The keys of long prompts: bytes all of them.
        if _PLAIN.issuperset(map(type, values)):
            return list(values)
        return [self.value(v, owner) for v in values]

    def pairs(self, table: dict[Any, Any], owner: str) -> object:
        flat: list[object] = []
        for key, value in table.items():
            flat += self.value(key, owner), self.value(value, owner)
        return flat

    def unordered(self, values: Any, owner: str) -> object:
        """In an order that does not depend on the hash seed."""
        return self.values(sorted(values, key=repr), owner)

    def _other(self, kind: type, value: Any, owner: str) -> object:
        known = self._known.get(kind)
        if known is None:
            if isinstance(value, np.generic):
                return [_Tag.SCALAR, value.dtype.str, value.tobytes()]
            known = self._known[kind] = _know(kind, owner)
        name, tag, fields, is_open = known
        if tag is _Tag.PORTABLE:
            return [tag, name, self.value(value.to_plain(), name)]
        if tag is _Tag.NAMED:
            return [tag, name, self.values(value, name)]
        if is_open:
            fields = (*fields, *vars(value))
        shape = self.shapes.setdefault((name, fields), len(self.shapes))
        values = []
        for field in fields:
            content = getattr(value, field, _UNMADE)
            if type(content) not in _PLAIN:
                content = [_UNSET] if content is _UNMADE else self.value(content, f"{name}.{field}")
            values.append(content)
        return [tag, shape, values]


def _know(kind: type, owner: str) -> _Known:
    name = _name_of(kind, owner)
    if hasattr(kind, "to_plain"):
        return _Known(name, _Tag.PORTABLE, (), False)
    if issubclass(kind, tuple):
        return _Known(name, _Tag.NAMED, (), False)
    if issubclass(kind, Struct):
        return _Known(name, _Tag.STRUCT, kind.__struct_fields__, False)
    return _Known(name, _Tag.OBJECT, _slots_of(kind), hasattr(kind, "__dict__") and kind.__dictoffset__ != 0)


def _pack_random(walk: _Freezer, value: np.random.Generator, owner: str) -> object:
    state = value.bit_generator.state
    if state["bit_generator"] != "PCG64":
        raise TypeError(f"{owner} draws from a {state['bit_generator']}: a snapshot knows PCG64 only")
    return [_Tag.RANDOM, walk.value(state, owner)]


_BUILTIN: dict[type, Callable[[_Freezer, Any, str], object]] = {
    list: lambda walk, v, owner: [_Tag.LIST, walk.values(v, owner)],
    tuple: lambda walk, v, owner: [_Tag.TUPLE, walk.values(v, owner)],
    dict: lambda walk, v, owner: [_Tag.DICT, walk.pairs(v, owner)],
    OrderedDict: lambda walk, v, owner: [_Tag.ORDERED, walk.pairs(v, owner)],
    deque: lambda walk, v, owner: [_Tag.DEQUE, walk.values(v, owner), v.maxlen],
    set: lambda walk, v, owner: [_Tag.SET, walk.unordered(v, owner)],
    frozenset: lambda walk, v, owner: [_Tag.FROZENSET, walk.unordered(v, owner)],
    MethodType: lambda walk, v, owner: [_Tag.METHOD, walk.value(v.__self__, owner), v.__name__],
    np.random.Generator: _pack_random,
    np.ndarray: lambda walk, v, owner: [_Tag.ARRAY, _dtype(v, owner), list(v.shape), v.tobytes()],
    array: lambda walk, v, owner: [_Tag.NUMBERS, v.typecode, v.tobytes()],
}


class _Thawer:
    def __init__(self, shapes: Sequence[tuple[str, tuple[str, ...]]]) -> None:
        self._shapes = [(_core_class(name), fields) for name, fields in shapes]
        self._met: list[Any] = []

    def value(self, frozen: Any) -> Any:
        if not isinstance(frozen, list | tuple):
            return frozen
        tag, *rest = frozen
        match tag:
            case _Tag.SEEN:
                return self._seen(rest[0])
            case _Tag.BIG:
                return int(rest[0], 16)
            case _Tag.ENUM:
                return _core_class(rest[0])[rest[1]]  # type: ignore[index]
            case _Tag.FUNCTION:
                return _core_function(rest[0])
        number = len(self._met)
        self._met.append(_UNMADE)
        if tag in _GROWS:
            return self._grow(tag, number, rest)
        made = self._met[number] = self._make(tag, rest)
        return made

    def _seen(self, number: int) -> Any:
        if self._met[number] is _UNMADE:
            raise TypeError("an immutable object holds itself")
        return self._met[number]

    def _grow(self, tag: int, number: int, rest: list[Any]) -> Any:
        """What is there before its content, which may refer to it."""
        made: Any
        if tag == _Tag.OBJECT:
            kind, fields = self._shapes[rest[0]]
            made = self._met[number] = object.__new__(kind)
            for field, frozen in zip(fields, rest[1], strict=True):
                if frozen != [_UNSET]:
                    object.__setattr__(made, field, self.value(frozen))
        elif tag == _Tag.LIST:
            made = self._met[number] = []
            made.extend(self.value(v) for v in rest[0])
        else:
            made = self._met[number] = {} if tag == _Tag.DICT else OrderedDict()
            flat = iter(rest[0])
            for key in flat:
                made[self.value(key)] = self.value(next(flat))
        return made

    def _make(self, tag: int, rest: list[Any]) -> Any:
        match tag:
            case _Tag.TUPLE:
                return tuple(self.value(v) for v in rest[0])
            case _Tag.DEQUE:
                return deque((self.value(v) for v in rest[0]), rest[1])
            case _Tag.SET:
                return {self.value(v) for v in rest[0]}
            case _Tag.FROZENSET:
                return frozenset(self.value(v) for v in rest[0])
            case _Tag.STRUCT:
                kind, fields = self._shapes[rest[0]]
                return kind(**dict(zip(fields, map(self.value, rest[1]), strict=True)))
            case _Tag.NAMED:
                return _core_class(rest[0])(*(self.value(v) for v in rest[1]))
            case _Tag.PORTABLE:
                return _core_class(rest[0]).from_plain(self.value(rest[1]))  # type: ignore[attr-defined]
            case _Tag.METHOD:
                return MethodType(getattr(type(owner := self.value(rest[0])), rest[1]), owner)
            case _:
                return _numbers(tag, rest, self.value)


def _numbers(tag: int, rest: list[Any], value: Callable[[Any], Any]) -> Any:
    match tag:
        case _Tag.RANDOM:
            bits = np.random.PCG64(0)
            bits.state = value(rest[0])
            return np.random.Generator(bits)
        case _Tag.ARRAY:
            return np.frombuffer(rest[2], np.dtype(rest[0])).reshape(rest[1]).copy()
        case _Tag.NUMBERS:
            return array(rest[0], rest[1])
        case _Tag.SCALAR:
            return np.frombuffer(rest[1], np.dtype(rest[0]))[0]
    raise TypeError(f"a tag {tag!r} is not known")


_UNMADE = object()
_GROWS = frozenset({_Tag.OBJECT, _Tag.LIST, _Tag.DICT, _Tag.ORDERED})


def _slots_of(kind: type) -> tuple[str, ...]:
    found: dict[str, None] = {}
    for base in reversed(kind.__mro__):
        slots = base.__dict__.get("__slots__", ())
        names = (slots,) if isinstance(slots, str) else tuple(slots)
        # A private name is mangled, as its attribute is.
        prefix = f"_{base.__name__.lstrip('_')}"
        found |= dict.fromkeys(prefix + n if n.startswith("__") and not n.endswith("__") else n for n in names)
    return tuple(name for name in found if name not in ("__dict__", "__weakref__"))


def _name_of(thing: Any, owner: str) -> str:
    """`moonpool.core.fleet:Part` of a class or function that can be found again by that name."""
    module, name = str(getattr(thing, "__module__", "")), str(getattr(thing, "__qualname__", thing))
    if not module.startswith(_CORE) or "<" in name:
        raise TypeError(
            f"{owner} holds a {name} ({module}), which a journal cannot keep: give it plain data or an object of "
            f"moonpool.core, or make it Portable (core/snapshot.py)"
        )
    return f"{module}:{name}"


def _dtype(value: np.ndarray[Any, Any], owner: str) -> str:
    if value.dtype.hasobject:
        raise TypeError(f"{owner} holds a numpy array of objects, which a journal cannot keep: use a list")
    return str(value.dtype.str)


def _core_class(name: str) -> type:
    found = _find(name)
    if not isinstance(found, type):
        raise TypeError(f"{name} is no class")
    return found


def _core_function(name: str) -> Any:
    found = _find(name)
    if not isinstance(found, FunctionType):
        raise TypeError(f"{name} is no function")
    return found


def _find(name: str) -> Any:
    module, _, path = name.partition(":")
    if not module.startswith(_CORE):
        raise TypeError(f"{name} is not of moonpool.core")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    if getattr(found, "__module__", None) != module:
        raise TypeError(f"{name} is not defined there")
    return found
