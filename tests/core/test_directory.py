from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from moonpool.core.directory import MOST_STALE_BITS, Directory, IndexHealth
from moonpool.core.vocabulary import BlockKey, Chain, KeySpaceId, PartId, Tier
from tests.soak import often

SPACES = (KeySpaceId("s"), KeySpaceId("t"))
KEYS = tuple(BlockKey(bytes([i]) * 16) for i in range(6))
NODES = tuple(PartId(f"node-{i}") for i in range(4))
S, DRAM, SSD = SPACES[0], Tier.DRAM, Tier.SSD


def joined(*nodes: PartId) -> Directory:
    directory = Directory()
    for node in nodes:
        directory.join(node)
        directory.replace(node, 0, ())
    return directory


def test_longest_runs_first_then_by_id() -> None:
    directory = joined(*NODES)
    directory.stored(NODES[2], 1, S, DRAM, KEYS[:3])
    directory.stored(NODES[1], 1, S, DRAM, KEYS[:3])
    directory.stored(NODES[0], 1, S, DRAM, KEYS[:1])
    directory.stored(NODES[3], 1, S, DRAM, KEYS[1:])
    assert list(directory.match(Chain(S, KEYS)).items()) == [(NODES[1], 3), (NODES[2], 3), (NODES[0], 1)]
    assert list(directory.match(Chain(SPACES[1], KEYS)).items()) == []
    assert list(directory.match(Chain(S, ())).items()) == []


def test_a_run_may_cross_tiers() -> None:
    directory = joined(NODES[0])
    directory.stored(NODES[0], 1, S, DRAM, KEYS[:2])
    directory.stored(NODES[0], 2, S, SSD, KEYS[1:4])
    assert list(directory.match(Chain(S, KEYS)).items()) == [(NODES[0], 4)]
    directory.removed(NODES[0], 3, S, DRAM, KEYS[:2])
    assert list(directory.match(Chain(S, KEYS)).items()) == []
    assert directory.counts(NODES[0]) == {DRAM: 0, SSD: 3}


@pytest.mark.parametrize("seq", [1, 3])
def test_a_repeat_or_a_gap_is_reported_once(seq: int) -> None:
    directory = joined(NODES[0])
    assert directory.health(NODES[0]) is IndexHealth.EXACT
    assert not directory.stored(NODES[0], 1, S, DRAM, KEYS[:1])
    assert directory.stored(NODES[0], seq, S, DRAM, KEYS[:2])
    assert directory.health(NODES[0]) is IndexHealth.DEGRADED
    assert directory.awaits_snapshot(NODES[0])
    assert not directory.removed(NODES[0], 9, S, DRAM, KEYS[:1])
    directory.replace(NODES[0], 9, ((S, DRAM, KEYS[:4]),))
    assert directory.health(NODES[0]) is IndexHealth.EXACT
    assert not directory.removed(NODES[0], 9, S, DRAM, KEYS), "covered by the snapshot"
    assert list(directory.match(Chain(S, KEYS)).items()) == [(NODES[0], 4)]
    assert not directory.removed(NODES[0], 10, S, DRAM, KEYS)
    assert list(directory.match(Chain(S, KEYS)).items()) == []


def test_a_snapshot_in_parts_is_exact_with_the_last_of_them() -> None:
    directory = joined(NODES[0], NODES[1])
    directory.replace(NODES[0], 5, ((S, DRAM, KEYS[:2]),), more=True)
    assert not directory.stored(NODES[0], 6, S, DRAM, KEYS[2:4], more=True)
    assert directory.health(NODES[0]) is IndexHealth.CATCHING_UP
    assert not directory.awaits_snapshot(NODES[0]), "it is coming"
    assert directory.worst_health(NODES[:2]) is IndexHealth.CATCHING_UP
    assert directory.worst_health([NODES[1], NODES[3]]) is IndexHealth.EXACT
    assert not directory.stored(NODES[0], 7, S, SSD, KEYS[4:])
    assert directory.health(NODES[0]) is IndexHealth.EXACT


def test_a_part_of_a_snapshot_that_is_lost_is_asked_for() -> None:
    directory = joined(NODES[0])
    directory.replace(NODES[0], 5, ((S, DRAM, KEYS[:2]),), more=True)
    assert directory.stored(NODES[0], 7, S, DRAM, KEYS[2:4])
    assert directory.health(NODES[0]) is IndexHealth.DEGRADED
    assert not directory.stored(NODES[0], 8, S, DRAM, KEYS[4:]), "once"
    directory.replace(NODES[0], 8, ((S, DRAM, KEYS),), more=True)
    assert directory.lacks(NODES[0], 9), "the last part, and nothing has come since"
    assert directory.health(NODES[0]) is IndexHealth.DEGRADED


