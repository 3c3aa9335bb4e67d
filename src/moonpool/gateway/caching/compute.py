"""Computing a prefix: a request like any other, whose one token nobody reads."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from msgspec import Struct

from moonpool.core.classes import BATCH
from moonpool.core.vocabulary import BlockKey, KeySpace, NodePeer, Slo
from moonpool.gateway.cluster import Cluster
from moonpool.gateway.generation import Cancelled, Generation, Job, Refused, chains_of
from moonpool.gateway.problem import ApiError, refused
from moonpool.wire.messages import Sampling


class Computed(Struct, frozen=True):
    """Blocks that are in the pool now, or will be in a moment."""

    space: KeySpace
    keys: tuple[BlockKey, ...]
    nodes: tuple[NodePeer, ...]
    """That have got them, the likeliest first."""


async def compute(
    cluster: Cluster, tokens: Sequence[int], salt: str, *, label: str, seconds: float, priority: str = ""
) -> Computed:
    """Have the KVCache of `tokens` computed within `seconds`. `priority`: a class; empty: behind all others.

    Raises ApiError, as the cluster refuses any request.
    """
    loop = asyncio.get_running_loop()
    chains = await asyncio.to_thread(chains_of, tokens, cluster.fleet.spaces, salt)
    now = loop.time()
    job = Job(
        label=label,
        prompt=tuple(tokens),
        chains=chains,
        sampling=Sampling(seed=0, temperature=0.0, max_tokens=1, ignore_eos=True),
        salt=salt,
        slo=Slo(),
        priority=priority or BATCH.name,
        arrived=now,
        deadline=now + seconds,
    )
    news = asyncio.Event()
    generation = cluster.submit(job, news.set)
    try:
        while generation.ending is None:
            await news.wait()
            news.clear()
    finally:
        cluster.cancel(generation, "its prefix is not wanted any more")
    return _computed(generation)


def _computed(generation: Generation) -> Computed:
    match generation.ending:
        case Refused(reason, message, retry_after):
            raise refused(reason, message, retry_after)
        case Cancelled(reason):
            raise ApiError(503, f"the prefix was not computed: {reason}", code="cancelled")
    place = generation.place
    keys = next((c.keys for c in generation.job.chains if place is not None and c.space == place.space.id), None)
    if place is None or not keys:
        raise ApiError(503, "the fleet changed while the prefix was computed: try again", code="cancelled")
    return Computed(place.space, keys, (place.decode_node, place.prefill_node))
