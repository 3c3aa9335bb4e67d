"""A reader's own checks as a JSON schema: it reads, and what it asks of each member is taken down."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from moonpool.gateway.fields import INT64_MAX, Fields, Json

Schema = dict[str, object]


class Described(Fields):
    """A body of which every member counts as absent, but for `values`, which must be fit."""

    def __init__(self, values: Json, where: str = "") -> None:
        super().__init__(values, where)
        self._known: dict[str, Schema] = {}
        """That the methods below have checked, or refused."""
        self._taken: dict[str, Described] = {}
        self._read: set[str] = set()

    def schema(self, by_hand: Mapping[str, Schema], required: Iterable[str] = ()) -> Schema:
        """`by_hand`: of members that the reader looks at itself. Raises ValueError where it looks at others."""
        known = self._known | {name: _or_null(sub.schema({})) for name, sub in self._taken.items()}
        bare = self._read - known.keys()
        if bare != by_hand.keys():
            raise ValueError(f"read by hand: {sorted(bare)}; described by hand: {sorted(by_hand)}")
        return {
            "type": "object",
            "properties": dict(sorted((known | dict(by_hand)).items())),
            "additionalProperties": False,
        } | ({"required": list(required)} if required else {})

    def get(self, name: str) -> object | None:
        self._read.add(name)
        return super().get(name)

    def flag(self, name: str, default: bool = False) -> bool:
        self._known[name] = {"type": ["boolean", "null"], "default": default}
        return super().flag(name, default)

    def integer(self, name: str, low: int, high: int = INT64_MAX) -> int | None:
        self._known[name] = {"type": ["integer", "null"], "minimum": low, "maximum": high}
        return super().integer(name, low, high)

    def number(
        self, name: str, default: float, low: float, high: float = math.inf, *, above_low: bool = False
    ) -> float:
        schema: Schema = {"type": ["number", "null"], "default": default}
        schema["exclusiveMinimum" if above_low else "minimum"] = low
        if high != math.inf:
            schema["maximum"] = high
        self._known[name] = schema
        return super().number(name, default, low, high, above_low=above_low)

    def text(self, name: str, longest: int) -> str:
        self._known[name] = {"type": ["string", "null"], "maxLength": longest}
        return super().text(name, longest)

    def sub(self, name: str) -> Fields:
        given = super().get(name)
        sub = Described(given if isinstance(given, dict) else {}, f"{self.name(name)}.")
        self._taken[name] = sub
        return sub

    def check_names(
        self, supported: Iterable[str], harmless: Iterable[str], neutral: Mapping[str, tuple[object, ...]]
    ) -> None:
        for name in harmless:
            self._known[name] = {"description": "Taken, and without effect."}
        for name, values in neutral.items():
            self._known[name] = {"enum": only(values), "description": "Only what changes nothing is supported."}
        super().check_names(supported, harmless, neutral)


def only(values: tuple[object, ...]) -> list[object]:
    """Null or one of them, each once: for JSON schemas 1 and 1.0 are one."""
    unique = [value for i, value in enumerate(values) if not any(value == other for other in values[:i])]
    return [None, *unique]


def _or_null(schema: Schema) -> Schema:
    return schema | {"type": [schema["type"], "null"]}
