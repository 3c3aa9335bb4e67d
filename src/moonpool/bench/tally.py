"""Counts what comes of a replay's requests; memory grows by a request's figures, and by nothing else."""

from __future__ import annotations

import asyncio
import time

import numpy as np

from moonpool.bench.dialect import Dialect
from moonpool.bench.endpoint import Reply
from moonpool.report.intervals import Intervals
from moonpool.report.live import Client, Live
from moonpool.report.outcomes import Outcome, Outcomes
from moonpool.report.summary import Spread, intervals_of
from moonpool.trace.request import TraceRequest

TICK_SECONDS = 0.05
MOST_KINDS = 64
"""Of reasons, which an endpoint may make up for each request; further ones are one."""
KIND_CHARS = 64


class Tally:
    """Of one run. Times are those of the event loop's clock."""

    def __init__(self, begin: float, warm_up: float) -> None:
        """`begin`: of the run; what is due within `warm_up` seconds of it is not measured."""
        self.outcomes = Outcomes()
        self.refused = self.completed = self.sent = self.streams = self.full = self.tokens = 0
        self.errors: dict[str, int] = {}
        self.first_error = ""
        self._kinds: set[str] = set()
        self._begin = begin + warm_up
        self._first = float("inf")
        self._last = begin
        self._intervals, self._lag, self._stall = Intervals(), Intervals(), Intervals()
        self._prompt_tokens = self._output_tokens = 0
        self._most_streams = self._warm = self._held = self._cut_off = 0
        self._wrong_prompts = self._short_answers = 0
        self._knows_cached = True
        self._cpu, self._clock = time.process_time(), time.monotonic()
        self._cpu_seconds = self._wall_seconds = 0.0

    @property
    def failed(self) -> int:
        return sum(self.errors.values())

    @property
    def lag(self) -> Spread:
        return self._lag.spread()

    def note_full(self) -> None:
        """The next request has to wait until another ends."""
        self.full += 1

    def begin_one(self, due: float, now: float, held: bool) -> None:
        """A request is being sent that was due at `due`."""
        self.sent += 1
        self.streams += 1
        self._most_streams = max(self._most_streams, self.streams)
        self._lag.add([max(now - due, 0.0)])
        self._held += held

    def cut_off(self, due: float) -> None:
        """It was under way when the run was interrupted."""
        self.streams -= 1
        self._cut_off += due >= self._begin

    def end_one(self, due: float, request: TraceRequest, reply: Reply) -> None:
        self.streams -= 1
        self.tokens += len(reply.times)
        if due < self._begin:
            self._warm += 1
            return
        self._first, self._last = min(self._first, due), max(self._last, reply.ended)
        usage, intervals = reply.usage, reply.intervals
        output = len(intervals) + bool(reply.times)
        prompt = request.input_tokens if usage.prompt_tokens is None else usage.prompt_tokens
        cached = min(usage.cached_tokens or 0, prompt)
        slowest, p90, longest = intervals_of(np.asarray(intervals))
        self.outcomes.put(
            len(self.outcomes),
            Outcome(
                arrived=due - self._begin,
                input_tokens=request.input_tokens,
                output_tokens=output,
                completed=reply.completed,
                ttft=reply.times[0] - due if reply.times else None,
                slowest_tenth=slowest,
                p90_interval=p90,
                longest_interval=longest,
                cached_tokens=cached,
                computed_tokens=prompt - cached if reply.times else 0,
                refusal=self._kind(reply.reason) if reply.refused else "",
            ),
        )
        self._intervals.add(intervals)
        self._output_tokens += output
        if reply.times:
            self._prompt_tokens += prompt
            self._wrong_prompts += prompt != max(request.input_tokens, 1)
        self._judge(request, reply, output)

    def _judge(self, request: TraceRequest, reply: Reply, output: int) -> None:
        if reply.completed:
            self.completed += 1
            self._short_answers += output < request.output_tokens
            self._knows_cached &= reply.usage.cached_tokens is not None
        elif reply.refused:
            self.refused += 1
        else:
            kind = self._kind(reply.reason)
            self.errors[kind] = self.errors.get(kind, 0) + 1
            self.first_error = self.first_error or f"{reply.reason}: {reply.message}".rstrip(": ")

    def _kind(self, reason: str) -> str:
        if len(self._kinds) < MOST_KINDS:
            self._kinds.add(reason[:KIND_CHARS])
        return reason[:KIND_CHARS] if reason[:KIND_CHARS] in self._kinds else "other"

    async def watch_loop(self) -> None:
        """How late the event loop is, until this is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            wanted = loop.time() + TICK_SECONDS
            await asyncio.sleep(TICK_SECONDS)
            self._stall.add([max(loop.time() - wanted, 0.0)])

    def end(self) -> None:
        """The run is over: what is done from now on is not its own."""
        self._cpu_seconds = time.process_time() - self._cpu
        self._wall_seconds = time.monotonic() - self._clock

    def live(self, endpoint: str, dialect: Dialect) -> Live:
        """After `end`."""
        notes = [*dialect.notes]
        if self._wrong_prompts:
            notes.append(f"{self._wrong_prompts} prompts had other lengths than the trace, as the endpoint counts")
        if self._short_answers:
            notes.append(f"{self._short_answers} answers ended before the length that the trace gives them")
        return Live(
            endpoint=endpoint,
            model=dialect.model,
            seconds=max(self._last - min(self._first, self._last), 0.0),
            prompt_tokens=self._prompt_tokens,
            output_tokens=self._output_tokens,
            intervals=self._intervals.spread(),
            errors=dict(sorted(self.errors.items())),
            client=Client(
                lag=self._lag.spread(),
                stall=self._stall.spread(),
                cpu_share=self._cpu_seconds / max(self._wall_seconds, 1e-9),
                cpu_per_token=self._cpu_seconds / max(self.tokens, 1),
                most_streams=self._most_streams,
                full=self.full,
            ),
            warm_up=self._warm,
            cut_off=self._cut_off,
            wrong_prompts=self._wrong_prompts,
            short_answers=self._short_answers,
            held=self._held,
            knows_cached=self._knows_cached,
            notes=tuple(notes),
        )
