"""`make bench-goodput`: its search, its load, its bars; and a quick run of every part of it."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from moonpool.bench.goodput_figures import Measured, Results, bars
from moonpool.bench.goodput_load import Load, loads
from moonpool.bench.goodput_systems import Coupled, Pools, Scale, System, serve_flags, systems
from moonpool.bench.ninety import Found, Search
from moonpool.command.hardware import sized
from moonpool.command.settings import read_config
from moonpool.core.vocabulary import Slo
from moonpool.trace.request import TraceRequest

SCALE = Scale("a800-llama2-70b", 8.0, 2560.0)
QUICK_SECONDS = 600.0
"""A hang guard."""


def searched(share: Callable[[float], float], start: float, most: int = 8) -> Found:
    search = Search(start, 1.1, most)
    while not search.is_over:
        search.tell(share(search.rate))
    return search.found


def falling(rate: float) -> float:
    """0.9 at 10, a tenth less for each factor of e."""
    return min(0.9 - 0.1 * math.log(rate / 10), 1.0)


@pytest.mark.parametrize("start", [2.0, 9.0, 10.5, 30.0])
def test_the_search_brackets_the_point_and_reads_it_off_between(start: float) -> None:
    found = searched(falling, start, 40)
    assert found.is_bracketed
    assert found.low <= 10 < found.high <= found.low * 1.1**2 + 1e-9
    assert found.rate == pytest.approx(10, rel=1e-6)


def test_a_search_that_may_look_no_more_says_what_it_knows() -> None:
    above, below = searched(lambda rate: 1.0, 5.0, 3), searched(lambda rate: 0.8, 5.0, 3)
    assert not above.is_bracketed
    assert above.rate == above.low == max(rate for rate, _ in above.tried) > 5.0
    assert not below.is_bracketed
    assert (below.rate, below.low) == (0.0, 0.0)
    assert below.high == min(rate for rate, _ in below.tried) < 5.0


def test_where_noise_turns_two_rates_round_the_lower_one_decides() -> None:
    shares = iter([0.95, 0.89, 0.91])
    search = Search(10.0, 1.1, 3)
    search.tell(next(shares))
    search.tell(next(shares))
    assert (search.found.low, search.found.high) == (10.0, pytest.approx(11.0))
    assert 10.0 < search.found.rate < 11.0
    search.rate = 12.0
    search.tell(next(shares))
    assert search.found.low == 10.0


def test_a_load_comes_at_any_rate_as_long_as_a_probe_lasts() -> None:
    requests = tuple(TraceRequest(2.0 * n, 100, 10, ()) for n in range(50))
    at = Load(1, requests).at(0.5, 40.0, 5)
    assert len(at) == 20
    assert (len(at) - 1) / at[-1].arrival == pytest.approx(0.5)
    assert len(Load(1, requests).at(0.5, 1.0, 5)) == 5, "no fewer than that"
    assert len(Load(1, requests).at(100.0, 40.0, 5)) == 50, "no more than there are"


def test_seeds_are_slices_of_their_own_and_the_same_each_time() -> None:
    first, second = loads(None, (1, 2), 100, 0.5, 1.0)
    assert len(first.requests) == len(second.requests) == 100
    assert first.requests[0].arrival == second.requests[0].arrival == 0.0
    assert first.requests != second.requests
    assert loads(None, (1, 2), 100, 0.5, 1.0) == [first, second]


SYSTEMS = systems(8, Pools(6, 2), Coupled(8, "chunked", 256, "prefix-affine"))


@pytest.mark.parametrize("system", SYSTEMS, ids=lambda system: system.name)
def test_serve_takes_the_flags_of_each_system(system: System) -> None:
    words = serve_flags(system, SCALE, SCALE.slower(Slo(10.0, 0.1)))
    flags = {name.removeprefix("--"): value for name, value in zip(words[::2], words[1::2], strict=True)}
    config = sized(read_config(None, flags))
    assert config.fleet.nodes == system.machines == 8
    assert config.pool.block_size == 512
    if isinstance(system, Pools):
        assert (config.fleet.prefill, config.fleet.decode, config.fleet.coupled) == (system.prefill, system.decode, 0)
        assert (config.placement.slo_ttft, config.placement.slo_tbt) == (80.0, pytest.approx(0.8))
    else:
        assert (config.fleet.coupled, config.placement.admission) == (8, "none")
        assert config.placement.placement == system.routing
        assert config.batch.prefill_chunk == (system.chunk or 4096)


def test_the_planned_split_is_measured_once_where_it_is_half_and_half() -> None:
    tuned = Coupled(8, "chunked", 256, "prefix-affine")
    assert [each.name for each in systems(8, Pools(4, 4), tuned)].count("4P+4D") == 1
    assert len(SYSTEMS) == 5


def results(ours: float, planned: float, plain: Found, tuned: float) -> Results:
    def at(rate: float) -> list[Found]:
        return [Found(rate, rate * 0.95, rate * 1.05, ())]

    half, best, chunked = Pools(4, 4), Pools(6, 2), Coupled(8, "chunked", 256, "prefix-affine")
    found = Results(half=half, planned=best, tuned=chunked)
    for system, live in (
        (half, at(ours)),
        (best, at(planned)),
        (Coupled(8, "prefill-first", 0, "round-robin"), [plain]),
        (chunked, at(tuned)),
    ):
        found.measured.append(Measured(system, live=live, simulated=at(2.0)))
    return found


def test_bars_hold_pools_against_what_the_others_serve_at_most() -> None:
    found = {
        str(each["name"]): each
        for each in bars(results(2.0, 2.2, Found(0.0, 0.0, 1.0, ()), 2.0), "no probes")
        if "times" in str(each["name"]) and "profile" not in str(each["name"])
    }
    plain = found["4P+4D: 90 % point, times 8 coupled, prefill-first, round-robin"]
    assert (plain["value"], plain["holds"]) == (2.0, True), "it has none, so what does not do is taken"
    tuned = found["6P+2D (planned): 90 % point, times 8 coupled, chunks of 256, prefix-affine"]
    assert (tuned["value"], tuned["holds"]) == (1.1, True)


def test_the_simulators_error_is_told_only_of_a_point_that_is_bracketed() -> None:
    shown = {str(each["name"]): each for each in bars(results(2.4, 2.0, Found(0.0, 0.0, 1.0, ()), 2.0))}
    assert shown["4P+4D: the simulator's 90 % point, off by"]["holds"] is False
    assert shown["6P+2D: the simulator's 90 % point, off by"]["holds"] is True
    assert shown["8 coupled, prefill-first, round-robin: the simulator's 90 % point, off by"]["holds"] is None


def test_without_the_trace_it_says_so_and_measures_nothing(tmp_path: Path) -> None:
    done = run("--trace", str(tmp_path / "absent.jsonl"))
    assert done.returncode == 0, done.stderr
    assert "left out: there is no trace" in done.stdout
    last = json.loads(done.stdout.splitlines()[-1].removeprefix("RESULT "))
    assert last["bars"]
    assert all(bar["holds"] is None for bar in last["bars"])


@pytest.mark.live
@pytest.mark.timeout(900)
def test_a_quick_run_measures_every_system_and_writes_its_reports(tmp_path: Path, smollm2: Path) -> None:
    done = run("--quick", "--seeds", "1", "--split", "1,1", "--out", str(tmp_path / "reports"))
    assert done.returncode == 0, done.stdout + done.stderr
    last = json.loads(done.stdout.splitlines()[-1].removeprefix("RESULT "))
    assert last["env"]["seeds"] == [1]
    assert "split given: 1P+1D" in done.stdout
    names = [bar["name"] for bar in last["bars"]]
    assert sum(name.endswith("its median TTFT, off by") for name in names) == 4
    assert {file.name for file in (tmp_path / "reports").iterdir()} == {
        "goodput.html",
        *(f"simulated-{number}.html" for number in range(4)),
    }
    assert "simulated" in (tmp_path / "reports" / "simulated-0.html").read_text()
    assert "failed" not in done.stdout


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "moonpool.bench.goodput", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=QUICK_SECONDS)
