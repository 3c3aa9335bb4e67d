"""/openapi.json: it has what is served and nothing else, and its schemas are what the readers check."""

from __future__ import annotations

from typing import Any

import jsonschema_rs
import pytest
from starlette.routing import Route

from moonpool.gateway.openapi.bodies import bodies
from moonpool.gateway.openapi.described import Described
from moonpool.gateway.openapi.operations import OPERATIONS
from moonpool.gateway.schema import Limits
from tests.gateway.conftest import Open
from tests.gateway.kit import MODEL, Stage, chat_body, run
from tests.keys import make_key

LIMITS = Limits(MODEL, vocabulary=1000, max_prompts=4)


async def document_of(s: Stage) -> Any:
    response = await s.client.get(s.url + "/openapi.json")
    assert response.status_code == 200
    return response.json()


def test_all_that_is_served_is_described_and_nothing_else(opened: Open) -> None:
    async def test() -> None:
        async with opened() as s:
            routes = [route for route in s.gateway.app.router.routes if isinstance(route, Route)]
            served = {(method, route.path) for route in routes for method in (route.methods or ()) if method != "HEAD"}
            assert {(each.method, each.path) for each in OPERATIONS} == served
            assert len(OPERATIONS) == len(served) == len({each.id for each in OPERATIONS})
            paths = (await document_of(s))["paths"]
            assert sum(len(methods) for methods in paths.values()) == len(served)
            assert "/v1/models/{model}" in paths

    run(test())


def test_every_reference_leads_somewhere_and_every_schema_is_one(opened: Open) -> None:
    async def test() -> None:
        async with opened() as s:
            document = await document_of(s)
            assert document["openapi"] == "3.1.0"
            references = list(references_in(document))
            assert len(references) > 50
            for reference in references:
                found = document
                for name in reference.removeprefix("#/").split("/"):
                    found = found[name]
            for schema in document["components"]["schemas"].values():
                jsonschema_rs.meta.validate(schema)

    run(test())


def references_in(value: Any) -> Any:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        value = list(value.values())
    for member in value if isinstance(value, list) else ():
        yield from references_in(member)


def test_it_has_this_gateway_s_limits_and_needs_no_key(opened: Open, tmp_path: Any) -> None:
    make_key(tmp_path / "keys.json")

    async def test() -> None:
        async with opened(keys=str(tmp_path / "keys.json"), max_prompts=3) as s:
            document = await document_of(s)
            schemas = document["components"]["schemas"]
            assert schemas["CompletionRequest"]["properties"]["prompt"]["anyOf"][2]["maxItems"] == 3
            assert schemas["ChatCompletionRequest"]["properties"]["model"] == {"enum": [None, MODEL]}
            assert schemas["CompletionRequest"]["properties"]["temperature"]["maximum"] == 2.0
            assert document["paths"]["/v1/models"]["get"]["security"] == [{"key": []}]
            assert document["paths"]["/health"]["get"]["security"] == []

    run(test())


def test_a_member_that_nobody_described_is_an_error() -> None:
    fields = Described({})
    fields.integer("low", 3, 5)
    fields.get("raw")
    with pytest.raises(ValueError, match="read by hand: \\['raw'\\]"):
        fields.schema({})
    described = fields.schema({"raw": {}})
    assert described["properties"] == {"low": {"type": ["integer", "null"], "minimum": 3, "maximum": 5}, "raw": {}}


@pytest.mark.parametrize(
    ("name", "path", "fit"),
    [
        ("ChatCompletionRequest", "/v1/chat/completions", chat_body()),
        ("CompletionRequest", "/v1/completions", {"prompt": "Hi"}),
        ("TokenizeRequest", "/tokenize", {"prompt": "Hi"}),
        ("TokenizeRequest", "/tokenize", {"messages": [{"role": "user", "content": "Hi"}], "prompt": None}),
        ("DetokenizeRequest", "/detokenize", {"tokens": [5]}),
        ("NewCachedContext", "/v1/caching", {"prompt": "Hi"}),
    ],
)
def test_the_schema_says_what_the_gateway_says(opened: Open, name: str, path: str, fit: dict[str, Any]) -> None:
    """Of single members that are wrong in every way that readers look for."""
    schemas = bodies(LIMITS)
    validator = jsonschema_rs.validator_for(schemas[name] | {"components": {"schemas": schemas}})
    unfit: list[dict[str, Any]] = [{**fit, "no-such-field": 1}, {}, {**fit, "model": 7}]
    for member, schema in schemas[name]["properties"].items():  # type: ignore[attr-defined]
        unfit += [{**fit, member: value} for value in wrong_for(member, schema)]
    assert len(unfit) >= 5

    async def test() -> None:
        async with opened() as s:
            assert validator.is_valid(fit)
            for body in unfit:
                response = await s.post(path, body)
                assert not validator.is_valid(body), body
                assert response.status_code in (400, 404), (body, response.text)

    run(test())


def wrong_for(name: str, schema: dict[str, Any]) -> list[object]:
    types = schema.get("type", ())
    wrong: list[object] = []
    if "enum" in schema:
        wrong += ["no such value", [[]]]
    if "boolean" in types:
        wrong += [1, "true"]
    if "integer" in types or "number" in types:
        wrong += ["1", True, [1]]
        wrong += [schema["minimum"] - 1] if "minimum" in schema else [schema["exclusiveMinimum"]]
        wrong += [schema["maximum"] + 1] if schema.get("maximum", 1 << 63) < 1 << 62 else []
    if "string" in types:
        wrong += [7, "x" * (schema["maxLength"] + 1)]
    if name in ("stop", "stop_token_ids", "priority", "prompt", "messages", "tokens"):
        wrong += [{"a": 1}, [[[]]], False]
    return wrong
