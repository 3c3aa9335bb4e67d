"""Whatever happens, every request that arrives ends exactly once, and nothing of it stays behind."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from moonpool.core.conductor import ConductorConfig
from moonpool.core.placement import PLACEMENT_POLICIES
from moonpool.core.vocabulary import PartId, PartKind, RequestId, Slo
from tests.core.conductor_scene import GATEWAY, Odds, Scene, arrival, gateway, node, worker
from tests.soak import often

ODDS = Odds(0.2, 0.05, 0.1, 0.1, 0.3, 0.1, 0.2)
POLICIES = PLACEMENT_POLICIES


def small_cluster(seed: int, config: ConductorConfig, odds: Odds) -> Scene:
    """2 nodes, 2 prefill, 2 decode instances; few pages, little memory, so that everything runs full."""
    scene = Scene(seed, config, odds)
    scene.start(gateway())
    for i in range(2):
        scene.start(node(i, dram_bytes=40 * 2048))
        scene.start(worker(PartKind.PREFILL, i, on=i, pages=16, slots=3))
        scene.start(worker(PartKind.DECODE, i, on=i, pages=16, slots=4))
    return scene


def drain(scene: Scene) -> None:
    """All is well again: whatever is not over must come to its end."""
    scene.odds = Odds()
    scene.silent.clear()
    scene.run(130.0)
    missing = [id_ for id_, stream in scene.streams.items() if stream.outcome is None]
    assert not missing, f"no outcome: {missing}"
    state = scene.conductor.describe(scene.now)
    assert not any(state.requests.values()), state.requests
    for part in state.parts:
        assert not part.assigned, part
        assert not part.rooms, part
    decisions = state.decisions
    ended = decisions.finished + decisions.cancelled + sum(decisions.rejected.values())
    assert ended == decisions.arrived + decisions.adopted, decisions


@pytest.mark.parametrize("policy", POLICIES)
def test_a_storm_of_failures_loses_no_request(policy: str) -> None:
    config = ConductorConfig(placement=policy, slo=Slo(), queue_bound=64)  # type: ignore[arg-type]
    scene = small_cluster(7, config, ODDS)
    for i in range(120):
        scene.request(arrival(f"r{i}", 20 + i % 90, 1 + i % 30, family=f"f{i % 5}"))
        scene.run(0.1)
    drain(scene)
    finished = [s for s in scene.streams.values() if s.outcome == "finished"]
    assert len(finished) > 100
    assert all(s.produced == s.arrived.max_output_tokens or ODDS.ends_in_prefill for s in finished)


def test_a_storm_of_conductor_deaths_loses_no_request() -> None:
    scene = small_cluster(11, ConductorConfig(queue_bound=64), Odds(twice=0.2))
    adopted = 0
    for i in range(120):
        scene.request(arrival(f"r{i}", 20 + i % 90, 1 + i % 30, family=f"f{i % 5}"))
        scene.run(0.1)
        if i % 20 == 19:
            adopted += scene.conductor.describe(scene.now).decisions.adopted
            scene.restart_conductor()
    drain(scene)
    assert {s.outcome for s in scene.streams.values()} == {"finished"}
    assert adopted > 10


def test_a_calm_cluster_finishes_everything_in_one_attempt() -> None:
    scene = small_cluster(1, ConductorConfig(), Odds())
    for i in range(60):
        scene.request(arrival(f"r{i}", 20 + i % 90, 1 + i % 30))
        scene.run(0.2)
    drain(scene)
    assert {s.outcome for s in scene.streams.values()} == {"finished"}
    assert {s.attempt for s in scene.streams.values()} == {1}


class Storm(RuleBasedStateMachine):
    @initialize(seed=st.integers(0, 1000), policy=st.sampled_from(POLICIES), chaos=st.booleans())
    def begin(self, seed: int, policy: str, chaos: bool) -> None:
        config = ConductorConfig(placement=policy, queue_bound=12, max_failed_attempts=5)  # type: ignore[arg-type]
        self.scene = small_cluster(seed, config, ODDS if chaos else Odds())
        self.lives = 1

    @rule(tokens=st.integers(1, 200), output=st.integers(1, 60), family=st.integers(0, 3), left=st.floats(0.5, 60))
    def arrive(self, tokens: int, output: int, family: int, left: float) -> None:
        name = f"r{len(self.scene.streams)}"
        self.scene.request(arrival(name, tokens, output, family=f"f{family}", time_left=left))

    @rule(seconds=st.floats(0.001, 3.0))
    def pass_time(self, seconds: float) -> None:
        self.scene.run(seconds)

    @rule(pick=st.integers(0, 1 << 30))
    def cancel(self, pick: int) -> None:
        if self.scene.streams:
            self.scene.cancel(RequestId(f"r{pick % len(self.scene.streams)}"))

    @rule(kind=st.sampled_from(("node", "prefill", "decode")), index=st.integers(0, 1), noticed=st.booleans())
    def kill(self, kind: str, index: int, noticed: bool) -> None:
        id_ = PartId(f"{kind}-{index}")
        if id_ in self.scene.parts:
            self.scene.kill(id_, noticed=noticed)

    @rule(kind=st.sampled_from(("node", "prefill", "decode")), index=st.integers(0, 1))
    def freeze(self, kind: str, index: int) -> None:
        id_ = PartId(f"{kind}-{index}")
        if id_ in self.scene.parts:
            self.scene.silent.add(id_)
            self.scene.run(7.0)
            self.scene.silent.discard(id_)

    @rule()
    def kill_the_conductor(self) -> None:
        self.scene.restart_conductor()

    @rule()
    def restart_all(self) -> None:
        self.lives += 1
        for i in range(2):
            fresh = (
                node(i, self.lives, dram_bytes=40 * 2048),
                worker(PartKind.PREFILL, i, on=i, life=self.lives, pages=16, slots=3),
                worker(PartKind.DECODE, i, on=i, life=self.lives, pages=16, slots=4),
            )
            for part in fresh:
                if part.peer.id not in self.scene.parts:
                    self.scene.start(part)

    @invariant()
    def adds_up(self) -> None:
        if hasattr(self, "scene"):
            self.scene.conductor.check_integrity()

    def teardown(self) -> None:
        if hasattr(self, "scene"):
            self.restart_all()
            drain(self.scene)


Storm.TestCase.settings = settings(
    max_examples=often(25), stateful_step_count=30, suppress_health_check=list(HealthCheck)
)
TestStorm = Storm.TestCase


def test_a_lost_gateway_takes_its_requests_with_it() -> None:
    scene = small_cluster(3, ConductorConfig(), Odds())
    for i in range(20):
        scene.request(arrival(f"r{i}", 100, 20))
    scene.run(0.4)
    before = scene.conductor.describe(scene.now)
    assert sum(before.requests.values()) > 10
    scene.kill(GATEWAY)
    after = scene.conductor.describe(scene.now)
    assert not any(after.requests.values())
    assert not any(part.assigned or part.rooms for part in after.parts)
    scene.run(1.0)
    assert not scene.rooms
