"""Requests that no idle cluster could serve in time, whatever its policies: a table of goodput lists them apart."""

from __future__ import annotations

from collections.abc import Iterable

from moonpool.core.blocks import hit_limit
from moonpool.core.vocabulary import Slo
from moonpool.sim.profile import Profile
from moonpool.trace.request import TraceRequest


def unservable(requests: Iterable[TraceRequest], profile: Profile, slo: Slo) -> list[TraceRequest]:
    """`requests`: in order of arrival. Even alone and with all that earlier prompts had already in place."""
    seen: set[int] = set()
    found = []
    for request in requests:
        hit = 0
        for block in request.blocks:
            if block not in seen:
                break
            hit += 1
        seen.update(request.blocks[hit:])
        if _is_late(request, hit, profile, slo):
            found.append(request)
    return found


def _is_late(request: TraceRequest, hit: int, profile: Profile, slo: Slo) -> bool:
    tokens = request.input_tokens
    cached = min(hit, hit_limit(tokens, profile.block_tokens)) * profile.block_tokens
    prefill, decode = profile.prefill, profile.decode
    computed = prefill.per_token * (tokens - cached) + prefill.per_token_squared * (tokens**2 - cached**2)
    steps = -(-(tokens - cached) // profile.chunk_tokens)
    if slo.ttft is not None and steps * prefill.fixed + computed > slo.ttft:
        return True
    step = decode.fixed + decode.per_request + decode.per_context_token * (tokens + 1)
    return slo.tbt is not None and request.output_tokens > 1 and step > slo.tbt
