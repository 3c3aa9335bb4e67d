"""Which node holds which block, in which tier (DESIGN: Conductor).

Per key space and tier: key -> one int, a bitmask of holders. A prompt is matched by AND-ing the masks
along its keys. Soft state: rebuilt from the nodes' numbered announcements and snapshots.

Nothing here takes time in proportion to all that is known, for everybody waits for the Conductor meanwhile: a node
that leaves, or whose content is announced anew, gives up its bit, which lookups ignore from then on. Each announcement
of whatever node clears a few thousand keys of such bits; a bit that is on no key any more is given out again.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from moonpool.core.keydump import KeyDump, KeyGroup
from moonpool.core.masks import SHARDS, Masks, Shard, clear_bits
from moonpool.core.vocabulary import BlockKey, Chain, KeySpaceId, PartId, Tier

KEYS_A_STEP = 4096
"""So many keys, and those of one shard more, are cleared of bits that were given up with each announcement."""
KEYS_CHECKED = 20_000
FEW_BITS = 4
"""Of a mask; more are looked for digit by digit."""
MOST_STALE_BITS = 64
"""Beyond that all are cleared at once: masks are to stay short."""
_SETS_REMEMBERED = 4096
"""Of nodes that have been found together."""


class IndexHealth(enum.Enum):
    EXACT = "exact"
    CATCHING_UP = "catching-up"
    """The node has joined, and its snapshot is not here yet, or not all parts of it: there is more than is known."""
    DEGRADED = "degraded"
    """An announcement is missing; what is known may be wrong until the node's snapshot comes."""


_HEALTHS = list(IndexHealth)
"""The best first."""


@dataclass(slots=True)
class _Holder:
    bit: int
    seq: int = 0
    """The newest announcement applied."""
    snapshot_seq: int = -1
    """Announcements up to here are covered by a snapshot. -1: none has come."""
    health: IndexHealth = IndexHealth.CATCHING_UP
    counts: dict[Tier, int] = field(default_factory=lambda: dict.fromkeys(Tier, 0))


