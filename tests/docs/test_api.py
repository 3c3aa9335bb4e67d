"""The tables of docs/api.md say what the gateway's code says, no more and no less."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moonpool.core.vocabulary import RejectReason
from moonpool.gateway.front import REQUEST_ID
from moonpool.gateway.keys.quota import Allowance
from moonpool.gateway.known import CHAT_NEUTRAL, COMPLETION_NEUTRAL, HARMLESS, SHARED
from moonpool.gateway.openapi.bodies import bodies
from moonpool.gateway.openapi.operations import OPERATIONS
from moonpool.gateway.problem import REASON_HEADER, refused
from moonpool.gateway.schema import MAX_MESSAGES, MAX_STOP_CHARS, MAX_STOP_TOKENS, MAX_STOPS, Limits
from tests.docs.pages import ROOT

PAGE = (ROOT / "docs" / "api.md").read_text()
GATEWAY = ROOT / "src" / "moonpool" / "gateway"
NONE = "–"
BEYOND = 1 << 62
"""A bound of 64 bits is none that anybody meets."""


def rows(heading: str) -> list[list[str]]:
    """Cells of all tables below it, without the head of each."""
    section = re.split(rf"^## {re.escape(heading)}$", PAGE, flags=re.MULTILINE)[1]
    section = re.split(r"^## ", section, flags=re.MULTILINE)[0]
    tables = re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE)
    lines = [line for table in tables for line in table.splitlines()[2:]]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_endpoints() -> None:
    listed = [name for row in rows("Endpoints") for name in names(row[0])]
    served = {f"{each.method} {re.sub(r':path}', '}', each.path)}" for each in OPERATIONS}
    files = {each for each in served if each.startswith("GET /dashboard/")}
    assert sorted(listed) == sorted(served - files)


def test_headers() -> None:
    listed = {name for row in rows("Headers") for name in names(row[0])}
    asked = {each.name for operation in OPERATIONS for each in operation.parameters if each.where == "header"}
    assert listed == asked | {REQUEST_ID, "authorization", "content-type", "retry-after", REASON_HEADER}


# ---- fields

SCHEMAS = bodies(Limits("model", vocabulary=1000, max_prompts=128))
BODIES: list[dict[str, Any]] = [SCHEMAS[name]["properties"] for name in ("ChatCompletionRequest", "CompletionRequest")]  # type: ignore[misc]


def values_of(schema: dict[str, Any]) -> str:
    """What it takes, as the page says it; nothing of what is more than a number, a switch or a text."""
    types = schema.get("type", ())
    if "boolean" in types:
        return "true, false"
    if "string" in types:
        return f"up to {schema['maxLength']} characters"
    if not {"integer", "number"} & set(types):
        return ""
    low, above, high = (schema.get(name) for name in ("minimum", "exclusiveMinimum", "maximum"))
    said = "" if high is None or high > BEYOND else f" to {high:g}"
    if above is not None:
        said = f"above {above:g}{said}"
    elif low > -BEYOND:
        said = f"{low:g}{said}" if said else f"from {low:g}"
    default = f", default {schema['default']:g}" if "default" in schema else ""
    return (said or "any") + default


def test_fields_and_what_they_take() -> None:
    neutral = CHAT_NEUTRAL.keys() | COMPLETION_NEUTRAL.keys() | HARMLESS
    table = {name: row[1] for row in rows("Fields") for name in names(row[0])}
    assert table.keys() == {name for body in BODIES for name in body} - neutral
    assert table.keys() >= SHARED
    for name, cell in table.items():
        said = dict.fromkeys(values_of(body[name]) for body in BODIES if name in body)
        assert cell == "; ".join(said), name


def test_limits_of_fields_that_are_told_in_words() -> None:
    told = {name: row[2] for row in rows("Fields") for name in names(row[0])}
    assert f"up to {MAX_MESSAGES}," in told["messages"]
    assert f"up to {MAX_STOPS}, of 1 to {MAX_STOP_CHARS} characters" in told["stop"]
    assert f"up to {MAX_STOP_TOKENS} " in told["stop_token_ids"]


def test_fields_without_effect_and_fields_that_are_refused() -> None:
    harmless, neutral = (
        re.search(rf"^- \*\*{lead}.*?(?=^- )", PAGE, re.MULTILINE | re.DOTALL)
        for lead in ("Taken, and without effect", "Taken with the value that changes nothing")
    )
    assert harmless is not None
    assert neutral is not None
    assert sorted(names(harmless[0])) == sorted(HARMLESS)
    both, _, rest = neutral[0].partition("; in a chat ")
    chat, _, completions = rest.partition("; in completions ")
    assert sorted(names(both)) == sorted(CHAT_NEUTRAL.keys() & COMPLETION_NEUTRAL.keys())
    assert sorted(names(chat)) == sorted(CHAT_NEUTRAL.keys() - COMPLETION_NEUTRAL.keys())
    assert sorted(names(completions)) == sorted(COMPLETION_NEUTRAL.keys() - CHAT_NEUTRAL.keys())


# ---- errors

Problem = tuple[int, str]
"""Status and code."""


def raised(file: Path) -> Iterator[Problem]:
    """By a module of the gateway, where it makes an error itself. `refused` and `over_quota` are looked at below."""
    for call in ast.walk(ast.parse(file.read_text())):
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            continue
        given = {each.arg: each.value for each in call.keywords}
        match call.func.id:
            case "ApiError":
                status, code = call.args[0], given.get("code")
            case "invalid":
                status, code = ast.Constant(400), given.get("code", call.args[2] if len(call.args) > 2 else None)
            case _:
                continue
        if isinstance(status, ast.Constant) and (code is None or isinstance(code, ast.Constant)):
            yield status.value, NONE if code is None else code.value  # type: ignore[misc]
        else:
            assert file.name == "problem.py", f"{file}:{call.lineno}: neither its status nor its code may be computed"


def test_errors() -> None:
    listed = [(int(row[0]), code) for row in rows("Errors") for code in names(row[1]) or [row[1]]]
    known = {problem for file in GATEWAY.rglob("*.py") for problem in raised(file)}
    known |= {(error.status, error.code or NONE) for error in (refused(reason, "", 1.0) for reason in RejectReason)}
    known |= {(429, quota) for quota in Allowance.__struct_fields__}
    assert sorted(listed) == sorted(known)
