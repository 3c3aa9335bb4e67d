"""Watches a simulated cluster: its load, its links and where the most used prefixes lie, now and then."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from heapq import nsmallest
from itertools import islice

from msgspec import Struct, structs

from moonpool.core.vocabulary import BlockKey
from moonpool.report.samples import MOST_SAMPLES, Recording, Sample, sample_of
from moonpool.sim.clock import Link
from moonpool.sim.cluster import Simulation
from moonpool.sim.request import key_of
from moonpool.trace.arrivals import Arrivals

WATCHED = 6
"""Prefixes."""
WATCHED_PROMPTS = 20_000
"""They are sought in so many prompts, the first: to count the blocks of all would be most of a long run's memory."""
ONE_PREFIX = 0.8
"""A block that this share of the prompts with the block before it go on with belongs to the same prefix."""


class Recorder:
    """Made before the simulation runs; it reads, and changes nothing."""

    def __init__(self, simulation: Simulation, arrivals: Arrivals) -> None:
        """`arrivals`: what it is sent."""
        self._simulation = simulation
        self._recording = Recording(max(arrivals.last / (MOST_SAMPLES / 2), 0.1))
        size = simulation.setup.profile.block_tokens
        prompts = (each.blocks[: each.input_tokens // size] for each in islice(arrivals, WATCHED_PROMPTS))
        self.watched = hottest_prefixes(prompts, WATCHED)
        """In the order of `Sample.replicas`."""
        self._links: list[Link] = [node.link for node in simulation.nodes.values()]
        self._busy = [0.0] * len(self._links)
        self._at = 0.0
        simulation.clock.after(self._recording.period, self._take)

    @property
    def samples(self) -> Sequence[Sample]:
        return self._recording.samples

    def _take(self) -> None:
        simulation, now = self._simulation, self._simulation.clock.now
        use = self._link_use(now)
        holders = simulation.holders([prefix.key for prefix in self.watched])
        self._recording.add(
            structs.replace(
                sample_of(simulation.describe(), now),
                link_use=sum(use) / max(len(use), 1),
                link_use_most=max(use, default=0.0),
                replicas=tuple(len(nodes) for nodes in holders),
            )
        )
        simulation.clock.after(self._recording.period, self._take)

    def _link_use(self, now: float) -> list[float]:
        """Of each link since the last sample. What is booked ahead lies at the end of a link's queue."""
        seconds = max(now - self._at, 1e-9)
        before, self._at = self._busy, now
        self._busy = [link.busy_seconds - max(link.free_at - now, 0.0) for link in self._links]
        return [min(max((b - a) / seconds, 0.0), 1.0) for a, b in zip(before, self._busy, strict=True)]


class Prefix(Struct, frozen=True):
    """A block that many prompts have, standing for those that nearly all of them go on with."""

    key: BlockKey
    depth: int
    """Its place in the prompts, from 1."""
    prompts: int


def hottest_prefixes(prompts: Iterable[Sequence[int]], most: int) -> tuple[Prefix, ...]:
    """The most used first; a block that nearly all prompts with the block before it have is no prefix of its own.

    `prompts`: the ids of their whole blocks.
    """
    uses: Counter[int] = Counter()
    parents: dict[int, int] = {}
    depth: dict[int, int] = {}
    for blocks in prompts:
        uses.update(blocks)
        for at in range(len(blocks) - 1, -1, -1):
            if blocks[at] in depth:
                break
            depth[blocks[at]] = at + 1
            if at:
                parents[blocks[at]] = blocks[at - 1]
    heads = [
        (-count, depth[block], key_of(block))
        for block, count in uses.items()
        if count > 1 and not (block in parents and count >= ONE_PREFIX * uses[parents[block]])
    ]
    return tuple(Prefix(key, at, -count) for count, at, key in nsmallest(most, heads))