def test_before_its_first_snapshot_a_node_is_asked_for_nothing_more() -> None:
    directory = Directory()
    directory.join(NODES[0])
    assert directory.awaits_snapshot(NODES[0])
    assert not directory.stored(NODES[0], 7, S, DRAM, KEYS[:1])
    assert not directory.lacks(NODES[0], 9)
    assert directory.health(NODES[0]) is IndexHealth.CATCHING_UP
    directory.replace(NODES[0], 0, ())
    assert directory.health(NODES[0]) is IndexHealth.EXACT


def test_a_node_that_comes_back_starts_empty() -> None:
    directory = joined(NODES[0], NODES[1])
    for node in NODES[:2]:
        directory.stored(node, 1, S, DRAM, KEYS)
    directory.forget(NODES[0])
    directory.join(NODES[0])
    assert list(directory.match(Chain(S, KEYS)).items()) == [(NODES[1], 6)]
    assert directory.health(NODES[0]) is IndexHealth.CATCHING_UP
    with pytest.raises(ValueError, match="joined already"):
        directory.join(NODES[0])


def test_what_a_node_gave_up_is_cleared_bit_by_bit_and_its_bits_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moonpool.core.directory.KEYS_A_STEP", 1)
    directory = joined(*NODES[:2])
    directory.stored(NODES[1], 1, S, DRAM, KEYS)
    highest = 0
    for life in range(1, 200):
        directory.replace(NODES[0], life, ((S, SSD, KEYS[:4]),))
        assert list(directory.match(Chain(S, KEYS)).items()) == [(NODES[1], 6), (NODES[0], 4)]
        directory.replace(NODES[0], life, ())
        assert list(directory.match(Chain(S, KEYS)).items()) == [(NODES[1], 6)]
        directory.check_integrity()
        highest = max(highest, *directory._by_bit)
    assert highest < 1 << 40, "bits come back"
    for seq in range(2, 20):
        directory.removed(NODES[1], seq, S, DRAM, KEYS)
    assert not directory._spaces, "nothing is kept of what nobody has"


def test_a_hundred_snapshots_without_a_pause_keep_masks_short() -> None:
    directory = joined(NODES[0])
    keys = [BlockKey(i.to_bytes(16, "little")) for i in range(20_000)]
    for life in range(100):
        directory.replace(NODES[0], life, ((S, DRAM, keys[life::100]),))
    assert max(directory._by_bit) < 1 << (MOST_STALE_BITS + 2)
    directory.check_integrity()


SUBSET = st.lists(st.sampled_from(KEYS), max_size=8).map(tuple)


