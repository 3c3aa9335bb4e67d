"""Copies that the Conductor orders, or gives up, by itself."""

from __future__ import annotations

from moonpool.core import actions as act
from moonpool.core import events as ev
from moonpool.core.cost import TransferCost
from moonpool.core.recent import PROMPTS_REMEMBERED, Prompt, RecentPrompts
from moonpool.core.snapshot import freeze, thaw
from moonpool.core.sweeper import COLD_SECONDS
from moonpool.core.vocabulary import BlockKey, KeySpaceId, Tier
from tests.core.test_conductor import SPACE, arrival, desk, finished, peer, stored

SLOW = TransferCost(0.0, 24 * SPACE.block_bytes / 0.2, 1e9)
"""A prefix of 24 blocks takes 0.2 s, computing it about 0.9."""


def keys_of(name: str, tokens: int = 100, family: str = "") -> tuple[BlockKey, ...]:
    return arrival(name, tokens=tokens, family=family or name).chains[0].keys


def full(on: int, dram: int = 1 << 30) -> ev.Reported:
    who = peer(f"node-{on}")
    return ev.Reported(who.id, who.incarnation, used_bytes=dram)


def swept(actions: list[act.Action]) -> list[act.Action]:
    return [a for a in actions if isinstance(a, act.Replicate | act.DropReplica | act.Demote)]


def test_a_prefix_whose_link_is_the_bottleneck_gets_one_more_copy() -> None:
    """Three that want another prefix each, all from node 3: the third waits for two others."""
    d = desk(prefill=3, decode=3, nodes=4, transfer_cost=SLOW, placement="algorithm-1", heartbeat_limit=1e6)
    d.tell(stored(3, 1, (*keys_of("a", 400), *keys_of("b", 400), *keys_of("c", 400))))
    for name in ("a", "b", "c"):
        place = d.place(arrival(name, tokens=400))
        assert place.fetch is not None
    (order,) = swept(d.tell(ev.Woke(), after=1.0))
    assert isinstance(order, act.Replicate)
    assert order.source.id == "node-3"
    assert order.keys == keys_of("c", 400)[: len(order.keys)]
    assert d.conductor.describe(d.now).decisions.hot_blocks_copied == len(order.keys) > 0
    assert not swept(d.tell(ev.Woke(), after=5.0)), "once, until another fetch has to wait"


def test_cold_surplus_goes_where_memory_is_short_and_never_the_last() -> None:
    """Prefill on nodes 0 and 1, decode on node 0."""
    d = desk(prefill=2, decode=1, nodes=2, heartbeat_limit=1e6)
    cold, tail = keys_of("a"), keys_of("b")
    d.tell(finished(d.place(arrival("a", 100))))
    d.tell(finished(d.place(arrival("b", 100))))
    d.tell(stored(0, 1, cold))
    d.tell(stored(1, 1, cold + tail))
    d.tell(full(1))
    assert not swept(d.tell(ev.Woke(), after=COLD_SECONDS / 2)), "not cold yet"
    d.tell(full(1))
    (drop,) = swept(d.tell(ev.Woke(), after=COLD_SECONDS))
    assert isinstance(drop, act.DropReplica)
    assert (drop.node.id, drop.keys) == ("node-1", cold), "of the other prompt it is the only copy"
    assert not swept(d.tell(ev.Woke(), after=60.0))


def test_what_another_prompt_continues_stays() -> None:
    d = desk(prefill=2, decode=1, nodes=2, heartbeat_limit=1e6)
    mine, other = keys_of("a", 100, "f"), keys_of("b", 60, "f")
    assert mine[: len(other)] == other
    for name, tokens in (("a", 100), ("b", 60)):
        d.tell(finished(d.place(arrival(name, tokens=tokens, family="f"))))
        d.now += 60.0
    d.now += COLD_SECONDS - 90.0
    for i in (0, 1):
        d.tell(stored(i, 1, mine))
        d.tell(full(i))
    (drop,) = swept(d.tell(ev.Woke(), after=1.0))
    assert isinstance(drop, act.DropReplica)
    assert (drop.node.id, drop.keys) == ("node-1", mine[len(other) :])


def test_nothing_goes_where_there_is_room() -> None:
    d = desk(prefill=2, decode=1, nodes=2, heartbeat_limit=1e6)
    d.tell(finished(d.place(arrival("a", 100))))
    for i in (0, 1):
        d.tell(stored(i, 1, keys_of("a")))
    assert not swept(d.tell(ev.Woke(), after=COLD_SECONDS + 1))


def test_the_only_copy_goes_to_the_ssd_of_its_node() -> None:
    d = desk(heartbeat_limit=1e6)
    d.tell(finished(d.place(arrival("a", 100))))
    keys, who = keys_of("a"), peer("node-0")
    d.tell(stored(0, 1, keys))
    other = (BlockKey(b"x" * 16),)
    d.tell(ev.BlocksStored(who.id, who.incarnation, 2, KeySpaceId(SPACE.id), Tier.SSD, other))
    d.tell(full(0))
    (order,) = swept(d.tell(ev.Woke(), after=COLD_SECONDS + 1))
    assert isinstance(order, act.Demote)
    assert order.keys == keys
    assert d.conductor.describe(d.now).decisions.cold_demoted == len(keys)


def test_prompts_are_remembered_in_bounds_and_survive_a_snapshot() -> None:
    recent = RecentPrompts()
    shared = BlockKey(bytes(16))
    for i in range(PROMPTS_REMEMBERED + 10):
        recent.used(Prompt(SPACE, (shared, BlockKey((i + 1).to_bytes(16, "big"))), float(i)))
    recent.check_integrity()
    oldest = recent.oldest()
    assert oldest is not None
    assert oldest.used_at == 10.0
    assert recent.alone_from(oldest) == 1
    again = thaw(freeze(recent), RecentPrompts)
    assert again.to_plain() == recent.to_plain()
    recent.used(oldest)
    assert recent.oldest() != oldest


def test_the_hottest_prefix_is_the_one_that_spares_most_blocks() -> None:
    recent = RecentPrompts()

    def prompt(*blocks: int) -> Prompt:
        return Prompt(SPACE, tuple(BlockKey(at.to_bytes(16, "big")) for at in blocks), float(blocks[-1]))

    for own in (101, 102, 103):  # a long document
        recent.used(prompt(*range(1, 11), own))
    for own in (201, 202, 203, 204):  # a short preamble, which the document does not share
        recent.used(prompt(50, 51, own))
    for _ in range(3):  # the very same again
        recent.used(prompt(60, 61, 62, 63))
    recent.used(prompt(70, 71))
    found = recent.hottest(8)
    assert [(len(p.keys), p.uses) for p in found] == [(10, 3), (4, 3), (2, 4)]
    assert found[0].keys == prompt(*range(1, 11)).keys
    assert found[0].used_at == 103.0
    assert recent.hottest(1) == found[:1]
    assert thaw(freeze(recent), RecentPrompts).hottest(8) == found
    recent.check_integrity()
