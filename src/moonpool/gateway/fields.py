"""Typed, range-checked reading of a JSON object; every mistake is a 400 that names the field."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable, Mapping
from typing import TypeGuard

import msgspec

from moonpool.gateway.outline import exceeds
from moonpool.gateway.problem import ApiError, invalid

Json = dict[str, object]

INT64_MAX = (1 << 63) - 1
MOST_CONTAINERS = 100_000
"""Arrays and objects in a body: several times what the most messages have."""
MOST_EXPLAINED = 100_000
"""Values in a body that is no proper JSON: of a larger one the field at fault is not looked for."""


class Fields:
    """The members of one object. A null counts as absent."""

    def __init__(self, values: Json, where: str = "") -> None:
        self._values = values
        self._where = where

    def name(self, name: str) -> str:
        return f"{self._where}{name}"

    def get(self, name: str) -> object | None:
        return self._values.get(name)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false")
        return value

    def integer(self, name: str, low: int, high: int = INT64_MAX) -> int | None:
        value = self.get(name)
        if value is None:
            return None
        limits = f"an integer of at least {low}" if high == INT64_MAX else f"an integer from {low} to {high}"
        if not is_integer(value) or not low <= value <= high:
            raise self._wrong(name, limits)
        return value

    def number(
        self, name: str, default: float, low: float, high: float = math.inf, *, above_low: bool = False
    ) -> float:
        """`above_low`: the value must be greater than `low`."""
        value = self.get(name)
        if value is None:
            return default
        if high == math.inf:
            limits = f"a number {'greater than' if above_low else 'of at least'} {low:g}"
        else:
            limits = f"a number {f'above {low:g} and up to' if above_low else f'from {low:g} to'} {high:g}"
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(name, limits)
        if not (low < value if above_low else low <= value) or value > high or not math.isfinite(value):
            raise self._wrong(name, limits)
        return float(value)

    def text(self, name: str, longest: int) -> str:
        """`longest` in characters; absent is empty."""
        value = self.get(name)
        if value is None:
            return ""
        if not isinstance(value, str) or len(value) > longest:
            raise self._wrong(name, f"a string of at most {longest} characters")
        return value

    def sub(self, name: str) -> Fields:
        value = self.get(name)
        if value is None:
            return Fields({}, f"{self.name(name)}.")
        if not isinstance(value, dict):
            raise self._wrong(name, "an object")
        return Fields(value, f"{self.name(name)}.")

    def check_names(
        self, supported: Iterable[str], harmless: Iterable[str], neutral: Mapping[str, tuple[object, ...]]
    ) -> None:
        """Refuse what would change the answer and is not supported, and names that nobody knows."""
        known = {*supported, *harmless, *neutral}
        for name, value in self._values.items():
            if name in neutral:
                if value is not None and not _is_among(value, neutral[name]):
                    raise invalid(self.name(name), f"{self.name(name)} is not supported{_only(neutral[name])}")
            elif name not in known:
                near = difflib.get_close_matches(name[:64], sorted(known), n=1)
                hint = f", did you mean {self.name(near[0])}?" if near else ""
                raise invalid(self.name(name[:64]), f"unknown field {self.name(name[:64])!r}{hint}")

    def _wrong(self, name: str, wanted: str) -> ApiError:
        value = self.get(name)
        shown = f", not {value!r}" if isinstance(value, bool | int | float) and abs(value) < 1e30 else ""
        return invalid(self.name(name), f"{self.name(name)} must be {wanted}{shown}")


def is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def read_object(body: bytes | bytearray) -> Json:
    """The request's body. Raises ApiError."""
    if exceeds(body, b"[{", MOST_CONTAINERS):
        raise ApiError(400, f"the body has more than {MOST_CONTAINERS} arrays and objects", code="invalid_json")
    try:
        value = msgspec.json.decode(body)
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply", code="invalid_json") from None
    except msgspec.MsgspecError as e:
        raise _explain(body, e) from None
    if not isinstance(value, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    return value


def _explain(body: bytes | bytearray, error: msgspec.MsgspecError) -> ApiError:
    """Name the field with a lone surrogate or an unfit number; a more lenient parser finds the way to it."""
    try:
        large = exceeds(body, b",", MOST_EXPLAINED)
        found = None if large else _unfit(json.loads(body, parse_int=_read_integer), "")
    except (ValueError, RecursionError):
        found = None
    if found is None:
        return ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json")
    where, what = found
    return invalid(where, f"{where} {what}", "invalid_json")


def _read_integer(digits: str) -> int:
    """Python refuses to read the longest integers; anything beyond 64 bits is as unfit as they are."""
    return int(digits[:32])


def _unfit(value: object, where: str) -> tuple[str, str] | None:
    match value:
        case str():
            if not _is_text(value):
                return where, "holds a lone surrogate, which is not text"
        case float():
            if not math.isfinite(value):
                return where, "is not a finite number"
        case int():
            if abs(value) > 1 << 64:
                return where, "is too large a number"
        case dict():
            for name, member in value.items():
                shown = name.encode(errors="replace").decode()[:64]
                if shown != name[:64]:
                    return shown, "is a name that holds a lone surrogate"
                if found := _unfit(member, f"{where}.{shown}" if where else shown):
                    return found
        case list():
            for i, member in enumerate(value):
                if found := _unfit(member, f"{where}[{i}]"):
                    return found
    return None


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_among(value: object, neutral: tuple[object, ...]) -> bool:
    return any(type(value) is type(other) and value == other for other in neutral)


def _only(neutral: tuple[object, ...]) -> str:
    shown = " or ".join(msgspec.json.encode(value).decode() for value in neutral)
    return f" (only {shown})" if shown else ""