class AgainstSets(RuleBasedStateMachine):
    """The same directory as a dict of sets."""

    def __init__(self) -> None:
        super().__init__()
        self.patched = pytest.MonkeyPatch()
        self.patched.setattr("moonpool.core.directory.KEYS_A_STEP", 1)
        self.patched.setattr("moonpool.core.directory.MOST_STALE_BITS", 3)
        for module in ("masks", "directory"):
            self.patched.setattr(f"moonpool.core.{module}.SHARDS", 7)
        self.directory = Directory()
        self.model: dict[PartId, set[tuple[KeySpaceId, Tier, BlockKey]]] = {}
        self.seqs: dict[PartId, int] = {}

    def _next(self, node: PartId) -> int:
        self.seqs[node] += 1
        return self.seqs[node]

    @rule(node=st.sampled_from(NODES))
    def join(self, node: PartId) -> None:
        if node not in self.model:
            self.directory.join(node)
            self.model[node], self.seqs[node] = set(), 0

    @rule(data=st.data(), space=st.sampled_from(SPACES), tier=st.sampled_from(Tier), keys=SUBSET)
    @precondition(lambda self: self.model)
    def stored(self, data: st.DataObject, space: KeySpaceId, tier: Tier, keys: tuple[BlockKey, ...]) -> None:
        node = data.draw(st.sampled_from(sorted(self.model)))
        assert not self.directory.stored(node, self._next(node), space, tier, keys)
        self.model[node] |= {(space, tier, key) for key in keys}

    @rule(data=st.data(), space=st.sampled_from(SPACES), tier=st.sampled_from(Tier), keys=SUBSET)
    @precondition(lambda self: self.model)
    def removed(self, data: st.DataObject, space: KeySpaceId, tier: Tier, keys: tuple[BlockKey, ...]) -> None:
        node = data.draw(st.sampled_from(sorted(self.model)))
        assert not self.directory.removed(node, self._next(node), space, tier, keys)
        self.model[node] -= {(space, tier, key) for key in keys}

    @rule(data=st.data(), first=SUBSET, second=SUBSET)
    @precondition(lambda self: self.model)
    def replace(self, data: st.DataObject, first: tuple[BlockKey, ...], second: tuple[BlockKey, ...]) -> None:
        node = data.draw(st.sampled_from(sorted(self.model)))
        self.directory.replace(node, self.seqs[node], ((SPACES[0], DRAM, first), (SPACES[1], SSD, second)))
        self.model[node] = {(SPACES[0], DRAM, k) for k in first} | {(SPACES[1], SSD, k) for k in second}
        assert self.directory.health(node) is IndexHealth.EXACT

    @rule(data=st.data())
    @precondition(lambda self: self.model)
    def forget(self, data: st.DataObject) -> None:
        node = data.draw(st.sampled_from(sorted(self.model)))
        self.directory.forget(node)
        del self.model[node]

    @rule(space=st.sampled_from(SPACES), keys=st.permutations(KEYS))
    def match(self, space: KeySpaceId, keys: list[BlockKey]) -> None:
        expected = []
        for node, blocks in self.model.items():
            run = 0
            while run < len(keys) and any((space, tier, keys[run]) in blocks for tier in Tier):
                run += 1
            if run:
                expected.append((node, run))
        expected.sort(key=lambda pair: (-pair[1], pair[0]))
        assert list(self.directory.match(Chain(space, tuple(keys))).items()) == expected

    @rule(space=st.sampled_from(SPACES), keys=SUBSET)
    def holders(self, space: KeySpaceId, keys: tuple[BlockKey, ...]) -> None:
        assert self.directory.holders(space, keys) == [
            tuple(sorted(n for n, blocks in self.model.items() if any((space, tier, key) in blocks for tier in Tier)))
            for key in keys
        ]

    def teardown(self) -> None:
        self.patched.undo()

    @invariant()
    def adds_up(self) -> None:
        self.directory.check_integrity()
        for node, blocks in self.model.items():
            assert self.directory.counts(node) == {t: sum(b[1] is t for b in blocks) for t in Tier}


AgainstSets.TestCase.settings = settings(max_examples=often(60))
TestAgainstSets = AgainstSets.TestCase


def test_who_has_a_block_in_which_tier() -> None:
    first, second = NODES[:2]
    directory = joined(second, first)
    keys = [BlockKey(bytes([at]) * 16) for at in range(4)]
    assert directory.tiers(S, keys) == [((), ())] * 4
    directory.stored(second, 1, S, DRAM, keys[:2])
    directory.stored(first, 1, S, DRAM, keys[1:2])
    directory.stored(first, 2, S, SSD, keys[1:3])
    assert directory.tiers(S, keys) == [((second,), ()), ((first, second), (first,)), ((), (first,)), ((), ())]
    directory.forget(second)
    assert directory.tiers(S, keys) == [((), ()), ((first,), (first,)), ((), (first,)), ((), ())]


def test_pages_hold_whatever_stays_once() -> None:
    directory = joined(NODES[0])
    keys = [BlockKey(at.to_bytes(2, "big") * 8) for at in range(3000)]
    directory.stored(NODES[0], 1, S, DRAM, keys[:2000])
    directory.stored(NODES[0], 2, S, SSD, keys[1000:])
    directory.stored(NODES[0], 3, SPACES[1], SSD, keys[:5])
    found: list[tuple[KeySpaceId, BlockKey]] = []
    after, pages = "", 0
    while after or not pages:
        part, after = directory.page(after, 100)
        assert sum(len(some) for _, some in part) < 100 + 100
        found += [(space, key) for space, some in part for key in some]
        pages += 1
        directory.removed(NODES[0], 3 + pages, S, DRAM, keys[:1])
    assert sorted(found) in (
        sorted([(S, key) for key in keys[first:]] + [(SPACES[1], key) for key in keys[:5]]) for first in (0, 1)
    )
    assert pages > 20
    for wrong in ("here", "1", ".", "1.x", "0.-1"):
        with pytest.raises(ValueError, match="no place where a page"):
            directory.page(wrong, 100)
