"""Copies and drops: what is planned is enough, no more than that, and never the end of a block."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from moonpool.core import actions as act
from moonpool.core import events as ev
from moonpool.core.replication import KEYS_A_QUESTION, Copy, Holders, plan_copies, plan_drops
from moonpool.core.vocabulary import BlockKey, PartId, PartKind, Tier
from tests.core.conductor_scene import SPACE, node, peer
from tests.core.test_conductor import Desk, desk, lost, stored

A, B, C, D = NODES = tuple(PartId(f"node-{i}") for i in range(4))
KEYS = tuple(BlockKey(bytes([i]) * 16) for i in range(6))
K0, K1, K2 = KEYS[:3]
DRAM, SSD = Tier.DRAM, Tier.SSD
BLOCK = 100


def test_the_emptiest_node_that_lacks_it_is_the_target() -> None:
    plan = plan_copies([K0], [{A: DRAM}], {A: 9000, B: 500, C: 700, D: 700}, BLOCK, 3)
    assert plan.copies == (Copy(C, A, (K0,)), Copy(D, A, (K0,)))
    assert plan.counts == (3,)


def test_it_comes_from_dram_and_from_who_has_least_to_send() -> None:
    holders: list[Holders] = [{A: SSD, B: DRAM, C: DRAM}] * 4
    plan = plan_copies(KEYS[:4], holders, dict.fromkeys(NODES, 1000), BLOCK, 4)
    assert plan.copies == (Copy(D, B, (KEYS[0], KEYS[2])), Copy(D, C, (KEYS[1], KEYS[3])))


def test_blocks_stay_together_as_long_as_there_is_room() -> None:
    plan = plan_copies(KEYS, [{A: DRAM}] * 6, {A: 0, B: 250, C: 240, D: -50}, BLOCK, 2)
    assert plan.copies == (Copy(B, A, KEYS[:2] + KEYS[4:]), Copy(C, A, KEYS[2:4])), "then the policy makes room"


def test_what_is_nowhere_or_everywhere_is_left_alone() -> None:
    plan = plan_copies([K0, K1, K2], [{}, {A: SSD, B: DRAM}, {A: DRAM}], {A: 1000, B: 1000}, BLOCK, 5)
    assert plan == ((Copy(B, A, (K2,)),), (0, 2, 2))


def test_drops_keep_dram_and_the_emptiest() -> None:
    free = {A: 10, B: 20, C: 30, D: 40}
    assert plan_drops([K0], [{A: DRAM, B: DRAM, C: SSD, D: SSD}], free, 2) == {C: (K0,), D: (K0,)}
    assert plan_drops([K0], [{A: DRAM, B: DRAM, C: SSD, D: SSD}], free, 3) == {C: (K0,)}
    assert plan_drops([K0, K1], [{A: SSD}, {A: DRAM, B: DRAM}], free, 0) == {A: (K1,)}


HOLDERS = st.dictionaries(st.sampled_from(NODES), st.sampled_from(Tier))
FREE = st.dictionaries(st.sampled_from(NODES), st.integers(-300, 900))


@given(st.lists(HOLDERS, max_size=6), FREE, st.integers(0, 5))
def test_copies_against_the_order_one_by_one(holders: list[Holders], free: dict[PartId, int], wanted: int) -> None:
    keys = KEYS[: len(holders)]
    plan = plan_copies(keys, holders, free, BLOCK, wanted)
    after = [dict(h) for h in holders]
    for target, source, some in plan.copies:
        assert some, "an empty order"
        for key in some:
            place = keys.index(key)
            assert target in free
            assert source in holders[place]
            assert target not in after[place], "it has the block already, or is told twice"
            best = DRAM if DRAM in holders[place].values() else SSD
            assert holders[place][source] is best
            after[place][target] = DRAM
    assert tuple(len(h) for h in after) == plan.counts
    for before, then in zip(holders, after, strict=True):
        possible = len({*before, *free}) if before else 0
        assert len(then) == max(len(before), min(wanted, possible))
    assert plan == plan_copies(keys, holders, dict(reversed(free.items())), BLOCK, wanted), "the order of nodes counts"


@given(st.lists(HOLDERS, max_size=6), FREE, st.integers(-1, 5))
def test_drops_leave_what_is_wanted(holders: list[Holders], free: dict[PartId, int], at_most: int) -> None:
    keys = KEYS[: len(holders)]
    after = [dict(h) for h in holders]
    for victim, some in plan_drops(keys, holders, free, at_most).items():
        for key in some:
            del after[keys.index(key)][victim]
    for before, then in zip(holders, after, strict=True):
        assert len(then) == min(len(before), max(1, at_most))
        if DRAM in before.values():
            assert DRAM in then.values(), "the slow copy was kept instead"


# Through the Conductor

ASKER = peer("node-9")


def wanted(keys: tuple[BlockKey, ...], copies: int, at_most: int | None = None) -> ev.ReplicasWanted:
    return ev.ReplicasWanted(ASKER, 7, SPACE, keys, copies, at_most)


def three_nodes() -> Desk:
    d = desk(nodes=3)
    for i, used in enumerate((300, 200, 100)):
        d.tell(ev.Reported(NODES[i], peer(f"node-{i}").incarnation, used_bytes=used))
    d.tell(stored(0, 0, (K0, K1)))
    return d


def test_orders_go_out_and_the_asker_is_answered() -> None:
    d = three_nodes()
    replicate, answer = d.tell(wanted((K0, K1, K2), 2))
    assert isinstance(replicate, act.Replicate)
    assert (replicate.node.id, replicate.source.id, replicate.keys) == (C, A, (K0, K1))
    assert answer == act.ReplicasOrdered(ASKER, 7, (2, 2, 0))
    assert d.tell(wanted((K0, K1, K2), 2)) == [replicate, answer], "asked twice, ordered the same"
    d.tell(stored(2, 0, (K0, K1)))
    assert d.tell(wanted((K0, K1), 2)) == [act.ReplicasOrdered(ASKER, 7, (2, 2))]


def test_surplus_is_dropped_but_never_the_last_that_is_sure() -> None:
    d = three_nodes()
    for i in (1, 2):
        d.tell(stored(i, 0, (K0,)))
    assert d.tell(wanted((K0, K1), 1)) == [act.ReplicasOrdered(ASKER, 7, (3, 1))], "nobody said that it is too much"
    *drops, _ = d.tell(wanted((K0, K1), 1, at_most=0))
    assert [(o.node.id, o.keys) for o in drops if isinstance(o, act.DropReplica)] == [(B, (K0,)), (A, (K0,))]
    *drops, _ = d.tell(wanted((K0, K1), 2, at_most=1))
    assert not [o for o in drops if isinstance(o, act.DropReplica) and o.node.id == B], "more are wanted than allowed"
    who = peer("node-2").incarnation
    assert d.tell(ev.BlocksStored(C, who, 9, SPACE.id, DRAM, (K1,))), "a gap"
    *drops, _ = d.tell(wanted((K0,), 1, at_most=1))
    assert [(o.node.id, o.keys) for o in drops if isinstance(o, act.DropReplica)] == [(A, (K0,))]
    d.tell(lost(B))
    assert len(d.tell(wanted((K0,), 1, at_most=1))) == 1, "the other one may have lost it"


def test_a_node_too_small_for_a_block_is_no_target() -> None:
    d = desk(nodes=1)
    d.tell(node(1, dram_bytes=SPACE.block_bytes - 1))
    d.tell(stored(0, 0, (K0,)))
    assert d.tell(wanted((K0,), 2)) == [act.ReplicasOrdered(ASKER, 7, (1,))]


def test_a_question_is_bounded() -> None:
    d = three_nodes()
    many = (K0,) * (KEYS_A_QUESTION + 2)
    *_, answer = d.tell(wanted(many, 1))
    assert isinstance(answer, act.ReplicasOrdered)
    assert answer.copies == (1,) * KEYS_A_QUESTION + (0, 0)


def test_the_parts_of_a_fleet_without_nodes_answer() -> None:
    d = Desk()
    assert d.tell(wanted((K0,), 3)) == [act.ReplicasOrdered(ASKER, 7, (0,))]
    assert PartKind.NODE not in {p.kind for p in d.conductor.describe(d.now).parts}
