"""`make bench-goodput`: its search, its load, its bars; and a quick run of every part of it."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from moonpool.bench.foreseen import Foresight, timed_profile
from moonpool.bench.goodput_bench import Bench, Rules
from moonpool.bench.goodput_figures import Measured, Results, bars, torch_bars, torch_ratios
from moonpool.bench.goodput_live import Probe
from moonpool.bench.goodput_load import Load, loads, shorter
from moonpool.bench.goodput_systems import QUIET, Coupled, Pools, Scale, Servers, System, systems
from moonpool.bench.goodput_torch import engine_flags, limits
from moonpool.bench.ninety import Found, Search
from moonpool.bench.processors import OTHERS, Used
from moonpool.command.hardware import sized
from moonpool.command.settings import read_config
from moonpool.core.cost import DecodeCoefficients, PrefillCoefficients
from moonpool.core.vocabulary import Slo
from moonpool.report.run import Run
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


def test_a_shorter_load_shares_the_same_part_of_its_prompts() -> None:
    requests = (TraceRequest(0.0, 1000, 40, (7, 8)), TraceRequest(1.0, 1, 1, (9,)))
    small = shorter(Load(3, requests), 64, 16)
    assert (small.seed, small.block_tokens, small.mean_tokens) == (3, 8, (8.5, 1.5))
    assert small.requests == (TraceRequest(0.0, 16, 2, (7, 8)), TraceRequest(1.0, 1, 1, (9,)))
    with pytest.raises(ValueError, match="blocks of 512 tokens do not become 100 times shorter"):
        shorter(Load(3, requests), 100, 16)


def test_limits_of_the_torch_part_are_multiples_of_an_idle_worker() -> None:
    profile = timed_profile(SCALE)
    load = Load(1, (TraceRequest(0.0, 8192, 100, ()),))
    first = profile.prefill.fixed + profile.prefill.per_token * 8192 + profile.prefill.per_token_squared * 8192**2
    step = profile.decode.fixed + profile.decode.per_request + profile.decode.per_context_token * 8292
    found = limits(profile, [load, load])
    assert found.ttft == pytest.approx(10 * first, abs=0.05)
    assert found.tbt == pytest.approx(5 * step, abs=0.005)


def test_the_torch_workers_hold_as_many_tokens_whatever_a_block_is() -> None:
    words = engine_flags(8)
    config = read_config(
        None, {name.removeprefix("--"): word for name, word in zip(words[::2], words[1::2], strict=True)}
    )
    assert config.model.engine == "torch"
    assert (
        config.pool.block_size * config.pool.decode_pages == config.pool.block_size * config.pool.prefill_pages == 8704
    )


SYSTEMS = systems(8, Pools(6, 2), Coupled(8, "chunked", 256, "prefix-affine"))


@pytest.mark.parametrize("system", SYSTEMS, ids=lambda system: system.name)
def test_serve_takes_the_flags_of_each_system(system: System) -> None:
    words = [*SCALE.flags, *system.flags(SCALE.slower(Slo(10.0, 0.1))), *QUIET]
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


def test_the_torch_part_tells_ratios_and_has_no_prediction_of_vllm() -> None:
    pools = Measured(Pools(1, 1), live=[Found(1.5, 1.4, 1.6, ())], simulated=[Found(1.2, 1.2, 1.3, ())])
    vllm = Measured(Servers(2, 64), live=[Found(0.0, 0.0, 3.0, ())])
    found = Results(measured=[pools, vllm])
    assert torch_ratios(found) == {"1P+1D, times 2 vLLM servers, chunks of 64, round-robin": 0.5}
    assert torch_ratios(Results()) == {}
    shown = {str(each["name"]): each["holds"] for each in torch_bars(found)}
    assert shown == {
        "torch, 1P+1D: the simulator's 90 % point, off by": False,
        "torch, 1P+1D: its median TTFT, off by": None,
        "torch, requests sent late, P99, worst probe (s)": None,
    }


@pytest.mark.parametrize(
    ("idle", "shares", "limit"),
    [
        (0.3, {"prefill-0": 0.95, OTHERS: 1.5}, "prefill-0: 95% of a core"),
        (0.04, {OTHERS: 1.2, "prefill-0": 0.7}, "the cores: 4% idle"),
        (0.5, {"decode-0": 0.6, OTHERS: 0.1}, "none (decode-0: 60% of a core)"),
    ],
)
def test_what_limits_is_a_process_without_a_rest_or_all_cores(
    idle: float, shares: dict[str, float], limit: str, run_of_one: Run
) -> None:
    assert Probe(run_of_one, Used(idle, shares), late=0, slow=0).limited_by == limit


@pytest.fixture
def run_of_one() -> Run:
    """A run of one request, simulated."""
    scale, slo = Scale("a800-llama2-70b", 1.0, 2560.0), Slo(10.0, 0.1)
    return Foresight(timed_profile(scale), slo, 1.0, 1).run(Pools(1, 1), [TraceRequest(0.0, 100, 2, ())], 1)


@pytest.mark.parametrize(("patience", "probes"), [(math.inf, 3), (0.0, 2)])
def test_a_search_begins_no_third_probe_when_its_time_is_over(patience: float, probes: int, run_of_one: Run) -> None:
    rules = Rules(Slo(1.0, 1.0), least=2, probes=3, step=1.2, patience=patience, longest=2.5, warming=1)
    assert rules.span == (2.5, 2)
    slices = [Load(seed, tuple(TraceRequest(float(at), 10, 1, ()) for at in range(9))) for seed in (1, 2)]
    bench = Bench((), rules, Foresight(timed_profile(SCALE), rules.slo, *rules.span), slices, Console(quiet=True))
    measured, asked = Measured(Servers(2, 64)), list[int]()

    def ask(requests: Sequence[TraceRequest], seed: int) -> Probe:
        asked.append(seed)
        return Probe(run_of_one, Used(0.0, {}), late=0, slow=0)

    bench.look(measured, [1.0, 2.0], ask)
    assert asked == [999, *(1000 + at for at in range(probes)), *(2000 + at for at in range(probes))]
    assert [len(each) for each in measured.probes] == [probes, probes]
    assert measured.live[1].low == pytest.approx(2.0 * 1.2 ** (probes - 1))


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
    done = run("--part", "timed", "--quick", "--seeds", "1", "--split", "1,1", "--out", str(tmp_path / "reports"))
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


@pytest.mark.live
@pytest.mark.timeout(900)
def test_a_quick_run_of_the_torch_part_says_what_limits_each_system(tmp_path: Path, smollm2: Path) -> None:
    profile = tmp_path / "local.yaml"
    own = msgspec.structs.replace(
        timed_profile(Scale("a800-llama2-70b", 1.0, 1.0)),
        name="by hand",
        block_tokens=8,
        kv_bytes_per_token=46_080,
        prefill=PrefillCoefficients(0.2, 0.01),
        decode=DecodeCoefficients(0.2, 0.01),
        context_tokens=8192,
        vram_tokens=8704,
    )
    profile.write_bytes(msgspec.yaml.encode(own))
    options = ("--part", "torch", "--quick", "--seeds", "1", "--no-peer", "--profile", str(profile))
    done = run(*options, "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    last = json.loads(done.stdout.splitlines()[-1].removeprefix("RESULT "))
    assert len(last["env"]["ratios"]) == 2
    assert sum(bar["name"].endswith("its median TTFT, off by") for bar in last["bars"]) == 3
    assert "by the profile by hand" in done.stdout
    assert "what limits, of processors" in done.stdout
    assert "prefill-0" in done.stdout
    assert "simulated" in (tmp_path / "torch" / "simulated-0.html").read_text()
    assert "failed" not in done.stdout


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "moonpool.bench.goodput", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=QUICK_SECONDS)
