"""The first token from real vLLM servers, one prompt at a time: computed, found in the server's own cache, loaded."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

from moonpool.bench.dialect import Dialect
from moonpool.bench.endpoint import Endpoint, Reply, base_of
from moonpool.bench.vllm_server import MODEL
from moonpool.core.blocks import hit_limit
from moonpool.core.vocabulary import Slo
from moonpool.errors import MoonpoolError

COLD, LOCAL, POOL = "cold", "hit in its own prefix cache", "hit in the pool, put by the other server"
TTFT_TIMES = 10.0
TBT_TIMES = 5.0
"""Of an idle server's medians: the limits, as the paper sets them (PAPER §8)."""
IDLE_OUTPUT = 24
ANSWER_SECONDS = 300.0

Seconds = dict[str, list[float]]


async def first_tokens(urls: Sequence[str], tokens: int, block_tokens: int, repetitions: int) -> Seconds:
    """By where KVCache comes from; the two servers of one pool take turns. A first round is not counted.

    Raises MoonpoolError where vLLM's own count of cached tokens is not what such a hit has.
    """
    rng, found = random.Random(tokens), {COLD: [], LOCAL: [], POOL: []}  # type: tuple[random.Random, Seconds]
    hit = hit_limit(tokens, block_tokens) * block_tokens
    for at in range(repetitions + 1):
        one, other = urls[at % 2], urls[1 - at % 2]
        prompt = _prompt(rng, tokens)
        for name, url, expected in ((COLD, one, 0), (LOCAL, one, hit), (POOL, other, hit)):
            began, reply = await _ask(url, prompt, 1)
            if reply.usage.cached_tokens != expected:
                raise MoonpoolError(
                    f"{name}: {reply.usage.cached_tokens} of {tokens} tokens were cached, {expected} should be"
                )
            if at:
                found[name].append(reply.times[0] - began)
    return found


async def cold(urls: Sequence[str], tokens: int, repetitions: int) -> tuple[list[float], list[float]]:
    """Of prompts that no server has: seconds to their first tokens, and between those that follow."""
    rng = random.Random(-tokens)
    firsts: list[float] = []
    intervals: list[float] = []
    for at in range(repetitions + 1):
        began, reply = await _ask(urls[at % 2], _prompt(rng, tokens), IDLE_OUTPUT)
        if at:
            firsts.append(reply.times[0] - began)
            intervals += reply.intervals
    return firsts, intervals


def limits(first: float, interval: float) -> Slo:
    """Of medians of an idle server."""
    return Slo(round(TTFT_TIMES * first, 3), round(TBT_TIMES * interval, 4))


def _prompt(rng: random.Random, tokens: int) -> bytes:
    return b",".join(b"%d" % rng.randrange(1000, 40_000) for _ in range(tokens))


async def _ask(url: str, prompt: bytes, output: int) -> tuple[float, Reply]:
    """When it was asked, by the event loop's clock. Raises MoonpoolError where it is not answered."""
    dialect = Dialect(MODEL)
    async with Endpoint(base_of(url), timeout=ANSWER_SECONDS) as endpoint:
        began = asyncio.get_running_loop().time()
        reply = await endpoint.stream(dialect.path, dialect.body(prompt, output))
    if not reply.completed or not reply.times:
        raise MoonpoolError(f"vLLM did not answer: {reply.status} {reply.reason} {reply.message}")
    return began, reply
