"""Requests that no idle cluster could serve in time, whatever its policies: a table of goodput lists them apart."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from moonpool.core.blocks import hit_limit
from moonpool.core.chunks import pipeline_chunk
from moonpool.core.cost import PrefillCost
from moonpool.core.vocabulary import Slo
from moonpool.sim.pipeline import hop_seconds, of_group
from moonpool.sim.profile import Profile
from moonpool.trace.request import TraceRequest


def unservable(requests: Iterable[TraceRequest], profile: Profile, slo: Slo, pipeline: int = 1) -> list[TraceRequest]:
    """`requests`: in order of arrival. Even alone and with all that earlier prompts had already in place.

    `pipeline`: prefill machines that form one instance.
    """
    return [
        request
        for request, cached in with_cached(requests, profile.block_tokens)
        if (slo.ttft is not None and idle_ttft(request.input_tokens, cached, profile, pipeline) > slo.ttft)
        or (slo.tbt is not None and idle_step(request, profile) > slo.tbt)
    ]


def with_cached(requests: Iterable[TraceRequest], block_tokens: int) -> Iterator[tuple[TraceRequest, int]]:
    """Each with the prompt tokens that a pool without bounds has of it when it comes."""
    seen: set[int] = set()
    for request in requests:
        hit = 0
        for block in request.blocks:
            if block not in seen:
                break
            hit += 1
        seen.update(request.blocks[hit:])
        yield request, min(hit, hit_limit(request.input_tokens, block_tokens)) * block_tokens


def idle_ttft(tokens: int, cached: int, profile: Profile, pipeline: int = 1) -> float:
    """Seconds on an idle instance that has the cached tokens in place already."""
    group = of_group(profile, pipeline).prefill
    size = pipeline_chunk(tokens, cached, pipeline, PrefillCost(group), profile.chunk_tokens)
    steps = -(-(tokens - cached) // size)
    computed = group.per_token * (tokens - cached) + group.per_token_squared * (tokens**2 - cached**2)
    if pipeline == 1:
        return steps * group.fixed + computed
    # Machines that take equally long for a step wait for the longest one only: the last whole chunk, or what is left.
    ends = {tokens, cached + (steps - 1) * size}
    longest = 0.0
    for end in ends:
        begin = max(end - (size if end < tokens else tokens - cached - (steps - 1) * size), cached)
        longest = max(longest, group.per_token * (end - begin) + group.per_token_squared * (end**2 - begin**2))
    hops = hop_seconds(profile, min(tokens - cached, size))
    return steps * group.fixed + computed + (pipeline - 1) * (group.fixed + longest + hops)


def idle_step(request: TraceRequest, profile: Profile) -> float:
    """Seconds of its first decode step alone; 0 where it has none."""
    decode = profile.decode
    if request.output_tokens <= 1:
        return 0.0
    return decode.fixed + decode.per_request + decode.per_context_token * (request.input_tokens + 1)
