"""Prefill machines that form a pipeline, against arithmetic by hand."""

from __future__ import annotations

import msgspec
import pytest

from moonpool.core.conductor import ConductorConfig
from moonpool.core.vocabulary import Slo
from moonpool.sim.cluster import Setup, Simulation
from moonpool.sim.pipeline import Stages, hop_seconds, of_group
from moonpool.sim.profile import load_profile
from moonpool.sim.unservable import idle_ttft
from moonpool.trace.request import TraceRequest
from tests.sim.kept import Kept

PROFILE = load_profile("a800-llama2-70b")
NONE = ConductorConfig(admission="none", queue_bound=10_000)


def run(trace: list[TraceRequest], prefill: int, pipeline: int, decode: int = 1) -> Kept:
    simulation = Kept(Setup(PROFILE, prefill, decode, NONE, pipeline=pipeline), trace)
    simulation.run()
    for node in simulation.nodes.values():
        node.check_integrity()
    return simulation


def chunk_seconds(begin: int, end: int) -> float:
    p = PROFILE.prefill
    return p.per_token * (end - begin) + p.per_token_squared * (end * end - begin * begin)


def test_chunks_of_a_long_prompt_overlap_in_the_machines_of_a_group() -> None:
    (one,) = run([TraceRequest(0.0, 40_960, 5)], 4, 1).requests
    (four,) = run([TraceRequest(0.0, 40_960, 5)], 4, 4).requests
    fixed = PROFILE.prefill.fixed
    assert (one.ttft or 0.0) == pytest.approx(10 * fixed + chunk_seconds(0, 40_960))
    # 81 chunks of an eighth of the profile's, fewer would have been worth it: machines that take equally long for each
    # wait for the longest one, which is the last.
    longest = chunk_seconds(40_448, 40_960) / 4
    by_hand = 80 * fixed + chunk_seconds(0, 40_960) / 4 + 3 * (longest + fixed + hop_seconds(PROFILE, 512))
    assert four.ttft == pytest.approx(by_hand, rel=2e-3)
    assert (one.ttft or 0.0) / by_hand > 3.6


def test_a_prompt_of_one_chunk_takes_as_long_as_on_one_machine_but_for_the_hops() -> None:
    (one,) = run([TraceRequest(0.0, 500, 5)], 2, 1).requests
    (two,) = run([TraceRequest(0.0, 500, 5)], 2, 2).requests
    extra = PROFILE.prefill.fixed + hop_seconds(PROFILE, 500)
    assert two.ttft == pytest.approx((one.ttft or 0.0) + extra)


@pytest.mark.parametrize("tokens", [1, 3000, 4096, 5000, 40_000, 126_000])
@pytest.mark.parametrize("pipeline", [1, 2, 3, 8])
def test_what_an_idle_group_takes_is_foretold(tokens: int, pipeline: int) -> None:
    (request,) = run([TraceRequest(0.0, tokens, 5)], pipeline, pipeline).requests
    assert request.ttft == pytest.approx(idle_ttft(tokens, 0, PROFILE, pipeline), rel=2e-3)


def test_a_group_computes_as_much_as_its_machines_would() -> None:
    trace = [TraceRequest(0.0, 8192, 2) for _ in range(64)]
    apart, group = (max(r.ttft or 0.0 for r in run(trace, 4, x).requests) for x in (1, 4))
    assert group == pytest.approx(apart, rel=0.05)
    simulation = run(trace, 4, 4)
    (worker,) = simulation.prefill.values()
    # Chunks are large where many wait, and smaller for the last ones.
    assert worker.busy_seconds == pytest.approx(64 * (6 * PROFILE.prefill.fixed + chunk_seconds(0, 8192) / 4), rel=0.01)


def test_the_blocks_of_a_group_are_on_all_its_machines() -> None:
    """Four machines hold four times as much, and what one prompt computed the next one has."""
    simulation = run([TraceRequest(20.0 * i, 20_000, 5, tuple(range(40))) for i in range(2)], 4, 4)
    assert [request.cached_tokens for request in simulation.requests] == [0, 19_968]
    (worker,) = simulation.prefill.values()
    assert worker.node.capacity == 4 * PROFILE.dram_tokens * PROFILE.kv_bytes_per_token


def test_the_conductor_sees_one_instance_whose_costs_are_the_group_s() -> None:
    trace = [TraceRequest(5.0 * i, 30_000 + 500 * (i % 7), 3) for i in range(30)]
    simulation = run(trace, 4, 4)
    state = simulation.describe()
    (part,) = [part for part in state.parts if part.kind == "prefill"]
    assert part.cost is not None
    group = of_group(PROFILE, 4).prefill
    assert part.cost[1] == pytest.approx(group.per_token + group.fixed / 512, rel=0.05), "in chunks of 512"


def test_tight_limits_on_long_prompts_need_a_pipeline() -> None:
    slo = Slo(8.0, None)
    config = msgspec.structs.replace(NONE, admission="forecast", slo=slo)
    trace = [TraceRequest(15.0 * i, 100_000, 5) for i in range(12)]
    attained = []
    for pipeline in (1, 4):
        simulation = Kept(Setup(PROFILE, 4, 1, config, pipeline=pipeline), trace)
        simulation.run()
        attained.append(sum(request.outcome().attains(slo) for request in simulation.requests))
    assert attained == [0, 12]


def test_stages_wait_for_the_machine_before_and_for_the_step_before() -> None:
    stages = Stages(msgspec.structs.replace(PROFILE, link_latency=0.5, activation_bytes_per_token=0), 2)
    assert stages.take(2.0, 10, 0.0) == (2.0, 4.5)
    assert stages.take(1.0, 10, 2.0) == (3.0, 5.5), "the second machine is busy until 4.5"
    assert stages.take(1.0, 10, 10.0) == (11.0, 12.5)


def test_machines_that_form_no_whole_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="5 prefill machines form no pipelines of 2"):
        Simulation(Setup(PROFILE, 5, 1, NONE, pipeline=2), [TraceRequest(0.0, 10, 1)])
    with pytest.raises(ValueError, match="a pipeline of 81 machines: a800-llama2-70b has 80 layers"):
        of_group(PROFILE, 81)
