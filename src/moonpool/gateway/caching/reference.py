"""How a request names the cached context that it begins with."""

from __future__ import annotations

import re

from msgspec import Struct

from moonpool.gateway.problem import invalid

HEADER = "x-moonpool-cache"
MOST_TTL = 30 * 86400
"""Seconds that a context may live from now on."""
MAX_REFERENCE_CHARS = 256
_SECONDS = re.compile(r"[0-9]{1,9}")


class Reference(Struct, frozen=True):
    """That a request begins with a cached context."""

    id: str
    reset_ttl: int | None = None
    """Seconds from now on that the context is to live."""


def read_reference(text: str, where: str) -> Reference:
    """Of `cache_id=cache-…;reset_ttl=3600`, or without the first name. Raises ApiError; `where` is the field."""
    if len(text) > MAX_REFERENCE_CHARS:
        raise invalid(where, f"{where} has {len(text)} characters, and at most {MAX_REFERENCE_CHARS} are read")
    parts = [part.strip() for part in text.split(";") if part.strip()]
    if parts and "=" not in parts[0]:
        parts[0] = f"cache_id={parts[0]}"
    given: dict[str, str] = {}
    for part in parts:
        name, _, value = part.partition("=")
        if name not in ("cache_id", "reset_ttl"):
            raise invalid(where, f"{where}: {name[:64]!r} is not supported; write cache_id=cache-…;reset_ttl=3600")
        if name in given:
            raise invalid(where, f"{where} gives {name} twice")
        given[name] = value
    if not given.get("cache_id"):
        raise invalid(where, f"{where} must name a cached context: cache_id=cache-…")
    return Reference(given["cache_id"], _read_seconds(given.get("reset_ttl"), where))


def _read_seconds(text: str | None, where: str) -> int | None:
    if text is None:
        return None
    if not _SECONDS.fullmatch(text) or not 1 <= int(text) <= MOST_TTL:
        raise invalid(where, f"{where}: reset_ttl must be a whole number of seconds from 1 to {MOST_TTL}")
    return int(text)
