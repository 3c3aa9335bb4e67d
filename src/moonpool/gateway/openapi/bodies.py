"""The bodies that are read, as JSON schemas: from the readers themselves, and by hand what those look at by hand."""

from __future__ import annotations

from moonpool.gateway.caching import schema as caching
from moonpool.gateway.caching.reference import MAX_REFERENCE_CHARS
from moonpool.gateway.fields import INT64_MAX
from moonpool.gateway.known import MESSAGE_NEUTRAL, ROLES
from moonpool.gateway.openapi.described import Described, Schema, only
from moonpool.gateway.schema import (
    MAX_AUTHOR_CHARS,
    MAX_MESSAGES,
    MAX_PRIORITY_CHARS,
    MAX_STOP_CHARS,
    MAX_STOP_TOKENS,
    MAX_STOPS,
    Limits,
    read_chat,
    read_completion,
    read_detokenize,
    read_tokenize,
)

MANY = 1 << 30
"""No limit is taken from the context, which the gateway learns from its workers only."""
_NULL: Schema = {"type": "null"}
_TEXT: Schema = {"type": "string"}
_MESSAGES = [{"role": "user", "content": ""}]


def bodies(limits: Limits) -> dict[str, Schema]:
    """By the name of the component."""
    return {
        "ChatCompletionRequest": _chat(limits),
        "CompletionRequest": _completion(limits),
        "TokenizeRequest": _tokenize(limits),
        "DetokenizeRequest": _detokenize(limits),
        "NewCachedContext": _new_context(limits),
        "CachedContextChange": _context_change(),
        "ChatMessage": _message(),
        "CachedContextMessage": _reference(),
    }


def _chat(limits: Limits) -> Schema:
    fields = Described({"messages": _MESSAGES, "stream": True, "stream_options": {}})
    read_chat(fields, limits)
    messages = _messages()
    messages["prefixItems"] = [{"anyOf": [_ref("ChatMessage"), _ref("CachedContextMessage")]}]
    return fields.schema({**_asked(limits), "messages": messages}, ["messages"])


def _completion(limits: Limits) -> Schema:
    fields = Described({"prompt": "", "stream": True, "stream_options": {}})
    read_completion(fields, limits, MANY)
    ids = _ids(limits)
    several: Schema = {"type": "array", "minItems": 1, "maxItems": limits.max_prompts, "items": {"anyOf": [_TEXT, ids]}}
    return fields.schema({**_asked(limits), "prompt": {"anyOf": [_TEXT, ids, several]}}, ["prompt"])


def _tokenize(limits: Limits) -> Schema:
    fields = Described({"prompt": ""})
    read_tokenize(fields, limits)
    described = fields.schema({"model": _model(limits), "prompt": _or_null(_TEXT), "messages": _or_null(_messages())})
    return described | _either("prompt", "messages")


def _detokenize(limits: Limits) -> Schema:
    fields = Described({"tokens": []})
    read_detokenize(fields, limits, MANY)
    ids: Schema = {"type": "array", "items": _id(limits)}
    return fields.schema({"model": _model(limits), "tokens": ids}, ["tokens"])


def _new_context(limits: Limits) -> Schema:
    fields = Described({"messages": _MESSAGES})
    caching.read_new_context(fields, limits, MANY)
    by_hand = {
        "model": _model(limits),
        "messages": _or_null(_messages()),
        "prompt": _or_null({"anyOf": [_TEXT, _ids(limits)]}),
        "priority": _priority(limits),
        "metadata": _metadata(),
    }
    return fields.schema(by_hand) | _either("messages", "prompt")


def _context_change() -> Schema:
    fields = Described({"name": ""})
    caching.read_change(fields)
    changes = ({"required": [name], "properties": {name: {"not": _NULL}}} for name in ("ttl", "name", "metadata"))
    return fields.schema({"metadata": _metadata()}) | {"anyOf": list(changes)}


# ---- members that readers look at themselves


def _asked(limits: Limits) -> dict[str, Schema]:
    stop: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
    return {
        "model": _model(limits),
        "stop": {"anyOf": [stop, {"type": "array", "items": stop, "maxItems": MAX_STOPS}, _NULL]},
        "stop_token_ids": {"type": ["array", "null"], "items": _id(limits), "maxItems": MAX_STOP_TOKENS},
        "priority": _priority(limits),
    }


def _model(limits: Limits) -> Schema:
    return {"enum": [None, limits.model]}


def _priority(limits: Limits) -> Schema:
    named: Schema = {"type": "string", "pattern": rf"^[ -~]{{1,{MAX_PRIORITY_CHARS}}}$"}
    if limits.classes:
        named = {"enum": list(limits.classes)}
    rank = {"type": "integer", "minimum": -INT64_MAX, "maximum": INT64_MAX}
    return {"anyOf": [rank, named, _NULL], "description": "A priority class, or an integer: the smaller, the sooner."}


def _metadata() -> Schema:
    return {
        "type": ["object", "null"],
        "maxProperties": caching.MOST_PAIRS,
        "propertyNames": {"maxLength": caching.MAX_KEY_CHARS},
        "additionalProperties": {"type": "string", "maxLength": caching.MAX_VALUE_CHARS},
    }


def _messages() -> Schema:
    return {"type": "array", "minItems": 1, "maxItems": MAX_MESSAGES, "items": _ref("ChatMessage")}


def _message() -> Schema:
    part = {
        "type": "object",
        "properties": {"type": {"const": "text"}, "text": _TEXT},
        "required": ["type", "text"],
    }
    neutral: dict[str, Schema] = {name: {"enum": only(values)} for name, values in MESSAGE_NEUTRAL.items()}
    return {
        "type": "object",
        "properties": {
            "role": {"enum": list(ROLES)},
            "content": {"anyOf": [_TEXT, {"type": "array", "minItems": 1, "items": part}]},
            "name": {"type": ["string", "null"], "maxLength": MAX_AUTHOR_CHARS},
            **neutral,
        },
        "required": ["role", "content"],
        "additionalProperties": False,
    }


def _reference() -> Schema:
    return {
        "type": "object",
        "properties": {
            "role": {"const": "cache"},
            "content": {"type": "string", "pattern": "cache_id=", "maxLength": MAX_REFERENCE_CHARS},
        },
        "required": ["role", "content"],
        "additionalProperties": False,
        "description": "Names the cached context that the messages behind it go on from.",
    }


def _id(limits: Limits) -> Schema:
    return {"type": "integer", "minimum": 0, "maximum": limits.vocabulary - 1}


def _ids(limits: Limits) -> Schema:
    return {"type": "array", "minItems": 1, "items": _id(limits)}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, _NULL]}


def _either(one: str, other: str) -> Schema:
    """One of them, and not the other."""
    given = [{"required": [name], "properties": {name: {"not": _NULL}}} for name in (one, other)]
    return {"oneOf": given}
