"""The simulated cluster against arithmetic by hand, a run step by step, and itself in another process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import moonpool
from moonpool.core.admission import ADMISSION_POLICIES
from moonpool.core.conductor import ConductorConfig
from moonpool.core.decode import DecodeInstance
from moonpool.core.placement import PLACEMENT_POLICIES
from moonpool.core.vocabulary import Slo
from moonpool.errors import ConfigError
from moonpool.report.outcomes import Outcome
from moonpool.sim.cluster import Setup
from moonpool.sim.profile import Profile, load_profile, profile_names
from moonpool.trace.request import TraceRequest
from tests.sim.kept import Kept

PROFILE = load_profile("a800-llama2-70b")
NONE = ConductorConfig(admission="none", queue_bound=10_000)


def run(setup: Setup, trace: list[TraceRequest]) -> Kept:
    simulation = Kept(setup, trace)
    simulation.run()
    return simulation


def small(prefill: int = 2, decode: int = 2, **changes: int | float) -> Setup:
    return Setup(msgspec.structs.replace(PROFILE, **changes), prefill, decode, NONE)


def family(count: int, *, every: float = 1.0, tokens: int = 2000, output: int = 30) -> list[TraceRequest]:
    """Prompts that share all but their last whole block."""
    shared = tuple(range(tokens // 512 - 1))
    return [TraceRequest(every * i, tokens, output, (*shared, 1000 + i)) for i in range(count)]


def test_one_request_takes_what_the_cost_model_says() -> None:
    simulation = run(small(1, 1), [TraceRequest(0.0, 5000, 11, tuple(range(10)))])
    outcome = simulation.requests[0].outcome()
    p, d = PROFILE.prefill, PROFILE.decode
    # 5000 tokens are two chunks of at most 4096.
    compute = 2 * p.fixed + p.per_token * 5000 + p.per_token_squared * 5000**2
    assert outcome.ttft == pytest.approx(compute)
    steps = [d.fixed + d.per_request + d.per_context_token * (5001 + i) for i in range(10)]
    intervals = simulation.requests[0].intervals()
    assert intervals[1:] == pytest.approx(steps[1:])
    # The last chunk's KV is under way while it computes: only the copy into VRAM comes between.
    copy = 5000 * PROFILE.kv_bytes_per_token / PROFILE.host_bytes_per_second
    assert intervals[0] == pytest.approx(steps[0] + copy)
    assert outcome.slowest_tenth == pytest.approx(intervals[0])


def test_a_prefix_is_computed_once() -> None:
    simulation = run(small(), family(4, every=30.0))
    computed = [request.computed_tokens for request in simulation.requests]
    assert computed == [2000, 2000 - 2 * 512, 2000 - 2 * 512, 2000 - 2 * 512]
    assert [request.cached_tokens for request in simulation.requests] == [0, 1024, 1024, 1024]


def test_a_distant_prefix_is_fetched_over_the_link() -> None:
    """Two at once, then a third: the one instance that is free has to fetch."""
    trace = [*family(1), *(TraceRequest(20.0, 60_000, 5, tuple(range(100 * i, 100 * i + 118))) for i in (5, 6))]
    trace.append(TraceRequest(20.5, 2000, 5, (0, 1, 2000)))
    simulation = run(small(3, 1), trace)
    assert simulation.requests[-1].cached_tokens == 1024
    assert simulation.decisions.fetched_blocks in (0, 2)
    moved = sum(node.link.moved_bytes for node in simulation.nodes.values())
    assert moved >= sum(request.trace.input_tokens for request in simulation.requests) * PROFILE.kv_bytes_per_token


@settings(max_examples=25)
@given(
    st.lists(
        st.tuples(st.floats(0, 2), st.integers(1, 4000), st.integers(1, 200), st.integers(0, 3)),
        min_size=1,
        max_size=25,
    ),
    st.sampled_from([6_000, 20_000, 1_400_000]),
    st.sampled_from([8_192, 60_000, 3_000_000]),
)
def test_many_steps_at_once_are_the_same_as_one_by_one(
    rows: list[tuple[float, int, int, int]], vram: int, dram: int
) -> None:
    now, trace = 0.0, []
    for gap, tokens, output, family_ in rows:
        now += gap
        ids = tuple(10_000 * family_ + at for at in range(-(-tokens // 512)))
        trace.append(TraceRequest(now, tokens, output, ids))
    # One decode instance: measured steps are reported at other times, and would lead to another choice between two.
    setup = small(2, 1, vram_tokens=vram, dram_tokens=dram, context_tokens=8_192)
    at_once = run(setup, trace)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DecodeInstance, "steps_ahead", 1)
        one_by_one = run(setup, trace)
    for a, b in zip(at_once.requests, one_by_one.requests, strict=True):
        assert (a.refused, a.output, a.attempt) == (b.refused, b.output, b.attempt)
        assert a.intervals() == pytest.approx(b.intervals(), abs=1e-6)
        assert a.first_token == (None if b.first_token is None else pytest.approx(b.first_token, abs=1e-6))
    for node in at_once.nodes.values():
        node.check_integrity()


def test_preempted_requests_finish_and_all_their_tokens_count() -> None:
    trace = [TraceRequest(0.1 * i, 1500, 1200, tuple(range(10 * i, 10 * i + 3))) for i in range(6)]
    simulation = run(small(1, 1, vram_tokens=6_000, context_tokens=6_000), trace)
    assert simulation.decode[next(iter(simulation.decode))].preemptions > 0
    for request in simulation.requests:
        assert request.finished is not None
        assert request.output == 1200
        assert len(request.intervals()) == 1199, "the pause of a preemption is an interval too"
        assert request.finished == pytest.approx((request.first_token or 0.0) + request.intervals().sum())
    assert any(request.attempt > 1 for request in simulation.requests)


def test_refusals_say_why() -> None:
    config = ConductorConfig(admission="early", queue_bound=10_000, slo=Slo(0.5, None))
    setup = Setup(PROFILE, 1, 1, config)
    trace = [TraceRequest(0.0, 1000, 2), TraceRequest(0.0, 200_000, 2), TraceRequest(0.0, 100_000, 2)]
    simulation = run(setup, trace)
    assert [request.outcome().refusal for request in simulation.requests] == ["", "context", "ttft-slo"]


def test_the_same_again_in_another_process_and_under_another_hash_seed(tmp_path: Path) -> None:
    lines = [
        {
            "timestamp": 400 * i,
            "input_length": 3000 + 700 * (i % 9),
            "output_length": 20 + i,
            "hash_ids": [i % 5, 100 + i],
        }
        for i in range(60)
    ]
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def printed(hash_seed: str) -> dict[str, object]:
        env = os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(Path(moonpool.__file__).parents[1])}
        command = [
            sys.executable,
            "-m",
            "moonpool",
            "simulate",
            str(file),
            "--placement",
            ",".join(PLACEMENT_POLICIES),
            "--admission",
            ",".join(ADMISSION_POLICIES),
            "--json",
        ]
        done = subprocess.run([*command, "--ttft", "5"], env=env, capture_output=True, timeout=120, check=True)
        report: dict[str, object] = json.loads(done.stdout)
        return report

    first = printed("1")
    assert first == printed("2")
    columns = first["runs"]
    assert isinstance(columns, list)
    assert len(columns) == len(PLACEMENT_POLICIES) * len(ADMISSION_POLICIES)
    assert columns[0]["summary"]["completed"] == 60


def test_profiles_are_checked(tmp_path: Path) -> None:
    assert "a800-llama2-70b" in profile_names()
    for name in profile_names():
        assert isinstance(load_profile(name), Profile)
    with pytest.raises(ConfigError, match=r"choose one of .*a800-llama2-70b"):
        load_profile("h9000")
    with pytest.raises(ConfigError, match="cannot read the hardware profile"):
        load_profile(str(tmp_path / "none.yaml"))
    bad = tmp_path / "bad.yaml"
    bad.write_text(msgspec.yaml.encode(msgspec.structs.asdict(PROFILE) | {"slots": 0}).decode())
    with pytest.raises(ConfigError, match="`slots` is 0; give a finite number above 0"):
        load_profile(str(bad))


def test_an_outcome_of_an_idle_cluster_attains() -> None:
    outcome: Outcome = run(small(1, 1), [TraceRequest(0.0, 8192, 100, tuple(range(16)))]).requests[0].outcome()
    assert outcome.attains(Slo(30.0, 0.2))
    assert not outcome.attains(Slo(0.5, 0.2))
    assert outcome.ttft == pytest.approx(1.0, abs=0.01), "T(8k), as the paper's figures have it"
