"""GET /openapi.json: an OpenAPI 3.1 document of what this gateway serves, with its own limits in the schemas."""

from __future__ import annotations

import re
from http import HTTPStatus
from typing import Any

import msgspec

from moonpool.gateway import replies, shown
from moonpool.gateway.access import is_of_cluster, is_open
from moonpool.gateway.front import MAX_ID_CHARS, REQUEST_ID
from moonpool.gateway.openapi.bodies import bodies
from moonpool.gateway.openapi.described import Schema
from moonpool.gateway.openapi.operations import OPERATIONS, Operation
from moonpool.gateway.schema import Limits

PATH = "/openapi.json"
_REF = "#/components/schemas/{name}"
_EVERY = (400, 503)
"""Errors that anything may be answered with: a header that is wrong, more connections than there may be."""
_PARAMETER = re.compile(r"{(\w+)(?::path)?}")


def document(limits: Limits, version: str) -> bytes:
    """As JSON. Raises ValueError where a reader of a body reads what is not described."""
    types = [t for each in OPERATIONS for t in (each.answer, *each.others.values()) if t is not None]
    structs = [t for t in types if not isinstance(t, str)]
    structs += [shown.Problem, replies.ChatCompletionChunk, replies.TextCompletionChunk]
    _, schemas = msgspec.json.schema_components(structs, ref_template=_REF)
    paths: dict[str, dict[str, Schema]] = {}
    for each in OPERATIONS:
        paths.setdefault(_PARAMETER.sub(r"{\1}", each.path), {})[each.method.lower()] = _operation(each)
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "Moonpool", "version": version, "license": {"name": "Apache-2.0"}},
            "paths": paths,
            "components": {
                "schemas": schemas | bodies(limits),
                "responses": {"Problem": {"description": "An error.", "content": _json(shown.Problem)}},
                "parameters": {"RequestId": _request_id()},
                "securitySchemes": {
                    "key": {
                        "type": "http",
                        "scheme": "bearer",
                        "description": "An API key, mp-ID-SECRET, where the gateway was started with --keys. "
                        "/cluster and what is below it take an admin key.",
                    }
                },
            },
        }
    )


def _operation(each: Operation) -> Schema:
    names = _PARAMETER.findall(each.path)
    parameters: list[Schema] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}} for name in names
    ]
    parameters += [{"name": p.name, "in": p.where, "description": p.text, "schema": p.schema} for p in each.parameters]
    described: Schema = {
        "operationId": each.id,
        "summary": each.text,
        "tags": [each.tag],
        "parameters": [*parameters, {"$ref": "#/components/parameters/RequestId"}],
        "responses": _responses(each),
        "security": [] if is_open(each.path) else [{"key": []}],
    }
    if each.body is not None:
        schema: Schema = {"type": "object"} if each.body == "object" else {"$ref": _REF.format(name=each.body)}
        described["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return described


def _responses(each: Operation) -> Schema:
    keyed = () if is_open(each.path) else (401,)
    admin = (403,) if is_of_cluster(each.path) else ()
    errors = sorted({*_EVERY, *keyed, *admin, *each.errors} - each.others.keys())
    answers = {str(status): _answer(each, status, answer) for status, answer in each.others.items()}
    problem = {"$ref": "#/components/responses/Problem"}
    return {str(each.status): _answer(each, each.status, each.answer), **answers} | {str(e): problem for e in errors}


def _answer(each: Operation, status: int, answer: Any) -> Schema:
    described: Schema = {"description": HTTPStatus(status).phrase}
    match answer:
        case None:
            pass
        case str():
            described["content"] = {answer: {"schema": {"type": "string"}}}
        case _:
            content = _json(answer)
            if each.events is not None:
                text = f"With `stream`: events of {each.events}, or an error in the form of Problem; then [DONE]."
                content["text/event-stream"] = {"schema": {"description": text}}
            described["content"] = content
    return described


def _json(answer: Any) -> Schema:
    (schema,), _ = msgspec.json.schema_components([answer], ref_template=_REF)
    return {"application/json": {"schema": schema}}


def _request_id() -> Schema:
    return {
        "name": REQUEST_ID,
        "in": "header",
        "description": "A name for the request, for logs and /cluster/requests; it comes back.",
        "schema": {"type": "string", "pattern": f"^[!-~]{{1,{MAX_ID_CHARS}}}$"},
    }
