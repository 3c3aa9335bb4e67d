"""`moonpool goodput` as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from moonpool.command.contest import COARSE, FINE, Contender, Contest
from moonpool.command.goodput import Wanted, measure
from moonpool.command.processes import Runners
from moonpool.command.workload import Workload
from moonpool.core.conductor import ConductorConfig
from moonpool.core.vocabulary import Slo
from moonpool.errors import ConfigError
from moonpool.sim.cluster import Setup
from moonpool.sim.profile import load_profile


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Prompts of one length without anything shared, every 2 s: a lone prefill machine takes one a second."""
    lines = [
        {
            "timestamp": 2000 * at,
            "input_length": 8192,
            "output_length": 8,
            "hash_ids": list(range(16 * at, 16 * at + 16)),
        }
        for at in range(150)
    ]
    lines.append(
        {"timestamp": 300_000, "input_length": 130_000, "output_length": 8, "hash_ids": list(range(9000, 9254))}
    )
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def wanted(trace: Path, **changed: Any) -> Wanted:
    found = Wanted(
        workload=Workload(str(trace), jitter=1.0),
        hardware="a800-llama2-70b",
        prefill=1,
        decode=1,
        pipeline=1,
        placement="algorithm-1,random",
        admission="early",
        ttft=10.0,
        tbt=0.2,
        seeds="1,2",
        start=1.0,
        overload=2.0,
        html=None,
        as_json=True,
        jobs=1,
    )
    return msgspec.structs.replace(found, **changed)


def test_each_is_measured_at_its_own_point_and_in_overload(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert measure(wanted(trace, html=tmp_path / "page.html")) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["default"] == "kvcache-centric forecast"
    points, beside, overload = report["tables"]
    assert points["lines"][0]["name"] == report["default"]
    assert {line["name"] for line in points["lines"]} == {report["default"], "algorithm-1 early", "random early"}
    for line in points["lines"]:
        assert line["attained"]["mean"] >= 0.9
        assert 1.8 < line["speed"] < 3.0, "a machine computes such a prompt a second; 90 % attain a little above that"
    assert [line["speed"] for line in beside["lines"]] == [points["lines"][1]["speed"]] * len(beside["lines"])
    for line in overload["lines"]:
        assert line["speed"] == pytest.approx(2 * points["lines"][1]["speed"])
        assert line["attained"]["mean"] < 0.75
    assert overload["gains"][0]["against"] == report["best_other"]
    apart = [each for each in report["unservable"] if each["requests"]]
    assert apart == [{"name": "over 32k", "requests": 1, "of": 1}]
    page = (tmp_path / "page.html").read_text()
    assert "Each at its own 90 % point" in page
    assert "<svg" in page


def test_the_default_alone_is_no_contest(trace: Path) -> None:
    with pytest.raises(ConfigError, match="name others"):
        measure(wanted(trace, placement="kvcache-centric"))
    with pytest.raises(ConfigError, match="--against 'nonsense'"):
        measure(wanted(trace, placement="nonsense"))


def test_a_closer_look_refines_the_first(trace: Path) -> None:
    config = ConductorConfig(placement="load-balance", admission="early", slo=Slo(10.0, 0.2), queue_bound=1000)
    contender = Contender("it", Setup(load_profile("a800-llama2-70b"), 1, 1, config))
    told: list[str] = []
    with Runners(1) as runners:
        contest = Contest(Workload(str(trace), jitter=1.0), (1, 2), runners, lambda what, share: told.append(what))
        first = contest.coarse([contender], 1.0)["it"]
        point = contest.fine([contender], {"it": first})["it"]
    assert (first.tolerance, point.tolerance) == (COARSE, FINE)
    assert abs(point.speed / first.speed - 1.0) < 0.15
    assert len(point.runs) == 2
    shares = [run.summary.attained / run.summary.requests for run in point.runs]
    assert sum(shares) / 2 >= 0.9
    assert told[0].startswith("90 % points")
