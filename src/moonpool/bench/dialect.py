"""What an endpoint takes: found out by asking it, with a few short requests before a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec import Struct

from moonpool.bench.endpoint import Endpoint, Reply, unreachable
from moonpool.bench.prompts import Prompts, Words
from moonpool.errors import MoonpoolError
from moonpool.trace.request import TraceRequest

Api = Literal["completions", "chat"]

PATHS: dict[Api, str] = {"completions": "/completions", "chat": "/chat/completions"}
OPTIONAL = ("return_token_ids", "min_tokens", "ignore_eos", "stream_options")
"""Fields that not every endpoint takes; the first ones are given up first."""
PROBED = (16, 48)
"""Prompt tokens of the requests that find out."""
PROBE_OUTPUT = 4
PROBE_BLOCK = 16
PROBE_SEED = (1 << 62) + 1
"""No run has its prompts."""


class Dialect(Struct, frozen=True):
    """How requests are put to one endpoint."""

    model: str
    api: Api = "completions"
    as_ids: bool = True
    """Prompts are token ids, else text."""
    fields: tuple[str, ...] = OPTIONAL
    extra_tokens: int = 0
    """That the endpoint puts before a prompt: a beginning-of-text token, a chat template."""
    context_tokens: int | None = None
    """As it tells; None: it does not."""
    notes: tuple[str, ...] = ()
    """What a reader of the figures should know."""

    @property
    def path(self) -> str:
        return PATHS[self.api]

    def body(self, prompt: bytes, output_tokens: int) -> bytes:
        """`prompt`: as `Prompts` makes it."""
        shown = msgspec.Raw(b"[%b]" % prompt if self.as_ids else b'"%b"' % prompt)
        body: dict[str, object] = {"model": self.model, "max_tokens": max(output_tokens, 1)}
        if self.api == "chat":
            body["messages"] = [{"role": "user", "content": shown}]
        else:
            body["prompt"] = shown
        body |= {"temperature": 0, "stream": True}
        wanted: dict[str, object] = {
            "return_token_ids": True,
            "min_tokens": max(output_tokens, 1),
            "ignore_eos": True,
            "stream_options": {"include_usage": True},
        }
        return msgspec.json.encode(body | {name: wanted[name] for name in self.fields})


class Wish(Struct, frozen=True):
    """What is tried, in this order."""

    model: str
    """Empty: what it names first."""
    api: Api
    ids: Words | None
    text: Words | None


async def find_dialect(endpoint: Endpoint, wish: Wish) -> Dialect:
    """Raises MoonpoolError where the endpoint cannot be used, saying why."""
    model, context = await _model(endpoint, wish.model)
    refusals = []
    for words, as_ids in ((wish.ids, True), (wish.text, False)):
        if words is None or (as_ids and wish.api == "chat"):
            continue
        dialect = Dialect(model, wish.api, as_ids, context_tokens=context)
        found = await _try(endpoint, dialect, words)
        if isinstance(found, Dialect):
            return found
        refusals.append(f"{'token ids' if as_ids else 'text'}: {found.status or ''} {found.message or found.reason}")
    way_out = "" if wish.text else "; --vocabulary N bounds token ids, --tokenizer MODEL makes prompts of text"
    raise MoonpoolError(f"{endpoint.base} does not take what replay sends ({'; '.join(refusals)}){way_out}")


async def _model(endpoint: Endpoint, wanted: str) -> tuple[str, int | None]:
    """The model's name, and its context where the endpoint tells it."""
    status, body = await endpoint.get("/models")
    _check_key(endpoint, status)
    try:
        served = msgspec.json.decode(body, type=_Models).data if status == 200 else []
    except msgspec.MsgspecError:
        served = []
    if not served:
        if not wanted:
            raise MoonpoolError(f"{endpoint.base}/models answers {status} and names no model: say which with --model")
        return wanted, None
    found = next((each for each in served if each.id == wanted or not wanted), None)
    if found is None:
        names = ", ".join(each.id for each in served[:8])
        raise MoonpoolError(f"{endpoint.base} has no model {wanted!r}; it has {names}")
    return found.id, found.max_model_len


async def _try(endpoint: Endpoint, dialect: Dialect, words: Words) -> Dialect | Reply:
    """The dialect without the fields that are refused; a reply where it is refused anyway."""
    prompts = Prompts(words, PROBE_BLOCK, PROBE_SEED)
    counts: list[int | None] = []
    reply = None
    for number, tokens in enumerate(PROBED):
        prompt = await prompts.prompt(number, TraceRequest(0.0, tokens, PROBE_OUTPUT))
        reply = await endpoint.stream(dialect.path, dialect.body(prompt, PROBE_OUTPUT))
        while not reply.completed:
            _check_key(endpoint, reply.status)
            if not reply.status:
                raise unreachable(endpoint.base, reply.reason)
            if reply.status not in (400, 422, 501) or not dialect.fields:
                return reply
            named = [name for name in dialect.fields if name in reply.message]
            less = tuple(name for name in dialect.fields if name != (named or dialect.fields)[0])
            dialect = msgspec.structs.replace(dialect, fields=less)
            reply = await endpoint.stream(dialect.path, dialect.body(prompt, PROBE_OUTPUT))
        counts.append(reply.usage.prompt_tokens)
    assert reply is not None
    return _checked(endpoint, dialect, counts, reply)


def _checked(endpoint: Endpoint, dialect: Dialect, counts: Sequence[int | None], last: Reply) -> Dialect:
    """Raises MoonpoolError where prompts do not have the lengths that they should have."""
    notes, extra = [], 0
    told = [count for count in counts if count is not None]
    if len(told) < len(PROBED):
        notes.append("the endpoint does not say how many tokens a prompt has: lengths are not verified")
    else:
        more = {count - tokens for count, tokens in zip(told, PROBED, strict=True)}
        extra = max(more)
        if len(more) > 1 or extra < 0:
            shown = ", ".join(f"{tokens} became {count}" for count, tokens in zip(told, PROBED, strict=True))
            raise MoonpoolError(
                f"{endpoint.base} counts other prompt tokens than were sent ({shown}): "
                f"give the tokenizer of its model with --tokenizer"
            )
    answered = last.usage.completion_tokens or len(last.times)
    if answered != PROBE_OUTPUT:
        notes.append(
            f"the endpoint does not force the length of an answer ({PROBE_OUTPUT} tokens wanted, {answered} came): "
            "max_tokens only bounds it"
        )
    elif "ignore_eos" not in dialect.fields and "min_tokens" not in dialect.fields:
        notes.append("the endpoint takes neither ignore_eos nor min_tokens: max_tokens only bounds answers")
    if last.usage.cached_tokens is None:
        notes.append("the endpoint does not say how many prompt tokens it found cached")
    if extra:
        notes.append(f"the endpoint puts {extra} tokens before each prompt; they count as the prompt's first")
    return msgspec.structs.replace(dialect, extra_tokens=extra, notes=tuple(notes))


def _check_key(endpoint: Endpoint, status: int) -> None:
    if status in (401, 403):
        raise MoonpoolError(f"{endpoint.base} answers {status}: give the right key with --api-key or MOONPOOL_API_KEY")


class _Served(Struct):
    id: str
    max_model_len: int | None = None


class _Models(Struct):
    data: list[_Served] = []
