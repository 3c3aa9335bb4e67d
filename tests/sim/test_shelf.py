"""A simulated node's SSD."""

from __future__ import annotations

import msgspec

from moonpool.core.conductor import ConductorConfig
from moonpool.core.events import BlocksRemoved, BlocksStored
from moonpool.core.vocabulary import BlockKey, KeySpace, KeySpaceId, Tier
from moonpool.sim.clock import Link
from moonpool.sim.cluster import Setup
from moonpool.sim.node import SimNode
from moonpool.sim.profile import load_profile
from moonpool.sim.shelf import SimShelf
from moonpool.trace.request import TraceRequest
from tests.sim.kept import Kept

SPACE = KeySpace(KeySpaceId("51"), 512, 1, 1000)


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(16, "big"))


def test_what_dram_gives_up_is_read_back_from_the_ssd_in_turn() -> None:
    told: list[object] = []
    node = SimNode("a", SPACE, 4000, "lru", Link(1e6, 0.0), told.append, SimShelf(3000, 1000, 500.0))
    first, second = tuple(map(key, range(3))), tuple(map(key, range(10, 14)))
    node.store(first)
    node.store(second)
    saved = [e for e in told if isinstance(e, BlocksStored) and e.tier is Tier.SSD]
    assert sorted(k for e in saved for k in e.keys) == sorted(first)
    assert node.leading(first) == 0
    node.load(first, 10.0)
    assert node.leading(first) == 3
    assert node.arrival(first, 10.0) == 16.0, "three blocks of 2 s"
    node.load(first, 11.0)
    assert node.arrival(first, 11.0) == 16.0, "they are here"
    gone = [e for e in told if isinstance(e, BlocksRemoved) and e.tier is Tier.SSD]
    assert gone, "the SSD has room for three"
    node.check_integrity()


def test_dropped_is_gone_and_demoted_is_on_the_ssd() -> None:
    told: list[object] = []
    node = SimNode("a", SPACE, 4000, "lru", Link(1e6, 0.0), told.append, SimShelf(3000, 1000, 500.0))
    keys = tuple(map(key, range(4)))
    node.store(keys)
    node.drop(keys[3:])
    node.demote(keys[2:3])
    node.load(keys, 0.0)
    assert node.leading(keys) == 3
    assert node.arrival(keys[:3], 0.0) == 2.0
    bare = SimNode("b", SPACE, 4000, "lru", Link(1e6, 0.0), told.append)
    bare.store(keys)
    bare.demote(keys)
    assert bare.leading(keys) == 4, "without SSD nothing"


def test_an_ssd_saves_computing() -> None:
    """Turns of 30 conversations in a row; DRAM holds about three of them."""
    profile = load_profile("a800-llama2-70b")
    small = msgspec.structs.replace(profile, dram_tokens=40_000, context_tokens=16_384)
    turns = [
        TraceRequest(10.0 * (30 * turn + c), 8192 + 1024 * turn, 10, tuple(range(1000 * c, 1000 * c + 16 + 2 * turn)))
        for turn in range(2)
        for c in range(30)
    ]
    computed = []
    for ssd in (0, 10**12):
        setup = Setup(
            msgspec.structs.replace(small, ssd_bytes=ssd, ssd_read_bytes_per_second=6e9),
            1,
            1,
            ConductorConfig(admission="none", queue_bound=1000),
        )
        simulation = Kept(setup, turns)
        simulation.run()
        for node in simulation.nodes.values():
            node.check_integrity()
        computed.append(sum(r.computed_tokens for r in simulation.requests))
    assert computed[0] == sum(t.input_tokens for t in turns)
    assert computed[1] < 0.6 * computed[0]