@dataclass(slots=True)
class Directory:
    """Announcements of a node that has not joined raise KeyError: the Conductor filters by incarnation."""

    _holders: dict[PartId, _Holder] = field(default_factory=dict)
    _by_bit: dict[int, PartId] = field(default_factory=dict)
    _spaces: dict[KeySpaceId, dict[Tier, Masks]] = field(default_factory=dict)
    _live: int = 0
    """The holders' bits; what else is set in a mask means nothing."""
    _stale: int = 0
    """Bits given up before the present round of clearing began."""
    _later: int = 0
    """Bits given up since: for the next round."""
    _has_ssd: bool = False
    """Some block has been on an SSD."""
    _round: Iterator[Shard] = field(default_factory=lambda: iter(()))
    """What is still to be cleared of `_stale`."""
    _dump: KeyDump | None = None
    _sets: dict[int, tuple[PartId, ...]] = field(default_factory=dict)
    """Whose bits are in a mask, by id; until a bit gets another meaning."""

    def join(self, node: PartId) -> None:
        """A node with unknown content; its snapshot should be asked for. Raises ValueError if it is there already."""
        if node in self._holders:
            raise ValueError(f"node {node} has joined already; forget it first")
        self._holders[node] = _Holder(self._take_bit(node))

    def forget(self, node: PartId) -> None:
        """All its blocks leave."""
        self._give_up(self._holders.pop(node).bit)

    def stored(
        self, node: PartId, seq: int, space: KeySpaceId, tier: Tier, keys: Sequence[BlockKey], more: bool = False
    ) -> bool:
        """Apply an announcement. True: one is missing or repeated for the first time, ask for a snapshot.

        `more`: it is a part of a snapshot, and others follow.
        """
        holder = self._holders[node]
        if seq <= holder.snapshot_seq:
            return False
        self._add(holder, space, tier, keys)
        self._clear_some()
        return self._advance(holder, seq, is_last=not more)

    def removed(self, node: PartId, seq: int, space: KeySpaceId, tier: Tier, keys: Sequence[BlockKey]) -> bool:
        """As `stored`, for blocks that left a tier."""
        holder = self._holders[node]
        if seq <= holder.snapshot_seq:
            return False
        if space in self._spaces:
            holder.counts[tier] -= self._spaces[space][tier].clear_bit(keys, holder.bit)
        self._clear_some()
        return self._advance(holder, seq)

    def replace(
        self,
        node: PartId,
        seq: int,
        blocks: Sequence[tuple[KeySpaceId, Tier, Sequence[BlockKey]]],
        more: bool = False,
    ) -> None:
        """A snapshot: exactly these blocks, as of the node's announcement `seq`. `more`: those of the next ones too."""
        holder = self._holders[node]
        if any(holder.counts.values()):
            self._give_up(holder.bit)
            holder.bit = self._take_bit(node)
            holder.counts = dict.fromkeys(Tier, 0)
        for space, tier, keys in blocks:
            self._add(holder, space, tier, keys)
        self._clear_some()
        holder.seq = holder.snapshot_seq = seq
        holder.health = IndexHealth.CATCHING_UP if more else IndexHealth.EXACT

    def lacks(self, node: PartId, seq: int) -> bool:
        """The node's announcement `seq` was sent. True: it is lost, and no later one has told; ask for a snapshot."""
        holder = self._holders[node]
        return seq > holder.seq and _degrade(holder)

    def match(self, chain: Chain) -> dict[PartId, int]:
        """Of every node with at least one block its leading run in any tier; longest first, then by id."""
        tiers = self._spaces.get(chain.space)
        if not tiers:
            return {}
        dram, ssd = tiers[Tier.DRAM].shards, tiers[Tier.SSD].shards
        alive, blocks, shards, has_ssd = self._live, 0, SHARDS, self._has_ssd
        ended: list[tuple[int, int]] = []
        """Holders whose runs are so many blocks long, the shortest first."""
        for key in chain.keys:
            shard = hash(key) % shards
            holders = dram[shard].get(key, 0)
            if has_ssd:
                holders |= ssd[shard].get(key, 0)
            if holders & alive != alive:
                if blocks:
                    ended.append((alive & ~holders, blocks))
                alive &= holders
                if not alive:
                    break
            blocks += 1
        if blocks and alive:
            ended.append((alive, blocks))
        runs: dict[PartId, int] = {}
        for mask, blocks in reversed(ended):
            found = dict.fromkeys(self._sets.get(mask) or self._set_of(mask), blocks)
            runs = runs | found if runs else found
        return runs

    def slow_blocks(self, chain: Chain, runs: Mapping[PartId, int]) -> dict[PartId, int]:
        """Of runs that `match` has found: how many of their blocks are on SSD only; nodes without any are left out."""
        if not self._has_ssd:
            return {}
        left = {self._holders[node].bit: (node, blocks) for node, blocks in runs.items()}
        tiers = self._spaces.get(chain.space)
        if not left or not tiers:
            return {}
        dram, nodes = tiers[Tier.DRAM].get, sum(left)
        slow: dict[PartId, int] = {}
        for at, key in enumerate(chain.keys[: max(runs.values())]):
            absent = nodes & ~dram(key)
            while absent:
                bit = absent & -absent
                absent ^= bit
                node, blocks = left[bit]
                if at < blocks:
                    slow[node] = slow.get(node, 0) + 1
        return slow

    def copies(self, space: KeySpaceId, keys: Sequence[BlockKey]) -> list[dict[PartId, Tier]]:
        """Of each block who has it and where: in DRAM, or only on its SSD. By bit, which is the order of joining."""
        return [dict(having) for blocks, having in self.runs(space, keys) for _ in range(blocks)]

    def runs(self, space: KeySpaceId, keys: Sequence[BlockKey]) -> list[tuple[int, dict[PartId, Tier]]]:
        """As `copies`, for so many blocks after each other that have the same copies."""
        tiers = self._spaces.get(space)
        if not tiers:
            return [(len(keys), {})] if keys else []
        dram, ssd = tiers[Tier.DRAM].shards, tiers[Tier.SSD].shards
        live, shards, has_ssd = self._live, SHARDS, self._has_ssd
        fast = slow = -1
        masks: list[tuple[int, int, int]] = []
        begin = 0
        for at, key in enumerate(keys):
            shard = hash(key) % shards
            found = dram[shard].get(key, 0) & live
            below = ssd[shard].get(key, 0) & live & ~found if has_ssd else 0
            if found != fast or below != slow:
                if at:
                    masks.append((at - begin, fast, slow))
                fast, slow, begin = found, below, at
        if keys:
            masks.append((len(keys) - begin, fast, slow))
        return [
            (blocks, dict.fromkeys(self._nodes(a), Tier.DRAM) | dict.fromkeys(self._nodes(b), Tier.SSD))
            for blocks, a, b in masks
        ]

    def holders(self, space: KeySpaceId, keys: Sequence[BlockKey]) -> list[tuple[PartId, ...]]:
        """Of each block by itself the nodes that have it in any tier, by id."""
        return [tuple(self.match(Chain(space, (key,)))) for key in keys]

    def tiers(self, space: KeySpaceId, keys: Sequence[BlockKey]) -> list[tuple[tuple[PartId, ...], tuple[PartId, ...]]]:
        """Of each block who has it in DRAM, and who on SSD, by id."""
        tiers = self._spaces.get(space)
        if not tiers:
            return [((), ())] * len(keys)
        dram, ssd, live, named = tiers[Tier.DRAM].get, tiers[Tier.SSD].get, self._live, self._named
        return [(named(dram(key) & live), named(ssd(key) & live)) for key in keys]

    def page(self, after: str, most: int) -> tuple[list[tuple[KeySpaceId, list[BlockKey]]], str]:
        """Keys of about `most` blocks in some tier, and where the next page goes on; empty: there is none.

        `after`: what the page before has said; empty: from the start. Whatever is there meanwhile, and stays, is on one
        of the pages. Raises ValueError for a place that no page has named.
        """
        place, count = _place(after), 0
        found: list[tuple[KeySpaceId, list[BlockKey]]] = []
        spaces = list(self._spaces)
        for number in range(place[0], len(spaces)):
            dram, ssd = (self._spaces[spaces[number]][tier].shards for tier in Tier)
            for shard in range(place[1] if number == place[0] else 0, SHARDS):
                if count >= most:
                    return found, f"{number}.{shard}"
                keys = [*dram[shard], *(key for key in ssd[shard] if key not in dram[shard])]
                if keys:
                    found.append((spaces[number], keys))
                    count += len(keys)
        return found, ""

    def health(self, node: PartId) -> IndexHealth:
        return self._holders[node].health

    def awaits_snapshot(self, node: PartId) -> bool:
        """Its snapshot was asked for, and nothing of it has come."""
        holder = self._holders[node]
        return holder.health is IndexHealth.DEGRADED or holder.snapshot_seq < 0

    def worst_health(self, nodes: Sequence[PartId]) -> IndexHealth:
        """Of those of these nodes that are there."""
        there = [self._holders[node].health for node in nodes if node in self._holders]
        return max(there, key=_HEALTHS.index, default=IndexHealth.EXACT)

    def counts(self, node: PartId) -> dict[Tier, int]:
        """Blocks a tier; one that is in two tiers counts in both."""
        return dict(self._holders[node].counts)

    def nodes(self) -> tuple[PartId, ...]:
        return tuple(self._holders)

    # For journals: what is known now, in steps, and back

    def begin_dump(self) -> KeyDump:
        """All keys as they are now. An earlier dump ends, whether it is done or not."""
        self._dump = KeyDump(self._spaces)
        return self._dump

    def end_dump(self) -> None:
        self._dump = None
        for tiers in self._spaces.values():
            for masks in tiers.values():
                masks.dump = None

    def load(self, group: KeyGroup) -> None:
        """What a dump gave, into the directory that was made from the snapshot of that moment."""
        mask = int.from_bytes(group.mask, "little") & self._live
        if mask:
            self._masks_of(group.space)[group.tier].set_bit(group.unpacked(), mask)

    def to_plain(self) -> object:
        """All but the keys. Bits that were given up are nobody's concern: nothing that they would change is seen."""
        return [(node, h.bit, h.seq, h.snapshot_seq, h.health, h.counts) for node, h in self._holders.items()]

    @classmethod
    def from_plain(cls, plain: list[tuple[PartId, int, int, int, IndexHealth, dict[Tier, int]]]) -> Directory:
        directory = cls()
        for node, bit, seq, snapshot_seq, health, counts in plain:
            directory._holders[node] = _Holder(bit, seq, snapshot_seq, health, counts)
            directory._by_bit[bit] = node
            directory._live |= bit
            directory._has_ssd |= counts[Tier.SSD] > 0
        return directory

    def _advance(self, holder: _Holder, seq: int, is_last: bool = False) -> bool:
        """`is_last`: with it all parts of a snapshot are there, if those before it are."""
        in_order = seq == holder.seq + 1
        holder.seq = max(holder.seq, seq)
        if not in_order:
            return _degrade(holder)
        if is_last and holder.health is IndexHealth.CATCHING_UP and holder.snapshot_seq >= 0:
            holder.health = IndexHealth.EXACT
        return False

    def _nodes(self, mask: int) -> list[PartId]:
        """Whose bits these are, in the order of the bits."""
        if mask.bit_count() <= FEW_BITS:
            nodes = []
            while mask:
                bit = mask & -mask
                nodes.append(self._by_bit[bit])
                mask ^= bit
            return nodes
        return [self._by_bit[1 << at] for at, digit in enumerate(reversed(f"{mask:b}")) if digit == "1"]

    def _named(self, mask: int) -> tuple[PartId, ...]:
        """Whose bits these are, by id."""
        return (self._sets.get(mask) or self._set_of(mask)) if mask else ()

    def _set_of(self, mask: int) -> tuple[PartId, ...]:
        if len(self._sets) >= _SETS_REMEMBERED:
            self._sets.clear()
        found = self._sets[mask] = tuple(sorted(self._nodes(mask)))
        return found

    def _add(self, holder: _Holder, space: KeySpaceId, tier: Tier, keys: Sequence[BlockKey]) -> None:
        holder.counts[tier] += self._masks_of(space)[tier].set_bit(keys, holder.bit)
        self._has_ssd |= tier is Tier.SSD

    def _masks_of(self, space: KeySpaceId) -> dict[Tier, Masks]:
        tiers = self._spaces.get(space)
        if tiers is None:
            tiers = self._spaces[space] = {t: Masks() for t in Tier}
        return tiers

    def _take_bit(self, node: PartId) -> int:
        """The lowest that is on no key."""
        taken = self._live | self._stale | self._later
        bit = ~taken & (taken + 1)
        self._by_bit[bit] = node
        self._live |= bit
        self._sets.clear()
        return bit

    def _give_up(self, bit: int) -> None:
        del self._by_bit[bit]
        self._live ^= bit
        self._sets.clear()
        self._later |= bit
        if (self._stale | self._later).bit_count() > MOST_STALE_BITS:
            self._clear_all()

    def _clear_some(self) -> None:
        """Clear a few thousand keys of bits that were given up."""
        if not self._stale:
            if not self._later:
                return
            self._begin_round()
        visited = 0
        for shard in self._round:
            self._clear(shard)
            visited += len(shard)
            if visited >= KEYS_A_STEP:
                return
        self._end_round()

    def _clear_all(self) -> None:
        self._later |= self._stale
        self._begin_round()
        for shard in self._round:
            self._clear(shard)
        self._end_round()

    def _clear(self, shard: Shard) -> None:
        if self._dump is not None:
            self._dump.before_shards((shard,))
        clear_bits(shard, self._stale)

    def _begin_round(self) -> None:
        self._stale, self._later = self._later, 0
        # What comes into being from now on has none of these bits.
        masks = [masks for tiers in self._spaces.values() for masks in tiers.values()]
        self._round = (shard for each in masks for shard in each.shards)

    def _end_round(self) -> None:
        self._stale, self._round = 0, iter(())
        for space in [s for s, tiers in self._spaces.items() if not any(len(masks) for masks in tiers.values())]:
            del self._spaces[space]

    def check_integrity(self, most: int = KEYS_CHECKED) -> None:
        """Raises AssertionError where masks, counts and nodes disagree.

        `most`: with more keys than that only the nodes are checked, for a live Conductor checks itself at rest.
        """
        assert {h.bit: n for n, h in self._holders.items()} == self._by_bit
        assert self._live == sum(self._by_bit)
        assert not self._live & (self._stale | self._later)
        assert not self._stale & self._later
        if sum(sum(h.counts.values()) for h in self._holders.values()) > most:
            return
        known = self._live | self._stale | self._later
        counted = {(node, tier): 0 for node in self._holders for tier in Tier}
        for tiers in self._spaces.values():
            for tier, masks in tiers.items():
                for key, mask in masks.items():
                    assert mask, f"{key!r} is kept without a holder"
                    assert not mask & ~known, f"{key!r} is held by an unknown node"
                    for node in self._nodes(mask & self._live):
                        counted[node, tier] += 1
        assert counted == {(node, tier): n for node, h in self._holders.items() for tier, n in h.counts.items()}


def _place(after: str) -> tuple[int, int]:
    """Of a page: the number of its key space, and of the shard."""
    number, _, shard = after.partition(".")
    if after and not (number.isdecimal() and shard.isdecimal() and len(after) < 32):
        raise ValueError(f"{after!r} is no place where a page of blocks begins")
    return (int(number), int(shard)) if after else (0, 0)


def _degrade(holder: _Holder) -> bool:
    """An announcement is missing. Whether a snapshot is to be asked for: not where one is on its way."""
    if holder.health is IndexHealth.DEGRADED or holder.snapshot_seq < 0:
        return False
    holder.health = IndexHealth.DEGRADED
    return True
