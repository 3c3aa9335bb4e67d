"""`moonpool paper` as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from moonpool.command import beside_coupled
from moonpool.command import paper as command
from moonpool.command.laboratory import slices
from moonpool.command.paper import Wanted, paper
from moonpool.core.placement import PLACEMENT_POLICIES
from moonpool.errors import ConfigError
from moonpool.trace.request import TraceRequest


def wanted(folder: Path) -> Wanted:
    return Wanted(folder, "a800-llama2-70b", 1, 1, "1", None, as_json=True, jobs=1)


def write_trace(folder: Path) -> None:
    lines = [
        {
            "timestamp": 3000 * at,
            "input_length": 32_768,
            "output_length": 3,
            "hash_ids": [at % 3, *range(100 * at + 100, 100 * at + 163)],
        }
        for at in range(40)
    ]
    (folder / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "sample.jsonl").write_text(json.dumps(lines[0]) + "\n")


def test_a_folder_of_traces_gives_chapters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "LEAST_REQUESTS", 30)
    write_trace(tmp_path)
    assert paper(wanted(tmp_path)) == 0
    out, told = capsys.readouterr()
    report = json.loads(out)
    assert report["trace"] == str(tmp_path / "a.jsonl")
    assert [chapter["title"].split(":")[0] for chapter in report["chapters"]] == [
        "§2, table 1",
        "Figure 2",
        "Figure 8",
        "§5, table 3 and figure 9",
    ]
    balanced = next(f for f in report["chapters"][2]["findings"] if f["what"] == "mean TTFT, load-balance")
    assert 51 < float(balanced["ours"].split()[0]) < 70, "the load is chosen by this figure"
    placements = [f["what"] for f in report["chapters"][2]["findings"] if f["what"].startswith("mean TTFT")]
    assert len(placements) == 5, "the paper's, and the default"
    assert "hit ratios of a.jsonl" in told
    assert "loads, look 1: load-balance at " in told


def test_each_seed_has_its_slice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "LEAST_REQUESTS", 30)
    monkeypatch.setattr(command, "SLICE", 20)
    monkeypatch.setattr(command, "OVERLOAD_SLICE", 30)
    write_trace(tmp_path)
    given = msgspec.structs.replace(wanted(tmp_path), seeds="1,2")
    assert paper(given) == 0
    placement, overload = (chapter["note"] for chapter in json.loads(capsys.readouterr().out)["chapters"][2:])
    assert placement.startswith("a.jsonl, 2 seeds, each with 20 consecutive requests of its 40, evenly spread over it")
    assert overload.startswith("a.jsonl, 2 seeds, each with 30 consecutive requests of its 40")
    assert paper(msgspec.structs.replace(given, seeds="1", full=True)) == 0
    chapter = json.loads(capsys.readouterr().out)["chapters"][2]
    assert chapter["note"].startswith("a.jsonl, 40 requests, 1 seed")
    assert sum(f["what"].startswith("mean TTFT") for f in chapter["findings"]) == len(PLACEMENT_POLICIES)


def test_slices_reach_from_the_first_request_to_the_last() -> None:
    requests = [TraceRequest(float(at), 1, 1, ()) for at in range(100, 200)]
    cut = slices("x", requests, 3, 40, 0.0)
    assert [(each.begin, each.first) for each in cut] == [(0.0, 40), (30.0, 40), (60.0, 40)]
    assert slices("x", requests, 1, 40, 0.0)[0].begin == 0.0
    assert [(each.begin, each.first) for each in slices("x", requests, 2, 100, 0.0)] == [(0.0, 100)] * 2


def test_separate_pools_are_put_beside_coupled_workers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "LEAST_REQUESTS", 30)
    for name, value in {"REAL_MACHINES": 4, "LENGTHS": (16,), "CHUNKS": (256,), "ROUTINGS": ("round-robin",)}.items():
        monkeypatch.setattr(beside_coupled, name, value)
    lines = (
        {"timestamp": 2000 * at, "input_length": 4096, "output_length": 40, "hash_ids": [*range(8 * at, 8 * at + 8)]}
        for at in range(40)
    )
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert paper(msgspec.structs.replace(wanted(tmp_path), coupled=True, first=40)) == 0
    real, simulated = json.loads(capsys.readouterr().out)["chapters"]
    assert real["title"] == "Figure 13: 4 machines, separate or coupled"
    rows = {finding["what"]: finding for finding in real["findings"]}
    assert "2P + 2D" in rows
    assert rows["coupled prefill-first round-robin"]["paper"] == "+75%"
    assert rows["coupled chunked 256 round-robin"]["comment"].startswith("2P + 2D ")
    # More limits bear no higher rate, and one long pause is in the longest tenth before it is the P90.
    alone, tenth, p90 = map(float, rows["coupled prefill-first round-robin"]["ours"].split(" · "))
    assert 0 < tenth <= p90 <= alone
    assert simulated["title"].startswith("Figure 12: simulated data, 16k tokens")
    assert "TTFT 20.677 s, TBT 0.0986 s" in simulated["note"], "so few prompts that more than a tenth find nothing"
    rows = {finding["what"]: finding for finding in simulated["findings"]}
    assert rows["coupled one-at-a-time round-robin"]["paper"] == "0.2 (+525%)"
    assert set(rows) >= {"3P + 1D", "2P + 2D", "the best of the coupled at each"}


def test_a_folder_without_traces_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no trace with block ids"):
        paper(wanted(tmp_path))
    with pytest.raises(ConfigError, match="No such file"):
        paper(wanted(tmp_path / "none"))
