"""`moonpool plan` as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moonpool.cli import app
from moonpool.command.plan import make_plan, read_slo
from moonpool.command.planning import Wanted
from moonpool.command.workload import Workload
from moonpool.core.vocabulary import Slo
from moonpool.errors import ConfigError
from moonpool.sim.cluster import Setup
from moonpool.sim.configuration import read_configuration
from moonpool.sim.profile import load_profile


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    file = tmp_path / "trace.jsonl"
    lines = (
        {
            "timestamp": 500 * at,
            "input_length": 3000 + 900 * (at % 9),
            "output_length": 30 + at % 40,
            "hash_ids": [at % 5, *range(100 * at + 100, 100 * at + 105 + (900 * (at % 9) + 440) // 512)],
        }
        for at in range(120)
    )
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def wanted(source: Path, **changes: object) -> Wanted:
    given: dict[str, object] = {
        "workload": Workload(str(source)),
        "slo": "ttft=4s,tbt=50ms",
        "nodes": 4,
        "hardware": "a800-llama2-70b",
        "pipelines": "1,2",
        "dram": "20k",
        "placement": "kvcache-centric",
        "admission": "forecast",
        "seed": 0,
        "exhaustive": False,
        "out": None,
        "html": None,
        "as_json": False,
        "jobs": 1,
    }
    return Wanted(**(given | changes))  # type: ignore[arg-type]


def test_the_best_split_is_shown_and_written(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, page = tmp_path / "best.yaml", tmp_path / "plan.html"
    assert make_plan(wanted(trace, exhaustive=True, out=out, html=page)) == 0
    told = capsys.readouterr().out
    assert "120 requests, seed 0; 4 machines, a800-llama2-70b; TTFT 4 s, TBT 0.05 s for 90%" in told
    assert "3P + 1D" in told
    assert "the trace lasts" not in told
    assert "every split on the whole trace: 3P + 1D" in told
    assert "(+0.0% found)" in told
    assert "moonpool serve --nodes 4 --prefill 3 --decode 1 --slo-ttft 4s --slo-tbt 0.05s" in told
    assert "<svg" in page.read_text()
    best = read_configuration(out, Setup(load_profile("h100-llama2-70b")))
    assert (best.setup.prefill, best.setup.decode, best.name) == (3, 1, "3P + 1D")


def test_a_trace_that_is_over_before_queues_are_is_told_of(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_plan(wanted(trace, slo="ttft=60s", nodes=2))
    assert "times the TTFT limit: queues take in what would not last" in capsys.readouterr().out


def test_json_has_every_split_and_does_not_depend_on_the_processes(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reports = []
    for jobs in (1, 2):
        make_plan(wanted(trace, as_json=True, jobs=jobs))
        reports.append(json.loads(capsys.readouterr().out))
    for report in reports:
        report.pop("seconds")
    assert reports[0] == reports[1]
    report = reports[0]
    assert [point["name"] for point in report["frontier"]] == ["1P + 3D", "2P + 2D", "3P + 1D", "2P in 1 x 2 + 2D"]
    assert report["best"]["how"] == "whole trace"
    assert report["best"]["goodput"] >= 0.9 * report["best"]["rate"] * (1 - 1e-9)
    small, own = report["capacities"]
    assert (small["dram_tokens"], own["dram_tokens"]) == (20_000, 3_000_000)
    assert small["hit_share"] <= own["hit_share"]
    assert report["enough_dram_tokens"] in (20_000, 3_000_000)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"nodes": 1}, "--nodes 1: give at least 2"),
        ({"slo": "ttft=0.05s"}, r"longer than 0.05 s .* the least limit on ttft that can be kept is 0\.657 s"),
        ({"slo": "tbt=1ms"}, r"100% of the requests have steps of more than 0.001 s .* least limit on tbt .* 0.019"),
        ({"slo": "30s"}, "--slo '30s': must be ttft=DURATION"),
        ({"slo": "ttft=1s,ttft=2s"}, "must be ttft=DURATION"),
        ({"slo": "ttft=soon"}, "must be ttft=DURATION"),
        ({"dram": "much"}, "--dram 'much': must be tokens a machine"),
        ({"pipelines": "8"}, "--pipelines 8: none leaves a machine of 4"),
        ({"admission": "best"}, "--admission 'best': must be of"),
        ({"out": Path("/nowhere/best.yaml")}, "--out /nowhere/best.yaml: there is no folder /nowhere"),
    ],
)
def test_mistakes_are_one_line(trace: Path, changes: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        make_plan(wanted(trace, **changes))


def test_requests_that_come_at_once_have_no_rate(tmp_path: Path) -> None:
    file = tmp_path / "burst.jsonl"
    file.write_text('{"timestamp": 0, "input_length": 10, "output_length": 5, "hash_ids": [1]}\n' * 3)
    with pytest.raises(ConfigError, match="all requests come at one time"):
        make_plan(wanted(file))


def test_limits_are_durations() -> None:
    assert read_slo("ttft=30s, tbt=100ms") == Slo(30.0, 0.1)
    assert read_slo("tbt=0.2") == Slo(None, 0.2)


def test_the_command_takes_the_flags_of_a_workload(trace: Path) -> None:
    flags = ["--trace", str(trace), "--first", "60", "--slo", "ttft=5s", "--nodes", "2", "--json", "--jobs", "1"]
    result = CliRunner().invoke(app, ["plan", *flags])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["requests"] == 60
