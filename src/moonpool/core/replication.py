"""Copies of blocks on further nodes, and which of too many to drop (docs/protocol.md, "Copies").

`plan_copies` and `plan_drops` are functions of what the directory and the nodes' reports say; equal input gives equal
plans, so that a question asked twice orders the same again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from moonpool.core import actions as act
from moonpool.core.directory import Directory, IndexHealth
from moonpool.core.events import ReplicasWanted
from moonpool.core.fleet import Fleet
from moonpool.core.settings import Decisions
from moonpool.core.vocabulary import BlockKey, PartId, Tier

ORDER_SECONDS = 60.0
"""A copy that has not begun by then is not wanted any more: much will have changed."""
KEYS_A_QUESTION = 4096
"""More are not looked at: the Conductor has others to serve."""

Holders = Mapping[PartId, Tier]
"""Who has a block, and in which tier at best."""
FreeBytes = Mapping[PartId, int]
"""All nodes, with the DRAM that nothing uses (below 0 where more was promised than there is)."""


class Copy(NamedTuple):
    """These blocks go from one node to another."""

    target: PartId
    source: PartId
    keys: tuple[BlockKey, ...]


class Plan(NamedTuple):
    copies: tuple[Copy, ...]
    counts: tuple[int, ...]
    """Of each key: on how many nodes it will be."""


def plan_copies(
    keys: Sequence[BlockKey], holders: Sequence[Holders], free: FreeBytes, block_bytes: int, wanted: int
) -> Plan:
    """Bring each block to `wanted` nodes, or to all there are. `holders`: of each key; one without any is left out.

    Targets are those with the most free bytes, before the first copy; one that was chosen is chosen again as long as
    it has room, so that blocks which belong together stay together. Ties break by id.
    """
    left, sent = dict(free), dict.fromkeys(free, 0)
    chosen: dict[tuple[PartId, PartId], list[BlockKey]] = {}
    counts = []
    for key, having in zip(keys, holders, strict=True):
        targets = {target for target, _ in chosen}
        lacking = [node for node in free if node not in having]
        lacking.sort(key=lambda node: (left[node] < block_bytes, node not in targets, -free[node], node))
        more = lacking[: max(0, wanted - len(having))] if having else []
        for target in more:
            source = min(having, key=lambda node: (having[node] is not Tier.DRAM, sent.get(node, 0), node))
            sent[source] = sent.get(source, 0) + block_bytes
            left[target] -= block_bytes
            chosen.setdefault((target, source), []).append(key)
        counts.append(len(having) + len(more))
    return Plan(tuple(Copy(*pair, tuple(some)) for pair, some in chosen.items()), tuple(counts))


def plan_drops(
    keys: Sequence[BlockKey], holders: Sequence[Holders], free: FreeBytes, at_most: int
) -> dict[PartId, tuple[BlockKey, ...]]:
    """Which nodes give up which blocks, so that `at_most` copies stay, and one in any case.

    What stays is in DRAM rather than on SSD, and on the nodes with the most free bytes.
    """
    drops: dict[PartId, list[BlockKey]] = {}
    for key, having in zip(keys, holders, strict=True):
        ranked = sorted(having, key=lambda node: (having[node] is not Tier.DRAM, -free.get(node, 0), node))
        for node in ranked[max(1, at_most) :]:
            drops.setdefault(node, []).append(key)
    return {node: tuple(some) for node, some in drops.items()}


def order_copies(
    event: ReplicasWanted, fleet: Fleet, directory: Directory, decisions: Decisions
) -> Iterator[act.Action]:
    """The orders, and then the answer."""
    space, keys = event.space, event.keys[:KEYS_A_QUESTION]
    nodes = fleet.nodes
    holders: Sequence[Holders] = directory.copies(space.id, keys)
    if fleet.private:
        holders = [{node: tier for node, tier in having.items() if fleet.lends(node)} for having in holders]
    able = [node for id_, node in nodes.items() if fleet.lends(id_)]
    free = {node.part.id: node.free_bytes for node in able if node.part.capacity.dram_bytes >= space.block_bytes}
    plan = plan_copies(keys, holders, free, space.block_bytes, event.copies)
    for copy in plan.copies:
        decisions.copies_ordered += len(copy.keys)
        target, source = nodes[copy.target].peer, nodes[copy.source].peer
        yield act.Replicate(target, space, copy.keys, source, ORDER_SECONDS)
    if event.at_most is not None:
        # What a node has whose announcements are not all here may be gone: it counts as no copy that could stay.
        sure = [{n: tier for n, tier in h.items() if directory.health(n) is IndexHealth.EXACT} for h in holders]
        for node, dropped in plan_drops(keys, sure, free, max(event.at_most, event.copies)).items():
            decisions.drops_ordered += len(dropped)
            yield act.DropReplica(nodes[node].peer, space, dropped)
    unseen = len(event.keys) - len(keys)
    yield act.ReplicasOrdered(event.to, event.serial, (*plan.counts, *(0,) * unseen))
