"""What splits of so many machines could bear at most, by arithmetic: where a search begins, and what it leaves out.

Prefill: the computing that prompts need after what a pool without bounds has of them. Decode: the largest batch whose
step keeps the TBT limit and whose context the accelerators hold. Queues, bursts and links are not in it: a search
corrects it by what it simulates.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from moonpool.core.vocabulary import Slo
from moonpool.sim.pipeline import of_group
from moonpool.sim.profile import Profile
from moonpool.sim.unservable import with_cached
from moonpool.trace.request import TraceRequest


class Split(Struct, frozen=True, order=True):
    """Machines of each kind, and how many of prefill form one instance."""

    prefill: int
    decode: int
    pipeline: int = 1

    @property
    def name(self) -> str:
        groups = f" in {self.prefill // self.pipeline} x {self.pipeline}" if self.pipeline > 1 else ""
        return f"{self.prefill}P{groups} + {self.decode}D"


class Work(Struct, frozen=True):
    """What a trace asks for, means over its requests."""

    requests: int
    seconds: float
    """From the first arrival to the last."""
    new_tokens: float
    """Of prompts, not cached."""
    new_squared: float
    """n² − p²."""
    chunks: float
    output_tokens: float
    """Of decode steps: all but the first."""
    context: float
    """Tokens that a decode step reads for one request, mean over steps."""


def work_of(requests: Sequence[TraceRequest], profile: Profile, missing: float = 0.0) -> Work:
    """`missing`: share of what could be cached that is not. Raises ValueError for no requests."""
    if not requests:
        raise ValueError("no request to plan for")
    new = squared = chunks = output = context = 0.0
    for request, found in with_cached(requests, profile.block_tokens):
        tokens, cached = request.input_tokens, found * (1.0 - missing)
        new += tokens - cached
        squared += tokens * tokens - cached * cached
        chunks += -(-(tokens - cached) // profile.chunk_tokens)
        steps = max(request.output_tokens - 1, 0)
        output += steps
        context += steps * (tokens + steps / 2)
    count = len(requests)
    seconds = max(requests[-1].arrival - requests[0].arrival, 1e-9)
    return Work(
        count, seconds, new / count, squared / count, chunks / count, output / count, context / max(output, 1.0)
    )


def prefill_rate(work: Work, profile: Profile, split: Split) -> float:
    """Requests a second that the prefill machines compute when they never wait."""
    costs = of_group(profile, split.pipeline).prefill
    each = costs.fixed * work.chunks + costs.per_token * work.new_tokens + costs.per_token_squared * work.new_squared
    return split.prefill / split.pipeline / each


def decode_rate(work: Work, profile: Profile, slo: Slo, split: Split) -> float:
    """Requests a second that the decode machines serve with full batches."""
    costs, context = profile.decode, work.context
    batch = min(profile.slots, profile.vram_tokens / max(context, 1.0))
    if slo.tbt is not None:
        batch = min(batch, (slo.tbt - costs.fixed) / (costs.per_request + costs.per_context_token * context))
    batch = max(batch, 1.0)
    step = costs.fixed + batch * (costs.per_request + costs.per_context_token * context)
    return split.decode * batch / (step * max(work.output_tokens, 1.0))


def splits(nodes: int, pipelines: Sequence[int]) -> list[Split]:
    """All ways to divide them; at least one machine of each kind."""
    return [
        Split(prefill, nodes - prefill, pipeline)
        for pipeline in sorted(set(pipelines))
        for prefill in range(1, nodes)
        if prefill % pipeline == 0
    ]
