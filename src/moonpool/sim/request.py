"""One request on its way through the simulated cluster, and what is measured of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from moonpool.core.vocabulary import BlockKey, RejectReason, RequestId
from moonpool.report.summary import Intervals, Outcome, intervals_of
from moonpool.trace.request import TraceRequest


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens that came step by step: the first `gap` seconds after the token before, the next ones in growing steps."""

    gap: float
    first: float
    """Seconds of the second step of the run."""
    growth: float
    """Seconds that each further step takes more."""
    tokens: int


@dataclass(slots=True)
class SimRequest:
    id: RequestId
    number: int
    """In order of arrival, from 1."""
    trace: TraceRequest
    arrived: float
    keys: tuple[BlockKey, ...]
    priority: str = ""
    """The class that it asks for."""
    attempt: int = 1
    computed_tokens: int = 0
    """By prefill, all attempts together."""
    cached_tokens: int = 0
    """Of the first attempt."""
    fetched_tokens: int = 0
    """Those of them that came from another node."""
    first_token: float | None = None
    last_token: float = 0.0
    output: int = 0
    finished: float | None = None
    refused: RejectReason | None = None
    retry_after: float | None = None
    runs: list[Run] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        return self.finished is not None or self.refused is not None

    @property
    def output_tokens(self) -> int:
        """It always has one: the first token is prefill's."""
        return max(self.trace.output_tokens, 1)

    def take_first(self, now: float, cached: int, fetched: int = 0) -> None:
        """An attempt's first token, which prefill draws; after a preemption the pause counts as an interval."""
        if self.first_token is None:
            self.first_token, self.cached_tokens, self.fetched_tokens = now, cached, fetched
        else:
            self.runs.append(Run(now - self.last_token, 0.0, 0.0, 1))
        self.output += 1
        self.last_token = now

    def take(self, start: float, first: float, growth: float, steps: int) -> None:
        """Tokens of consecutive decode steps that began at `start`; each takes `growth` longer than the last."""
        gap = start + first - self.last_token
        self.runs.append(Run(gap, first + growth, growth, steps))
        self.output += steps
        self.last_token = start + steps * first + growth * (steps * (steps - 1) / 2)

    def intervals(self) -> Intervals:
        parts: list[Intervals] = []
        for run in self.runs:
            part = np.empty(run.tokens)
            part[0] = run.gap
            part[1:] = run.first + run.growth * np.arange(run.tokens - 1)
            parts.append(part)
        return np.concatenate(parts) if parts else np.empty(0)

    @property
    def ttft(self) -> float | None:
        """Seconds; None where there was no first token."""
        return None if self.first_token is None else self.first_token - self.arrived

    def outcome(self) -> Outcome:
        slowest, p90, longest = intervals_of(self.intervals())
        return Outcome(
            arrived=self.arrived,
            input_tokens=self.trace.input_tokens,
            output_tokens=self.output,
            completed=self.finished is not None,
            ttft=self.ttft,
            slowest_tenth=slowest,
            p90_interval=p90,
            longest_interval=longest,
            cached_tokens=self.cached_tokens,
            fetched_tokens=self.fetched_tokens,
            computed_tokens=self.computed_tokens,
            refusal="" if self.refused is None else self.refused.value,
            priority=self.priority,
        )
