"""An open-loop client: requests are sent when they are due, whatever became of those before them.

All times count from the moment at which a request was due, so that a client that lags, or a server that does not
accept, shows in the figures instead of thinning the load (coordinated omission). One connection a request, and no HTTP
library: the client shares its machine with the cluster that it measures.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

import msgspec
import numpy as np
from msgspec import Struct

from moonpool.core.vocabulary import Slo
from moonpool.report.summary import intervals_of

ANSWER_SECONDS = 60.0
"""A hang guard: no answer takes as long."""
LINE_BYTES = 1 << 20


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
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._model = model

    async def offer(
        self, requests: Sequence[Asked], answered: Callable[[Answer], None] = lambda _: None
    ) -> list[Answer]:
        """Each when it is due; the answers in the same order, when all are there. `answered`: called with each."""
        loop = asyncio.get_running_loop()
        raw = [self._raw(asked) for asked in requests]
        began = loop.time()
        asking = []
        for asked, data in zip(requests, raw, strict=True):
            if (wait := began + asked.due - loop.time()) > 0:
                await asyncio.sleep(wait)
            task = asyncio.create_task(self._ask(asked, data, began + asked.due))
            task.add_done_callback(lambda done: answered(done.result()))
            asking.append(task)
        return await asyncio.gather(*asking)

    async def ask(self, asked: Asked) -> Answer:
        """Now."""
        return await self._ask(asked, self._raw(asked), asyncio.get_running_loop().time())

    async def _ask(self, asked: Asked, raw: bytes, due: float) -> Answer:
        loop = asyncio.get_running_loop()
        sent = loop.time() - due
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                reader, writer = await asyncio.open_connection(self._host, self._port, limit=LINE_BYTES)
                try:
                    writer.write(raw)
                    return await self._read(reader, asked, sent, due)
                finally:
                    writer.close()
        except (OSError, TimeoutError, ValueError, IndexError) as e:
            return Answer(asked, sent, loop.time() - due, reason=f"{type(e).__name__}: {e}")

    async def _read(self, reader: asyncio.StreamReader, asked: Asked, sent: float, due: float) -> Answer:
        loop = asyncio.get_running_loop()
        status = int((await reader.readline()).split()[1])
        headers = {}
        while (line := await reader.readline()).strip():
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.lower()] = value.strip()
        if status != 200:
            await reader.read()
            advice = headers.get("retry-after")
            reason = headers.get("x-moonpool-reason", "")
            after = None if advice is None else float(advice)
            return Answer(asked, sent, loop.time() - due, status, reason, after)
        times: list[float] = []
        completed, reason = False, ""
        while line := await reader.readline():
            if line.startswith(b"data: {"):
                event = _decode(line[6:])
                times += [loop.time()] * sum(len(choice.token_ids) for choice in event.choices)
                reason = event.error.code if event.error is not None else reason
            completed = completed or (line.startswith(b"data: [DONE]") and not reason)
        intervals = tuple([b - a for a, b in itertools.pairwise(times)])
        ttft = times[0] - due if times else None
        return Answer(asked, sent, loop.time() - due, status, reason, None, ttft, intervals, completed)

    def _raw(self, asked: Asked) -> bytes:
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
        data = msgspec.json.encode(body)
        lines = [
            "POST /v1/completions HTTP/1.1",
            f"host: {self._host}:{self._port}",
            "content-type: application/json",
            f"content-length: {len(data)}",
            "connection: close",
        ]
        limits = (("x-slo-ttft-ms", asked.slo.ttft), ("x-slo-tpot-ms", asked.slo.tbt))
        lines += [f"{name}: {limit * 1e3:.3f}" for name, limit in limits if limit is not None]
        return "\r\n".join([*lines, "", ""]).encode() + data


class _Choice(Struct):
    token_ids: list[int] = []


class _Error(Struct):
    code: str = "error"


class _Event(Struct):
    choices: list[_Choice] = []
    error: _Error | None = None


_decode = msgspec.json.Decoder(_Event).decode
