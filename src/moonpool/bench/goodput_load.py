"""Slices of a trace for `make bench-goodput`: consecutive requests, at any rate, the same for every system."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct, structs

from moonpool.trace.kinds import parse_kind
from moonpool.trace.read import TraceFile
from moonpool.trace.request import TraceRequest
from moonpool.trace.shape import Shape, reshape
from moonpool.trace.synthesize import synthesize

BLOCK_TOKENS = 512
JITTER = 3.0
"""Seconds of the trace: its arrivals are in bursts of so many, an artefact of how it was taken."""
SYNTHETIC = "poisson?n=2000&rate=4&input=6000&output=120&shared=.4&turns=2"
"""Of a smoke test."""


class Load(Struct, frozen=True):
    """One seed's slice."""

    seed: int
    requests: tuple[TraceRequest, ...]
    """At the trace's own times, the first at 0."""
    block_tokens: int = BLOCK_TOKENS
    """Of their block ids."""

    @property
    def mean_tokens(self) -> tuple[float, float]:
        """Of prompts and answers."""
        count = len(self.requests)
        return sum(r.input_tokens for r in self.requests) / count, sum(r.output_tokens for r in self.requests) / count

    def at(self, rate: float, seconds: float, least: int) -> list[TraceRequest]:
        """`rate` a second on average, as many as come in so many `seconds`, but no fewer than `least`."""
        count = min(max(math.ceil(rate * seconds), least), len(self.requests))
        taken = self.requests[:count]
        factor = (count - 1) / rate / max(taken[-1].arrival, 1e-9)
        return [structs.replace(request, arrival=request.arrival * factor) for request in taken]


def loads(trace: Path | None, seeds: Sequence[int], size: int, scale_input: float, scale_output: float) -> list[Load]:
    """A slice of `size` requests for each seed, evenly spread over the trace; without a trace synthetic ones.

    Raises TraceError.
    """
    whole = list(synthesize(parse_kind(SYNTHETIC)) if trace is None else TraceFile(trace))
    whole.sort(key=lambda request: request.arrival)
    last = max(len(whole) - size, 0)
    found = []
    for number, seed in enumerate(seeds):
        begin = whole[last * (2 * number + 1) // (2 * len(seeds))].arrival - whole[0].arrival
        shape = Shape(begin=begin, first=size, scale_input=scale_input, scale_output=scale_output, jitter=JITTER)
        taken = list(reshape(whole, shape, BLOCK_TOKENS, seed))
        first = taken[0].arrival
        found.append(Load(seed, tuple(structs.replace(each, arrival=each.arrival - first) for each in taken)))
    return found


def shorter(load: Load, prompts: int, answers: int) -> Load:
    """Lengths divided by so much, and blocks with the prompts: what these share stays the same part of them."""
    block_tokens, rest = divmod(load.block_tokens, prompts)
    if rest:
        raise ValueError(f"blocks of {load.block_tokens} tokens do not become {prompts} times shorter")
    requests = [
        structs.replace(
            request,
            input_tokens=max(-(-request.input_tokens // prompts), 1),
            output_tokens=max(round(request.output_tokens / answers), 1),
        )
        for request in load.requests
    ]
    return Load(load.seed, tuple(requests), block_tokens)
