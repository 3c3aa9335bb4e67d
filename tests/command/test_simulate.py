"""`moonpool simulate` as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moonpool.command import elsewhere, processes
from moonpool.command.elsewhere import Task
from moonpool.command.processes import run_all
from moonpool.command.simulate import Wanted, read_seeds, simulate
from moonpool.command.workload import Workload
from moonpool.core.conductor import ConductorConfig
from moonpool.errors import ConfigError, MoonpoolError
from moonpool.sim.cluster import Setup
from moonpool.sim.profile import load_profile


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    file = tmp_path / "trace.jsonl"
    lines = (
        {
            "timestamp": 300 * at,
            "input_length": 1500 + 700 * (at % 9),
            "output_length": 20 + at,
            "hash_ids": [at % 5, 9 + at],
        }
        for at in range(40)
    )
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def wanted(source: Path | str, *files: Path, **changes: object) -> Wanted:
    given: dict[str, object] = {
        "workload": Workload(str(source), jitter=1.0),
        "files": files,
        "compare": False,
        "hardware": "a800-llama2-70b",
        "prefill": 2,
        "decode": 2,
        "placement": "algorithm-1",
        "admission": "early",
        "threshold": 1.0,
        "ttft": 10.0,
        "tbt": 0.1,
        "seeds": "1,2",
        "html": None,
        "as_json": False,
        "jobs": 1,
    }
    return Wanted(**(given | changes))  # type: ignore[arg-type]


def test_configurations_are_compared_in_the_terminal_json_and_html(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two, page = tmp_path / "one.yaml", tmp_path / "two.yaml", tmp_path / "out.html"
    one.write_text("placement: load-balance\n")
    two.write_text("name: small\nprefill: 1\n")
    assert simulate(wanted(one, two, trace, compare=True, html=page)) == 0
    told = capsys.readouterr().out
    assert "40 requests, jitter 1 s, seeds 1, 2" in told
    assert "more than one, seed by seed" in told
    assert f"written: {page}" in told.replace("\n", "")
    assert "<h3>small</h3>" in page.read_text()
    assert simulate(wanted(trace, one, two, compare=True, as_json=True)) == 0
    report = json.loads(capsys.readouterr().out)
    assert [(run["name"], run["seed"]) for run in report["runs"]] == [
        ("one", 1),
        ("one", 2),
        ("small", 1),
        ("small", 2),
    ]
    assert report["configurations"][1]["setup"]["prefill"] == 1
    assert {each["name"] for each in report["differences"]} == {"small"}
    assert report["runs"][0]["summary"] != report["runs"][1]["summary"], "the seed draws the jitter"


@pytest.mark.parametrize(
    ("names", "compare", "told"),
    [
        (["trace.jsonl", "a.yaml"], False, r"a.yaml is a configuration: give --compare"),
        (["trace.jsonl"], True, "--compare: give one or more configurations"),
        (["a.yaml"], True, "give one trace, there is none"),
        (["trace.jsonl", "b.jsonl", "a.yaml"], True, "give one trace, .* are 2 of them"),
        (["trace.jsonl", "a.yaml", "a.yaml"], True, "two configurations are called 'a'"),
    ],
)
def test_mistakes_are_told_before_anything_runs(trace: Path, names: list[str], compare: bool, told: str) -> None:
    (trace.parent / "a.yaml").write_text("prefill: 1\n")
    first, *others = (trace.parent / name for name in names)
    with pytest.raises(ConfigError, match=told):
        simulate(wanted(first, *others, compare=compare))


def test_a_configuration_has_classes_as_the_flags_do(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine, other = tmp_path / "mine.yaml", tmp_path / "other.yaml"
    listed = "[{name: high, rank: 0, slo-ttft: 2s}, {name: low, rank: 5}]"
    mine.write_text(f"prefill: 1\nclasses: {listed}\nmix: high=0.25,low=0.75\n")
    (tmp_path / "c.yaml").write_text(listed)
    other.write_text(f"prefill: 1\nclasses: {tmp_path / 'c.yaml'}\nmix: high=0.25,low=0.75\n")
    assert simulate(wanted(trace, mine, other, compare=True, as_json=True)) == 0
    first, second = json.loads(capsys.readouterr().out)["configurations"]
    assert first["setup"] == second["setup"]
    assert first["setup"]["mix"] == [["high", 0.25], ["low", 0.75]]
    assert [each["slo"]["ttft"] for each in first["setup"]["conductor"]["classes"]] == [2.0, None]
    mine.write_text("mix: nobody=1\n")
    with pytest.raises(ConfigError, match=r"mine.yaml: mix 'nobody=1': must be CLASS=SHARE"):
        simulate(wanted(trace, mine, compare=True))


def test_seeds() -> None:
    assert read_seeds("3, 1,3") == (3, 1)
    for bad in ("", "a", "-1", "1,,2", "99999999999"):
        with pytest.raises(ConfigError, match="must be numbers"):
            read_seeds(bad)


def tasks(trace: Path, count: int) -> list[Task]:
    profile = load_profile("a800-llama2-70b")
    config = ConductorConfig(admission="none", queue_bound=1000)
    workload = Workload(str(trace), jitter=2.0)
    return [Task(f"run {at}", workload, Setup(profile, 1 + at % 2, 1, config, seed=at)) for at in range(count)]


def test_processes_give_what_one_gives_in_the_same_order(trace: Path) -> None:
    progress: dict[int, int] = {}
    alone = [said.run for said in run_all(tasks(trace, 4), 1)]
    shared = [said.run for said in run_all(tasks(trace, 4), 2, progress.__setitem__)]
    assert shared == alone
    assert progress == dict.fromkeys(range(4), 40)


def test_a_process_that_ends_or_fails_is_told(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace.with_name("none.jsonl").unlink(missing_ok=True)
    with pytest.raises(MoonpoolError, match=r"run \d: .*none.jsonl"):
        run_all(tasks(trace.with_name("none.jsonl"), 2), 2)
    monkeypatch.setattr(processes, "COMMAND", (*elsewhere.COMMAND[:1], "-c", "pass"))
    with pytest.raises(MoonpoolError, match=r"the process that simulated it ended.*--jobs 1"):
        run_all(tasks(trace, 2), 2)
