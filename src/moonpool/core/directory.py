"""Which node holds which block, in which tier (DESIGN: Conductor).

Per key space and tier: key -> one int, a bitmask of holders. A prompt is matched by AND-ing the masks
along its keys. Soft state: rebuilt from the nodes' numbered announcements and snapshots.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from moonpool.core.vocabulary import BlockKey, Chain, KeySpaceId, PartId, Tier

_Masks = dict[BlockKey, int]


class IndexHealth(enum.Enum):
    EXACT = "exact"
    CATCHING_UP = "catching-up"
    """An announcement is missing; what is known may be wrong until the node's snapshot comes."""


@dataclass(slots=True)
class _Holder:
    bit: int
    seq: int = 0
    """The newest announcement applied."""
    snapshot_seq: int = 0
    """Announcements up to here are covered by a snapshot."""
    health: IndexHealth = IndexHealth.CATCHING_UP
    counts: dict[Tier, int] = field(default_factory=lambda: dict.fromkeys(Tier, 0))


@dataclass(slots=True)
class Directory:
    """Announcements of a node that has not joined raise KeyError: the Conductor filters by incarnation."""

    _holders: dict[PartId, _Holder] = field(default_factory=dict)
    _by_bit: dict[int, PartId] = field(default_factory=dict)
    _spaces: dict[KeySpaceId, dict[Tier, _Masks]] = field(default_factory=dict)

    def join(self, node: PartId) -> None:
        """A node with unknown content; its snapshot should be asked for. Raises ValueError if it is there already."""
        if node in self._holders:
            raise ValueError(f"node {node} has joined already; forget it first")
        bit = 1
        while bit in self._by_bit:
            bit <<= 1
        self._holders[node] = _Holder(bit)
        self._by_bit[bit] = node

    def forget(self, node: PartId) -> None:
        """All its blocks leave. Visits every key: nodes die rarely."""
        holder = self._holders.pop(node)
        del self._by_bit[holder.bit]
        self._clear(holder.bit)

    def stored(self, node: PartId, seq: int, space: KeySpaceId, tier: Tier, keys: Sequence[BlockKey]) -> bool:
        """Apply an announcement. True: one is missing or repeated for the first time, ask for a snapshot."""
        holder = self._holders[node]
        if seq <= holder.snapshot_seq:
            return False
        masks = self._spaces.setdefault(space, {t: {} for t in Tier})[tier]
        bit = holder.bit
        for key in keys:
            mask = masks.get(key, 0)
            if not mask & bit:
                masks[key] = mask | bit
                holder.counts[tier] += 1
        return self._advance(holder, seq)

    def removed(self, node: PartId, seq: int, space: KeySpaceId, tier: Tier, keys: Sequence[BlockKey]) -> bool:
        """As `stored`, for blocks that left a tier."""
        holder = self._holders[node]
        if seq <= holder.snapshot_seq:
            return False
        masks = self._spaces.get(space, {}).get(tier, {})
        bit = holder.bit
        for key in keys:
            mask = masks.get(key, 0)
            if mask & bit:
                holder.counts[tier] -= 1
                if mask == bit:
                    del masks[key]
                else:
                    masks[key] = mask & ~bit
        return self._advance(holder, seq)

    def replace(self, node: PartId, seq: int, blocks: Sequence[tuple[KeySpaceId, Tier, Sequence[BlockKey]]]) -> None:
        """A snapshot: exactly these blocks, as of the node's announcement `seq`."""
        holder = self._holders[node]
        self._clear(holder.bit)
        holder.counts = dict.fromkeys(Tier, 0)
        for space, tier, keys in blocks:
            masks = self._spaces.setdefault(space, {t: {} for t in Tier})[tier]
            for key in keys:
                mask = masks.get(key, 0)
                if not mask & holder.bit:
                    masks[key] = mask | holder.bit
                    holder.counts[tier] += 1
        holder.seq = holder.snapshot_seq = seq
        holder.health = IndexHealth.EXACT

    def match(self, chain: Chain) -> list[tuple[PartId, int]]:
        """(node, its leading run in any tier) for every node with at least one block; longest first, then by id."""
        tiers = self._spaces.get(chain.space)
        if not tiers:
            return []
        dram, ssd = tiers[Tier.DRAM].get, tiers[Tier.SSD].get
        alive, blocks = -1, 0
        runs: list[tuple[PartId, int]] = []
        for key in chain.keys:
            still = alive & (dram(key, 0) | ssd(key, 0))
            if blocks and still != alive:
                runs += ((node, blocks) for node in self._nodes(alive & ~still))
            alive = still
            if not alive:
                break
            blocks += 1
        if blocks and alive:
            runs += ((node, blocks) for node in self._nodes(alive))
        runs.sort(key=lambda run: (-run[1], run[0]))
        return runs

    def health(self, node: PartId) -> IndexHealth:
        return self._holders[node].health

    def counts(self, node: PartId) -> dict[Tier, int]:
        """Blocks a tier; one that is in two tiers counts in both."""
        return dict(self._holders[node].counts)

    def nodes(self) -> tuple[PartId, ...]:
        return tuple(self._holders)

    def _advance(self, holder: _Holder, seq: int) -> bool:
        in_order = seq == holder.seq + 1
        holder.seq = max(holder.seq, seq)
        if in_order or holder.health is IndexHealth.CATCHING_UP:
            return False
        holder.health = IndexHealth.CATCHING_UP
        return True

    def _nodes(self, mask: int) -> Iterator[PartId]:
        while mask:
            bit = mask & -mask
            yield self._by_bit[bit]
            mask ^= bit

    def _clear(self, bit: int) -> None:
        for space, tiers in list(self._spaces.items()):
            for tier, masks in tiers.items():
                tiers[tier] = {k: left for k, mask in masks.items() if (left := mask & ~bit)}
            if not any(tiers.values()):
                del self._spaces[space]

    def check_integrity(self) -> None:
        """Raises AssertionError where masks, counts and nodes disagree."""
        assert {h.bit: n for n, h in self._holders.items()} == self._by_bit
        known = sum(self._by_bit)
        counted = {(node, tier): 0 for node in self._holders for tier in Tier}
        for tiers in self._spaces.values():
            for tier, masks in tiers.items():
                for key, mask in masks.items():
                    assert mask, f"{key!r} is kept without a holder"
                    assert not mask & ~known, f"{key!r} is held by an unknown node"
                    for node in self._nodes(mask):
                        counted[node, tier] += 1
        assert counted == {(node, tier): n for node, h in self._holders.items() for tier, n in h.counts.items()}
