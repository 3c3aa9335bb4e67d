"""`moonpool trace` as a user meets it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from moonpool.command import replays
from moonpool.command.trace import describe, hits, ratio, read_capacities, read_policies
from moonpool.errors import ConfigError, TraceError
from moonpool.trace import elsewhere

LINES = [
    {"timestamp": 0, "input_length": 25, "output_length": 3, "hash_ids": [0, 1, 2]},
    {"timestamp": 1000, "input_length": 25, "output_length": 3, "hash_ids": [0, 1, 2]},
    {"timestamp": 1000, "input_length": 20, "output_length": 3, "hash_ids": [7, 8]},
    {"timestamp": 2000, "input_length": 20, "output_length": 5, "hash_ids": [0, 1]},
]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    file = tmp_path / "small.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return file


def test_hits_prints_a_row_for_each_policy_and_a_column_for_each_capacity(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert hits(trace, "inf,3", "lru,lfu", 10, skip_bad=False, as_json=False) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["hit", "ratio", "policy", "inf", "3"] in rows
    assert ["by", "block", "lru", ".500", ".400"] in rows
    assert ["lfu", ".500", ".400"] in rows
    assert ["by", "whole", "block", "lru", ".500", ".375"] in rows
    assert ["holes", "lru", "0", "0"] in rows


def test_hits_as_json_is_the_same_in_full(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hits(trace, "inf,3", "lru", 10, skip_bad=False, as_json=True)
    report = json.loads(capsys.readouterr().out)
    assert (report["requests"], report["blocks"], report["distinct_blocks"], report["skipped"]) == (4, 10, 5, 0)
    assert [(r["policy"], r["capacity"], r["by_block"]) for r in report["hit_ratios"]] == [
        ("lru", None, 0.5),
        ("lru", 3, 0.4),
    ]
    assert report["hit_ratios"][1]["evictions"] == 3


def test_several_processes_find_the_same(
    trace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with trace.open("a") as file:
        file.write("[oops]\n")
    reports = []
    monkeypatch.setattr(replays, "BLOCKS_A_JOB", 1)
    for jobs in (1, 3):
        hits(trace, "inf,3,2,1", "lru,lfu", 10, skip_bad=True, as_json=True, jobs=jobs)
        reports.append(json.loads(capsys.readouterr().out))
    assert reports[0] == reports[1]
    assert [r["capacity"] for r in reports[1]["hit_ratios"]] == [None, 3, 2, 1] * 2


@pytest.mark.parametrize(
    ("program", "reason"),
    [("raise SystemExit('out of luck')", "ended: out of luck"), ("print(1)", "answered nonsense: .*")],
)
def test_a_replay_that_fails_elsewhere_is_no_result(
    trace: Path, monkeypatch: pytest.MonkeyPatch, program: str, reason: str
) -> None:
    monkeypatch.setattr(replays, "BLOCKS_A_JOB", 1)
    monkeypatch.setattr(elsewhere, "COMMAND", (sys.executable, "-c", program))
    with pytest.raises(TraceError, match=rf"another process {reason} \(try --jobs 1\)"):
        hits(trace, "3,2", "lru", 10, skip_bad=False, as_json=True, jobs=2)


def test_what_was_left_out_or_does_not_fit_is_said(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with trace.open("a") as file:
        file.write("[oops]\n")
    with pytest.raises(TraceError, match="line 5"):
        hits(trace, "inf", "lru", 10, skip_bad=False, as_json=False)
    hits(trace, "inf", "lru", 512, skip_bad=True, as_json=False)
    out = " ".join(capsys.readouterr().out.split())
    assert "malformed lines left out: 1, the first: line 5" in out
    assert "4 requests have more or fewer ids than blocks of 512 tokens" in out


def test_describe_tells_size_and_sharing(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    describe(trace, 10, skip_bad=False, as_json=False)
    out = " ".join(capsys.readouterr().out.split())
    assert "(mooncake): 4 requests in 2 s, 2.00 a second, at most 2 at once, in order" in out
    assert "blocks: 10, 5 different ones, of which 2 (40%) are used once; one is used 3 times" in out
    assert "from one time of arrival to the next: 1 s (median)" in out
    assert "0 3 75.0% 2 23 3" in out
    describe(trace, 10, skip_bad=False, as_json=True)
    found = json.loads(capsys.readouterr().out)["description"]
    assert found["input_tokens"]["total"] == 90
    assert [(f["first_block"], f["requests"], f["shared_blocks"]) for f in found["families"]] == [(0, 3, 2)]


def test_requests_that_failed_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "burst.csv"
    file.write_text("Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n1,m,9,9,18,x\n2,m,9,0,9,x\n")
    describe(file, 512, skip_bad=False, as_json=False)
    assert "requests without an answer, left out: 1" in capsys.readouterr().out


def test_lengths_alone_can_be_described_but_hit_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "azure.csv"
    file.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n0.0,374,44\n4.3,396,109\n")
    describe(file, 512, skip_bad=False, as_json=False)
    assert "no block ids" in capsys.readouterr().out
    with pytest.raises(TraceError, match="has no block ids"):
        hits(file, "inf", "lru", 512, skip_bad=False, as_json=False)


def test_capacities_and_policies_are_lists() -> None:
    assert read_capacities("inf, 100k,2M,7,7") == [None, 100_000, 2_000_000, 7]
    assert read_policies("lfu, lru") == ["lfu", "lru"]
    assert (ratio(0.3664), ratio(1.0), ratio(0.0)) == (".366", "1.000", ".000")


@pytest.mark.parametrize("text", ["", "0", "k", "-1", "1.5k", "10q", "inf,,3", "²", "1e3", "9" * 30])
def test_a_mistaken_capacity_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match="must be numbers of blocks"):
        read_capacities(text)


def test_a_mistaken_policy_is_named() -> None:
    with pytest.raises(ConfigError, match="--policy 'LRU': must be of lru, lfu, length-aware"):
        read_policies("lru,LRU")
