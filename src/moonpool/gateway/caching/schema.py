"""The bodies of /v1/caching."""

from __future__ import annotations

from msgspec import Struct

from moonpool.gateway.caching.reference import MOST_TTL
from moonpool.gateway.fields import Fields
from moonpool.gateway.known import HARMLESS
from moonpool.gateway.problem import invalid
from moonpool.gateway.schema import (
    MAX_SALT_CHARS,
    Limits,
    Messages,
    check_model,
    prompt_ids,
    read_messages,
    read_priority,
)

DEFAULT_TTL = 3600
MAX_NAME_CHARS = 256
MOST_PAIRS = 16
MAX_KEY_CHARS = 64
MAX_VALUE_CHARS = 512
_NEUTRAL: dict[str, tuple[object, ...]] = {"tools": ([],), "tags": ([],), "description": ("",)}


class NewContext(Struct, frozen=True):
    messages: Messages
    """None: `prompt` is given."""
    prompt: str | tuple[int, ...]
    name: str
    metadata: dict[str, str]
    ttl: int
    """Seconds."""
    salt: str
    priority: str
    """Class of the request that computes it; empty: none was named."""


class ContextChange(Struct, frozen=True):
    """None: as it was."""

    ttl: int | None
    name: str | None
    metadata: dict[str, str] | None


def read_new_context(fields: Fields, limits: Limits, context_tokens: int) -> NewContext:
    """Raises ApiError."""
    check_model(fields, limits.model)
    names = {"model", "messages", "prompt", "name", "metadata", "ttl", "cache_salt", "priority"}
    fields.check_names(names, HARMLESS - names, _NEUTRAL)
    if (fields.get("messages") is None) == (fields.get("prompt") is None):
        raise invalid("messages", "give either messages or prompt")
    messages: Messages = ()
    prompt: str | tuple[int, ...] = ""
    if fields.get("messages") is not None:
        messages = read_messages(fields)
    elif isinstance(given := fields.get("prompt"), str):
        prompt = given
    elif isinstance(given, list):
        prompt = prompt_ids(given, "prompt", limits, context_tokens)
    else:
        raise invalid("prompt", "prompt must be a string or an array of token ids")
    return NewContext(
        messages=messages,
        prompt=prompt,
        name=fields.text("name", MAX_NAME_CHARS),
        metadata=_read_metadata(fields) or {},
        ttl=fields.integer("ttl", 1, MOST_TTL) or DEFAULT_TTL,
        salt=fields.text("cache_salt", MAX_SALT_CHARS),
        priority=read_priority(fields, limits.classes),
    )


def read_change(fields: Fields) -> ContextChange:
    """Raises ApiError."""
    fields.check_names({"ttl", "name", "metadata"}, (), {})
    change = ContextChange(
        ttl=fields.integer("ttl", 1, MOST_TTL),
        name=None if fields.get("name") is None else fields.text("name", MAX_NAME_CHARS),
        metadata=_read_metadata(fields),
    )
    if change == ContextChange(None, None, None):
        raise invalid("ttl", "nothing is to be changed: give ttl, name or metadata")
    return change


def _read_metadata(fields: Fields) -> dict[str, str] | None:
    given = fields.get("metadata")
    if given is None:
        return None
    if not isinstance(given, dict) or len(given) > MOST_PAIRS:
        raise invalid("metadata", f"metadata must be an object of at most {MOST_PAIRS} strings")
    for key, value in given.items():
        if len(key) > MAX_KEY_CHARS or not isinstance(value, str) or len(value) > MAX_VALUE_CHARS:
            raise invalid(
                "metadata",
                f"metadata: {key[:MAX_KEY_CHARS]!r} must have at most {MAX_KEY_CHARS} characters, and its value must "
                f"be a string of at most {MAX_VALUE_CHARS}",
            )
    return given
