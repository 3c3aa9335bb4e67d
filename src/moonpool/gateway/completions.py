"""/v1/chat/completions and /v1/completions."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
import secrets
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from moonpool.core.vocabulary import RejectReason, Slo
from moonpool.gateway.access import TENANT
from moonpool.gateway.answers import AnswerMemory
from moonpool.gateway.bodies import Bodies, Body
from moonpool.gateway.caching.keeper import Keeper
from moonpool.gateway.caching.reference import HEADER, Reference, read_reference
from moonpool.gateway.choice import Choice
from moonpool.gateway.cluster import Cluster
from moonpool.gateway.config import GatewayConfig
from moonpool.gateway.exchange import DRAIN_SECONDS, Exchange
from moonpool.gateway.front import LABEL, SUMMARY, respond
from moonpool.gateway.generation import Job, Refused
from moonpool.gateway.intake import Intake, Intended
from moonpool.gateway.keys.keyring import Keyring
from moonpool.gateway.keys.tenant import Tenant
from moonpool.gateway.presence import unless, until_gone
from moonpool.gateway.problem import invalid, refused
from moonpool.gateway.replies import Shape, usage_of
from moonpool.gateway.seats import Seats
from moonpool.gateway.tokenizer import Tokenizer

MAX_SLO_MS = 1e9


@dataclass(frozen=True, slots=True)
class Desk:
    """What the endpoints share."""

    config: GatewayConfig
    tokenizer: Tokenizer
    intake: Intake
    answers: AnswerMemory
    cluster: Cluster
    seats: Seats
    bodies: Bodies
    keyring: Keyring | None
    """None: no API keys are asked for."""
    keeper: Keeper
    abort: Callable[[object], None]
    """Break the connection of this client (the scope's `client`)."""


class Completions:
    """An ASGI endpoint."""

    def __init__(self, desk: Desk, *, chat: bool) -> None:
        self._desk = desk
        self._chat = chat

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        desk = self._desk
        arrived = asyncio.get_running_loop().time()
        headers = Headers(scope=scope)
        tenant: Tenant = scope[TENANT]
        slo, cache = tenant.slo(_read_slo(headers)), _read_cache(headers)
        desk.seats.check()
        tenant.begin_request()
        body = await desk.bodies.read(headers, receive)  # without a seat: a client that sends nothing must not hold one
        exchange = Exchange(desk.cluster, desk.answers if self._chat else None)
        with body, desk.seats.take() as booking, tenant.stream(exchange.revoke) as use:
            if not desk.cluster.fleet.context_tokens:
                raise refused(RejectReason.NO_INSTANCE, desk.cluster.fleet.lacks or "the cluster is not ready", 1.0)
            watch = asyncio.create_task(_watch(receive, exchange.lose_client))
            try:
                intended = await unless(watch, self._intend(body, tenant, cache))
                if intended.cache is not None:
                    desk.keeper.extend(intended.cache, tenant.rights.group)
                exchange.check_client()
                booking.extend(len(intended.prompts) - 1)
                use.admit([len(prompt.tokens) for prompt in intended.prompts])
                self._submit(exchange, intended, slo, arrived, scope[LABEL])
                await self._answer(exchange, intended, scope, send)
            finally:
                exchange.cancel("its response has ended")
                use.settle(*_used(exchange.choices))
                watch.cancel()
                scope[SUMMARY] = _summary(exchange)

    def _intend(self, body: Body, tenant: Tenant, cache: Reference | None) -> Coroutine[object, object, Intended]:
        intake, fleet = self._desk.intake, self._desk.cluster.fleet
        read = intake.chat if self._chat else intake.completion
        work = partial(read, tenant=tenant, cache=cache, context_tokens=fleet.context_tokens, spaces=fleet.spaces)
        return intake.run(body, work)

    def _submit(self, exchange: Exchange, intended: Intended, slo: Slo, arrived: float, label: str) -> None:
        desk = self._desk
        for index, prompt in enumerate(intended.prompts):
            job = Job(
                label=label,
                prompt=prompt.tokens,
                chains=prompt.chains,
                sampling=prompt.sampling,
                salt=intended.ask.salt,
                slo=slo,
                priority=intended.ask.priority,
                arrived=arrived,
                deadline=arrived + desk.config.request_timeout,
            )
            generation = desk.cluster.submit(job, exchange.changed)
            exchange.choices.append(Choice(index, generation, desk.tokenizer, intended.ask.stop))

    async def _answer(self, exchange: Exchange, intended: Intended, scope: Scope, send: Send) -> None:
        desk = self._desk
        shape = Shape(
            desk.tokenizer,
            id_=secrets.token_hex(12),
            created=int(time.time()),
            model=desk.config.served_model_name,
            fingerprint=fingerprint(desk),
            chat=self._chat,
            ask=intended.ask,
        )
        if not intended.ask.stream:
            await respond(send, 200, await exchange.whole(shape))
            return
        with _patience(exchange, desk.config.stream_buffer, lambda: desk.abort(scope.get("client"))):
            await exchange.stream(shape, _stream_start(), send)


def fingerprint(desk: Desk) -> str:
    """Names what computes: it changes with the model, its dtype or its layout."""
    known = "|".join([desk.config.served_model_name, *(space.id for space in desk.cluster.fleet.spaces)])
    return "fp_" + hashlib.sha256(known.encode()).hexdigest()[:12]


async def _watch(receive: Receive, lose_client: Callable[[], None]) -> None:
    await until_gone(receive)
    lose_client()


@contextlib.contextmanager
def _patience(exchange: Exchange, stream_buffer: int, abort: Callable[[], None]) -> Iterator[None]:
    """Bound how long a reader may take: past the deadline one that lags far is cut off, another gets a moment more."""
    loop = asyncio.get_running_loop()

    timers: list[asyncio.TimerHandle] = []

    def at_deadline() -> None:
        if exchange.lag() > stream_buffer:
            abort()
        else:
            timers.append(loop.call_later(DRAIN_SECONDS, abort))

    timers.append(loop.call_at(exchange.choices[0].generation.job.deadline, at_deadline))
    try:
        yield
    finally:
        for timer in timers:
            timer.cancel()


def _stream_start() -> Message:
    headers = [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),
    ]
    return {"type": "http.response.start", "status": 200, "headers": headers}


