"""An open-loop client: requests are sent when they are due, whatever became of those before them.

All times count from the moment at which a request was due, so that a client that lags, or a server that does not
accept, shows in the figures instead of thinning the load (coordinated omission).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from typing import TypeVar

import msgspec
import numpy as np
from msgspec import Struct

from moonpool.bench.endpoint import Endpoint, base_of
from moonpool.core.vocabulary import Slo
from moonpool.report.summary import intervals_of

ANSWER_SECONDS = 60.0
"""A hang guard: no answer takes as long."""

T = TypeVar("T")


class Asked(Struct, frozen=True):
    """One request, when it is due, and what it is held to."""

    due: float
    """Seconds from the beginning of the run."""
    bucket: int
    prompt: tuple[int, ...]
    output_tokens: int
    slo: Slo = Slo()
    priority: str = ""


class Answer(Struct, frozen=True):
    """What became of it. Times in seconds since it was due."""

    asked: Asked
    sent: float
    answered: float
    """Its last byte."""
    status: int = 0
    """Of HTTP; 0: the connection failed, or nothing came in time."""
    reason: str = ""
    """`x-moonpool-reason`, or what went wrong."""
    retry_after: float | None = None
    ttft: float | None = None
    intervals: tuple[float, ...] = ()
    """Between tokens."""
    completed: bool = False

    @property
    def refused(self) -> bool:
        return self.status == 429

    @property
    def attains(self) -> bool:
        """As DESIGN says: complete, TTFT and the mean of the slowest tenth of intervals within its limits."""
        slo = self.asked.slo
        if not self.completed or self.ttft is None:
            return False
        slowest, _, _ = intervals_of(np.asarray(self.intervals))
        return (slo.ttft is None or self.ttft <= slo.ttft) and (slo.tbt is None or slowest <= slo.tbt)


class Lengths(Struct, frozen=True):
    """Prompts of `shortest` to `longest` tokens, and their share of the load."""

    shortest: int
    longest: int
    share: float

    @property
    def name(self) -> str:
        return f"{self.shortest}-{self.longest}"


def poisson(
    rate: float,
    seconds: float,
    buckets: Sequence[Lengths],
    output: tuple[int, int],
    limits: Sequence[Slo],
    rng: random.Random,
    priorities: Sequence[tuple[str, float]] = (("", 1.0),),
) -> list[Asked]:
    """Arrivals at `rate` a second; lengths evenly drawn in logarithms. No two prompts share a prefix.

    `limits`: one a bucket. `priorities`: names and shares.
    """
    due, made = 0.0, []
    while (due := due + rng.expovariate(rate)) < seconds:
        bucket = rng.choices(range(len(buckets)), [b.share for b in buckets])[0]
        name = rng.choices([n for n, _ in priorities], [share for _, share in priorities])[0]
        prompt = prompt_of(drawn(buckets[bucket].shortest, buckets[bucket].longest, rng), rng)
        made.append(Asked(due, bucket, prompt, drawn(*output, rng), limits[bucket], name))
    return made


def drawn(least: int, most: int, rng: random.Random) -> int:
    return min(int(math.exp(rng.uniform(math.log(least), math.log(most + 1)))), most)


def prompt_of(tokens: int, rng: random.Random) -> tuple[int, ...]:
    return tuple([rng.randrange(100, 40_000) for _ in range(tokens)])


class Client:
    """Of one gateway."""

    def __init__(self, url: str, model: str) -> None:
        self._base = base_of(url)
        self._model = model

    async def offer(
        self, requests: Sequence[Asked], answered: Callable[[Answer], None] = lambda _: None
    ) -> list[Answer]:
        """Each when it is due; the answers in the same order, when all are there. `answered`: called with each."""
        raw = [self._body(asked) for asked in requests]
        answers: dict[int, Answer] = {}
        began = asyncio.get_running_loop().time()
        async with Endpoint(self._base, timeout=ANSWER_SECONDS) as endpoint:

            async def ask(at: int) -> None:
                asked = requests[at]
                answers[at] = await _ask(endpoint, asked, raw[at], began + asked.due)
                answered(answers[at])

            async def due() -> AsyncGenerator[tuple[float, int], None]:
                for at, asked in enumerate(requests):
                    yield began + asked.due, at

            await at_due(due(), ask, max(len(requests), 1))
        return [answers[at] for at in range(len(requests))]

    async def ask(self, asked: Asked) -> Answer:
        """Now."""
        async with Endpoint(self._base, timeout=ANSWER_SECONDS) as endpoint:
            return await _ask(endpoint, asked, self._body(asked), asyncio.get_running_loop().time())

    def _body(self, asked: Asked) -> bytes:
        body: dict[str, object] = {
            "model": self._model,
            "prompt": asked.prompt,
            "max_tokens": asked.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        if asked.priority:
            body["priority"] = asked.priority
        return msgspec.json.encode(body)


async def at_due(
    turns: AsyncGenerator[tuple[float, T], None],
    act: Callable[[T], Coroutine[object, object, None]],
    most: int,
    full: Callable[[], None] = lambda: None,
) -> None:
    """`act` on each when it is due (of the loop's clock; they come in that order), until all are over.

    With `most` under way it tells `full`, and waits for one to end. Cancelled, it cancels what is under way.
    """
    loop = asyncio.get_running_loop()
    room = asyncio.Semaphore(most)
    running: set[asyncio.Task[None]] = set()
    failed: list[BaseException] = []

    def over(task: asyncio.Task[None]) -> None:
        running.discard(task)
        room.release()
        if not task.cancelled() and (error := task.exception()) is not None:
            failed.append(error)

    try:
        async with contextlib.aclosing(turns):
            async for due, turn in turns:
                if (wait := due - loop.time()) > 0:
                    await asyncio.sleep(wait)
                if room.locked():
                    full()
                await room.acquire()
                if failed:
                    break
                task = asyncio.create_task(act(turn))
                running.add(task)
                task.add_done_callback(over)
        if running:
            await asyncio.wait(running)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    if failed:
        raise failed[0]


def limit_headers(slo: Slo) -> dict[str, str]:
    """That tell a Moonpool gateway a request's own limits."""
    limits = (("x-slo-ttft-ms", slo.ttft), ("x-slo-tpot-ms", slo.tbt))
    return {name: f"{limit * 1e3:.3f}" for name, limit in limits if limit is not None}


async def _ask(endpoint: Endpoint, asked: Asked, body: bytes, due: float) -> Answer:
    sent = asyncio.get_running_loop().time() - due
    reply = await endpoint.stream("/completions", body, limit_headers(asked.slo))
    return Answer(
        asked,
        sent,
        reply.ended - due,
        reply.status,
        reply.reason,
        reply.retry_after,
        reply.times[0] - due if reply.times else None,
        tuple(reply.intervals),
        reply.completed,
    )
