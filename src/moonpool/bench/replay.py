"""A trace sent to a real endpoint, open loop: each request when it is due, whatever became of those before it.

Latencies count from when a request was due, so that neither a client that lags nor an endpoint that does not accept
thins the load that it is measured with. Bodies are made ahead of time, a little at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator

from msgspec import Struct

from moonpool.bench.dialect import Dialect
from moonpool.bench.endpoint import Endpoint
from moonpool.bench.open_loop import at_due, limit_headers
from moonpool.bench.prompts import Prompts
from moonpool.bench.tally import Tally
from moonpool.bench.turns import Turn
from moonpool.core.vocabulary import Slo

LEAD_SECONDS = 0.5
"""Before the first request is due: in it the first bodies are made."""
AHEAD_BYTES = 64 << 20
AHEAD_REQUESTS = 4096
PROGRESS_SECONDS = 0.5


class Rules(Struct, frozen=True):
    warm_up: float = 0.0
    """Seconds from the beginning whose requests are not measured."""
    most_streams: int = 10_000
    slo: Slo = Slo()
    """Sent with each request; nothing by default."""


class Replay:
    """One run. `stop` ends it early."""

    def __init__(self, endpoint: Endpoint, dialect: Dialect, prompts: Prompts, rules: Rules) -> None:
        self._endpoint = endpoint
        self._dialect = dialect
        self._prompts = prompts
        self._rules = rules
        self._headers = limit_headers(rules.slo)
        self._sending: asyncio.Task[None] | None = None
        self.interrupted = False

    def stop(self) -> None:
        """Send nothing more, and leave what is under way."""
        self.interrupted = True
        if self._sending is not None:
            self._sending.cancel()

    async def run(self, turns: Iterator[Turn], on_progress: Callable[[Tally], None] = lambda _: None) -> Tally:
        """Until all are over. Raises TraceError where the trace can no longer be read."""
        loop = asyncio.get_running_loop()
        begin = loop.time() + LEAD_SECONDS
        tally = Tally(begin, self._rules.warm_up)

        async def one(ready: tuple[Turn, bytes]) -> None:
            await self._one(*ready, begin, tally)

        async def due() -> AsyncGenerator[tuple[float, tuple[Turn, bytes]], None]:
            async with contextlib.aclosing(_Ahead(turns, self._body).all()) as bodies:
                async for turn, body in bodies:
                    yield begin + turn.due, (turn, body)

        watching = asyncio.create_task(tally.watch_loop())
        telling = asyncio.create_task(_tell(tally, on_progress))
        self._sending = asyncio.create_task(at_due(due(), one, self._rules.most_streams, tally.note_full))
        try:
            if self.interrupted:
                self._sending.cancel()
            await asyncio.wait({self._sending})
            if not self._sending.cancelled():
                self._sending.result()
        finally:
            for task in (self._sending, watching, telling):
                task.cancel()
            await asyncio.gather(self._sending, watching, telling, return_exceptions=True)
            tally.end()
        on_progress(tally)
        return tally

    async def _one(self, turn: Turn, body: bytes, begin: float, tally: Tally) -> None:
        loop = asyncio.get_running_loop()
        due, held = begin + turn.due, False
        if turn.after is not None:
            await turn.after.is_over.wait()
            ready = turn.after.ended + turn.think
            due, held = max(due, ready), ready > due
            if (wait := due - loop.time()) > 0:
                await asyncio.sleep(wait)
        tally.begin_one(due, loop.time(), held)
        try:
            reply = await self._endpoint.stream(self._dialect.path, body, self._headers)
        except asyncio.CancelledError:
            tally.cut_off(due)
            raise
        turn.end(reply.ended)
        tally.end_one(due, turn.request, reply)

    async def _body(self, turn: Turn) -> bytes:
        return self._dialect.body(await self._prompts.prompt(turn.number, turn.request), turn.request.output_tokens)


async def _tell(tally: Tally, on_progress: Callable[[Tally], None]) -> None:
    while True:
        await asyncio.sleep(PROGRESS_SECONDS)
        on_progress(tally)


class _Ahead:
    """Turns with their bodies, made before they are asked for, as far as AHEAD_BYTES and AHEAD_REQUESTS go."""

    def __init__(self, turns: Iterator[Turn], make: Callable[[Turn], Coroutine[object, object, bytes]]) -> None:
        self._turns = turns
        self._make = make
        self._ready: deque[tuple[Turn, bytes]] = deque()
        self._bytes = 0
        self._is_over = False
        self._changed = asyncio.Condition()

    async def all(self) -> AsyncGenerator[tuple[Turn, bytes], None]:
        filling = asyncio.create_task(self._fill())
        try:
            while (found := await self._take()) is not None:
                yield found
            await filling
        finally:
            filling.cancel()
            await asyncio.gather(filling, return_exceptions=True)

    async def _take(self) -> tuple[Turn, bytes] | None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._ready or self._is_over)
            if not self._ready:
                return None
            turn, body = self._ready.popleft()
            self._bytes -= len(body)
            self._changed.notify_all()
            return turn, body

    async def _fill(self) -> None:
        try:
            for turn in self._turns:
                body = await self._make(turn)
                async with self._changed:
                    await self._changed.wait_for(self._has_room)
                    self._ready.append((turn, body))
                    self._bytes += len(body)
                    self._changed.notify_all()
                await asyncio.sleep(0)
        finally:
            async with self._changed:
                self._is_over = True
                self._changed.notify_all()

    def _has_room(self) -> bool:
        return self._bytes < AHEAD_BYTES and len(self._ready) < AHEAD_REQUESTS