def _read_slo(headers: Headers) -> Slo:
    """The request's own limits; the Conductor knows those of its class."""
    return Slo(_read_milliseconds(headers, "x-slo-ttft-ms"), _read_milliseconds(headers, "x-slo-tpot-ms"))


def _read_cache(headers: Headers) -> Reference | None:
    """The cached context that the request begins with."""
    value = headers.get(HEADER)
    return None if value is None else read_reference(value, HEADER)


def _read_milliseconds(headers: Headers, name: str) -> float | None:
    """In seconds."""
    value = headers.get(name)
    if value is None:
        return None
    if not re.fullmatch(r"\d{1,10}(\.\d{1,9})?", value) or not 0 < float(value) <= MAX_SLO_MS:
        raise invalid(name, f"{name} must be a number of milliseconds above 0 and up to {MAX_SLO_MS:g}")
    return float(value) / 1000


def _used(choices: Sequence[Choice]) -> tuple[int, int]:
    """Output tokens that came, and prompt tokens of what the cluster refused before it gave any."""
    generations = [choice.generation for choice in choices]
    unserved = [g for g in generations if isinstance(g.ending, Refused) and not g.output]
    return sum(len(g.output) for g in generations), sum(len(g.job.prompt) for g in unserved)


def _summary(exchange: Exchange) -> str:
    if not exchange.choices:
        return ""
    usage = usage_of(exchange.choices)
    ids = ",".join(c.generation.request for c in exchange.choices[:8])
    ends = ",".join(sorted({c.finish or "unfinished" for c in exchange.choices}))
    cached = usage.prompt_tokens_details.cached_tokens
    return f", {ids}: prompt {usage.prompt_tokens} ({cached} cached), output {usage.completion_tokens}, {ends}"
