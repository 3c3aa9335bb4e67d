"""One request on its way through the simulated cluster, and what is measured of it."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from moonpool.core.vocabulary import BlockKey, RejectReason, RequestId
from moonpool.report.outcomes import Outcome
from moonpool.report.summary import Intervals, intervals_of
from moonpool.trace.request import TraceRequest

MOST_KEYS = 1 << 18
"""Remembered; then all are forgotten."""


class BlockKeys(dict[int, BlockKey]):
    """Of a trace's block ids. Equal keys are one object, which all tables find faster."""

    def __missing__(self, block: int) -> BlockKey:
        if len(self) >= MOST_KEYS:
            self.clear()
        key = self[block] = key_of(block)
        return key


def key_of(block: int) -> BlockKey:
    return BlockKey(block.to_bytes(16, "big", signed=True))


class Run(NamedTuple):
    """Tokens that came step by step. Those of one batch share it."""

    start: float
    """When the first step began."""
    first: float
    """Seconds of the first step."""
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
    output: int = 0
    finished: float | None = None
    refused: RejectReason | None = None
    retry_after: float | None = None
    runs: array[float] = field(default_factory=lambda: array("d"))
    """The numbers of one `Run` after another."""
    placed: bool = False
    """Workers may have it, and know of its end later."""
    output_tokens: int = field(init=False)
    """It always has one: the first token is prefill's."""

    def __post_init__(self) -> None:
        self.output_tokens = max(self.trace.output_tokens, 1)

    @classmethod
    def of(
        cls, number: int, trace: TraceRequest, block_tokens: int, known: BlockKeys, priority: str = ""
    ) -> SimRequest:
        """The `number`th of the trace, with a key for each of its prompt's whole blocks."""
        whole = trace.input_tokens // block_tokens
        keys = tuple(map(known.__getitem__, trace.blocks[:whole])) if trace.blocks else own_keys(number, 0, whole)
        return cls(RequestId(f"r{number}"), number, trace, trace.arrival, keys, priority)

    @property
    def is_over(self) -> bool:
        return self.finished is not None or self.refused is not None

    def take_first(self, now: float, cached: int, fetched: int = 0) -> None:
        """An attempt's first token, which prefill draws; after a preemption the pause counts as an interval."""
        if self.first_token is None:
            self.first_token, self.cached_tokens, self.fetched_tokens = now, cached, fetched
        else:
            self.runs.extend(Run(now, 0.0, 0.0, 1))
        self.output += 1

    def take(self, runs: Iterable[float], tokens: int) -> None:
        """Tokens of consecutive decode steps; `runs`: the numbers of one `Run` after another."""
        self.runs.extend(runs)
        self.output += tokens

    def intervals(self) -> Intervals:
        """Seconds between one token and the next, from the first one on."""
        return intervals_of_each([self])[0]

    @property
    def ttft(self) -> float | None:
        """Seconds; None where there was no first token."""
        return None if self.first_token is None else self.first_token - self.arrived

    def outcome(self, figures: tuple[float, float, float] | None = None) -> Outcome:
        """`figures`: what `intervals_of` finds of its intervals, where somebody has computed it."""
        slowest, p90, longest = figures or intervals_of(self.intervals())
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


def intervals_of_each(requests: Sequence[SimRequest]) -> list[Intervals]:
    """As `SimRequest.intervals`. Several at once: the calls cost more than what they compute for one."""
    none = np.empty(0)
    found = [none] * len(requests)
    those = [at for at, request in enumerate(requests) if request.runs and request.first_token is not None]
    if not those:
        return found
    runs = array("d")
    begins = []
    """Of each request, which run is its first."""
    for at in those:
        begins.append(len(runs) // 4)
        runs += requests[at].runs
    start, first, growth, tokens = np.frombuffer(runs).reshape(-1, 4).T
    steps = tokens.astype(np.int64)
    after = steps.cumsum()
    at_first = after - steps
    within = np.arange(after[-1]) - (at_first + 1).repeat(steps)
    intervals = (first + growth).repeat(steps) + growth.repeat(steps) * within
    # Of each run's first token: since the last one of the run before, or since the first token of all.
    before = np.empty(len(steps))
    before[1:] = (start + tokens * first + growth * (tokens * (tokens - 1) / 2))[:-1]
    before[begins] = [requests[at].first_token for at in those]
    intervals[at_first] = start + first - before
    for at, own in zip(those, np.split(intervals, at_first[begins[1:]]), strict=True):
        found[at] = own
    return found


def own_keys(request: int, first: int, end: int) -> tuple[BlockKey, ...]:
    """Keys that no other request has."""
    return tuple(
        [BlockKey(hashlib.blake2b(f"{request}:{at}".encode(), digest_size=16).digest()) for at in range(first, end)]
    )
