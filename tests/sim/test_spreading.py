"""What placement does to a whole simulated cluster."""

from __future__ import annotations

import pytest

from moonpool.core.conductor import ConductorConfig
from moonpool.core.placement import PlacementPolicy
from moonpool.core.vocabulary import BlockKey, KeySpace, KeySpaceId
from moonpool.sim.clock import Link
from moonpool.sim.cluster import Setup
from moonpool.sim.node import SimNode
from moonpool.sim.profile import load_profile
from moonpool.trace.request import TraceRequest
from tests.sim.kept import Kept

PROFILE = load_profile("a800-llama2-70b")
SHARED = tuple(range(20))


def simulated(trace: list[TraceRequest], placement: PlacementPolicy, instances: int = 4, **config: bool) -> Kept:
    conductor = ConductorConfig(placement=placement, admission="none", queue_bound=1 << 20, **config)  # type: ignore[arg-type]
    simulation = Kept(Setup(PROFILE, instances, instances, conductor), trace)
    simulation.run()
    for node in simulation.nodes.values():
        node.check_integrity()
    return simulation


def hot(count: int, every: float, own_tokens: int = 4000) -> list[TraceRequest]:
    """One prefix of 20 blocks, which everybody goes on from in another way."""
    tokens = 512 * len(SHARED) + own_tokens
    own = -(-own_tokens // 512)
    return [
        TraceRequest(every * i, tokens, 20, (*SHARED, *range(1000 + own * i, 1000 + own * (i + 1))))
        for i in range(count)
    ]


@pytest.mark.parametrize("placement", ["kvcache-centric", "algorithm-1"])
def test_a_hot_prefix_spreads(placement: PlacementPolicy) -> None:
    """One instance computes 4000 tokens in about 0.6 s; a request comes every 0.18 s."""
    simulation = simulated(hot(200, 0.18), placement)
    busy = [worker.busy_seconds for worker in simulation.prefill.values()]
    assert max(busy) < 0.35 * sum(busy), "nobody gets everything"
    keys = simulation.requests[0].keys[: len(SHARED)]
    holders = [worker for worker in simulation.prefill.values() if worker.node.leading(keys) == len(SHARED)]
    assert len(holders) == 4
    assert simulation.decisions.fetches <= 8, "each instance has it once, and keeps it"
    ttft = sorted(request.ttft or 0.0 for request in simulation.requests)
    assert ttft[180] < 3.0, "no queue grows"


def test_an_idle_cluster_uses_all_of_its_instances() -> None:
    trace = [TraceRequest(10.0 * i, 3000, 5, tuple(range(10 * i, 10 * i + 6))) for i in range(40)]
    simulation = simulated(trace, "kvcache-centric")
    assert all(worker.busy_seconds > 0 for worker in simulation.prefill.values())


def test_a_burst_computes_what_it_shares_once() -> None:
    """All at one moment: nothing of it is in the directory yet."""
    burst = hot(12, 0.0, own_tokens=1000)
    waiting, alone = (simulated(burst, "kvcache-centric", 2, count_coming_blocks=counted) for counted in (True, False))
    shared = 512 * len(SHARED)
    assert sum(r.computed_tokens for r in waiting.requests) <= 12 * 1000 + 2 * shared
    assert sum(r.computed_tokens for r in alone.requests) == 12 * (1000 + shared)
    mean = [sum(r.ttft or 0.0 for r in s.requests) / 12 for s in (waiting, alone)]
    assert mean[0] < 0.5 * mean[1]


def test_fetched_blocks_are_not_used_before_they_have_come() -> None:
    space = KeySpace(KeySpaceId("51"), 512, 1, 1000)
    told: list[object] = []
    a, b, c = (SimNode(name, space, 100_000, "lru", Link(1000.0, 0.25), told.append) for name in "abc")
    keys = tuple(BlockKey(bytes([i]) * 16) for i in range(4))
    a.store(keys)
    assert b.fetch(a, keys, 10.0) == 4
    assert b.fetch(a, keys, 10.0) == 0, "they are on their way"
    assert b.arrival(keys[:1], 10.0) == 14.25
    assert b.arrival(keys, 20.0) == 20.0
    # What is still on its way to one node can only then go on to the next.
    assert c.fetch(b, keys[:2], 12.0) == 2
    assert c.arrival(keys[:2], 12.0) == 16.5
