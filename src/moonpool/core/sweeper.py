"""Copies of blocks that nobody asks for by name: more where a link is the bottleneck, fewer where memory is short.

Fetches replicate by themselves (DESIGN: Replication). Beside that the Conductor sweeps once a second, with a bounded
amount of work each time, over what placements have told it:

- prefixes whose fetch had to wait for links for long: one more copy, on the least busy node;
- prompts that nobody has used for `COLD_SECONDS`, where a node is nearly full: their last blocks, as far as no other
  prompt continues them, are dropped where another node has them, and go to the SSD where a node has one.

What goes of a prompt is always its end, for a block without the one before it is of no use.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import chain

from moonpool.core import actions as act
from moonpool.core.choice import Choice
from moonpool.core.cost import TransferCost
from moonpool.core.directory import Directory, IndexHealth
from moonpool.core.fleet import Fleet, NodeLoad
from moonpool.core.recent import Prefix, Prompt, RecentPrompts
from moonpool.core.replication import ORDER_SECONDS
from moonpool.core.settings import Decisions
from moonpool.core.vocabulary import BlockKey, Chain, KeySpace, PartId, Tier

SWEEP_SECONDS = 1.0
COLD_SECONDS = 120.0
SLOW = 1.5
"""A fetch that waits for so many times the seconds that it then takes has a bottleneck."""
FULL = 0.95
"""A node with this share of its arena in use is short of memory."""
PROMPTS_A_SWEEP = 16
KEYS_A_SWEEP = 2048
SLOW_REMEMBERED = 64
COPIES_A_SWEEP = 8


class Sweeper:
    def __init__(
        self, fleet: Fleet, directory: Directory, transfer: TransferCost, decisions: Decisions, out: list[act.Action]
    ) -> None:
        self._fleet = fleet
        self._directory = directory
        self._transfer = transfer
        self._decisions = decisions
        self._out = out
        self._swept_at = 0.0
        self._recent = RecentPrompts()
        self._slow: OrderedDict[BlockKey, Prompt] = OrderedDict()
        """Prefixes that had to wait for a link, by their last block."""

    def placed(self, choice: Choice, space: KeySpace, keys: tuple[BlockKey, ...], now: float) -> None:
        if not keys:
            return
        fetch, hit = choice.fetch, choice.hit_blocks
        if fetch is not None and len(self._slow) < SLOW_REMEMBERED:
            alone = self._transfer.seconds(fetch.count * space.block_bytes)
            if choice.fetch_seconds > (1.0 + SLOW) * alone:
                self._slow[keys[hit - 1]] = Prompt(space, keys[:hit], now)
        self._recent.used(Prompt(space, keys, now))

    def hottest(self, most: int) -> list[Prefix]:
        """Of the prompts that were placed last: what spared most blocks, first."""
        return self._recent.hottest(most)

    def sweep(self, now: float) -> None:
        """To be called whenever time has passed."""
        if now < self._swept_at + SWEEP_SECONDS:
            return
        self._swept_at = now
        for _ in range(min(COPIES_A_SWEEP, len(self._slow))):
            _, prefix = self._slow.popitem(last=False)
            self._copy(prefix, now)
        full = [id_ for id_, node in self._fleet.nodes.items() if _is_full(node) and self._fleet.lends(id_)]
        if full:
            self._make_room(full, now)

    # More copies

    def _copy(self, prefix: Prompt, now: float) -> None:
        """To the node of a prefill instance whose link is free first, from one that has all of it."""
        nodes, keys, space = self._fleet.nodes, prefix.keys, prefix.space
        held = {node: n for node, n in self._directory.match(Chain(space.id, keys)).items() if self._fleet.lends(node)}
        whole = [node for node, blocks in held.items() if blocks == len(keys) and self._is_exact(node)]
        able = {p.part.node_id: None for p in self._fleet.prefill.values() if p.space == space}
        lacking = [node for node in able if self._fleet.lends(node) and held.get(node, 0) < len(keys)]
        if not whole or not lacking:
            return

        def busy(node: PartId) -> tuple[float, int, PartId]:
            return max(nodes[node].link_free_at, now), -nodes[node].free_bytes, node

        source, target = nodes[min(whole, key=busy)], nodes[min(lacking, key=busy)]
        blocks = len(keys) - held.get(target.part.id, 0)
        begin = max(now, source.link_free_at, target.link_free_at)
        source.link_free_at = target.link_free_at = begin + self._transfer.seconds(blocks * space.block_bytes)
        self._decisions.hot_blocks_copied += blocks
        self._out.append(act.Replicate(target.peer, space, keys, source.peer, ORDER_SECONDS))

    # Fewer

    def _make_room(self, full: Sequence[PartId], now: float) -> None:
        # Where an answer was decoded, what goes on from these blocks is as well, and nowhere else.
        decoding = {d.part.node_id: None for d in self._fleet.decode.values()}
        with_ssd = {node: self._directory.counts(node)[Tier.SSD] > 0 for node in full}
        left = KEYS_A_SWEEP
        for _ in range(PROMPTS_A_SWEEP):
            oldest = self._recent.oldest()
            if oldest is None or now < oldest.used_at + COLD_SECONDS or left <= 0:
                return
            left -= len(oldest.keys)
            self._cool(oldest, with_ssd, decoding)
            self._recent.forget(oldest)

    def _cool(self, prompt: Prompt, full: dict[PartId, bool], decoding: dict[PartId, None]) -> None:
        """Of its end that no other prompt has: drop copies, and demote what is the only one.

        `full`: nodes that are short of memory, and whether they have an SSD.
        """
        first, end = self._recent.alone_from(prompt), len(prompt.keys)
        keep: dict[PartId, None] = {}
        """A node that keeps a block keeps those before it."""
        drops: dict[PartId, list[tuple[BlockKey, ...]]] = {}
        demotions: dict[PartId, list[tuple[BlockKey, ...]]] = {}
        # What holds for the last of blocks that the same nodes have holds for all of them.
        for blocks, having in reversed(self._directory.runs(prompt.space.id, prompt.keys[first:])):
            keys = prompt.keys[end - blocks : end]
            end -= blocks
            sure = [n for n, tier in having.items() if tier is Tier.DRAM and self._is_exact(n)]
            left = len(sure)
            for node in sorted(n for n in sure if n in full and n not in keep):
                if left > 1 and node not in decoding:
                    left -= 1
                    drops.setdefault(node, []).append(keys)
                elif full[node]:
                    demotions.setdefault(node, []).append(keys)
                else:
                    keep[node] = None
        self._order(prompt.space, drops, demotions)

    def _order(
        self,
        space: KeySpace,
        drops: dict[PartId, list[tuple[BlockKey, ...]]],
        demotions: dict[PartId, list[tuple[BlockKey, ...]]],
    ) -> None:
        """Runs of blocks come from the end of the prompt on, orders go out in its order."""
        nodes = self._fleet.nodes
        for node, runs in drops.items():
            keys = tuple(chain.from_iterable(reversed(runs)))
            self._decisions.surplus_dropped += len(keys)
            self._out.append(act.DropReplica(nodes[node].peer, space, keys))
        for node, runs in demotions.items():
            keys = tuple(chain.from_iterable(reversed(runs)))
            self._decisions.cold_demoted += len(keys)
            self._out.append(act.Demote(nodes[node].peer, space, keys))

    def _is_exact(self, node: PartId) -> bool:
        return self._fleet.lends(node) and self._directory.health(node) is IndexHealth.EXACT

    def check_integrity(self) -> None:
        self._recent.check_integrity()
        assert len(self._slow) <= SLOW_REMEMBERED


def _is_full(node: NodeLoad) -> bool:
    return node.part.reported.used_bytes >= FULL * max(node.part.capacity.dram_bytes, 1)
