"""The flags that say what is sent to a simulated cluster."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from moonpool.cli import app
from moonpool.command.workload import Traffic, Workload
from moonpool.errors import ConfigError, TraceError
from moonpool.trace import index
from moonpool.trace.kinds import COMMON, KINDS, OF_ONE_FAMILY


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Ten requests in ten seconds, the later lines first."""
    file = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 1000 * at, "input_length": 1000, "output_length": 4, "hash_ids": [0, 1 + at]} for at in range(10)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in reversed(lines)))
    return file


def test_a_trace_comes_in_order_and_again_at_another_speed(trace: Path) -> None:
    traffic = Traffic(Workload(str(trace), until=5.0), 512)
    assert [request.arrival for request in traffic.requests()] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert [request.arrival for request in traffic.requests(speed=4.0)] == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert [request.blocks for request in traffic.requests()][:2] == [(0, 1), (0, 2)]


def test_ids_are_split_for_hardware_with_smaller_blocks(trace: Path) -> None:
    first = next(iter(Traffic(Workload(str(trace)), 64).requests()))
    assert first.blocks == (*range(8), *range(8, 16))
    with pytest.raises(ConfigError, match="--block-size 512: must be a multiple of the hardware's own, 100 tokens"):
        Traffic(Workload(str(trace)), 100)


FLAGS = Workload("", begin=1.0, until=9.0, first=6, scale_input=2.5, scale_output=2.0, jitter=3.0, speed=2.0)


@pytest.mark.parametrize("block_tokens", [512, 64])
@pytest.mark.parametrize("source", ["file", "synthetic:tool-and-agent?n=400&rate=30"])
def test_what_is_not_kept_is_the_same(
    trace: Path, monkeypatch: pytest.MonkeyPatch, source: str, block_tokens: int
) -> None:
    workload = msgspec.structs.replace(FLAGS, source=str(trace) if source == "file" else source)
    kept = Traffic(workload, block_tokens)
    monkeypatch.setattr(index, "MOST_KEPT", 0)
    read = Traffic(workload, block_tokens)
    for speed, seed, first in ((None, 0, None), (0.5, 3, None), (1.0, 3, 4)):
        mine, other = kept.requests(speed, seed, first), read.requests(speed, seed, first)
        requests = list(mine)
        assert requests == list(other) == list(other)
        assert len(mine) == len(other) == len(requests) == (first or 6)
        assert (other.first, other.last) == (requests[0].arrival, requests[-1].arrival)


def test_what_can_be_read_only_once_is_a_mistake(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for name in (str(pipe), "-"):
        with pytest.raises(TraceError, match="is no file; a trace is read more than once"):
            Traffic(Workload(name), 512)
    packed = tmp_path / "trace.jsonl.gz"
    packed.write_bytes(gzip.compress(b"{}"))
    with pytest.raises(TraceError, match=r"is compressed; unpack it first .gunzip -k."):
        Traffic(Workload(str(packed)), 512)


def test_a_slice_without_requests_is_a_mistake(trace: Path) -> None:
    with pytest.raises(ConfigError, match="--until 3 must be later than --from 5"):
        Traffic(Workload(str(trace), begin=5.0, until=3.0), 512)
    with pytest.raises(TraceError, match="no requests between --from and --until"):
        list(Traffic(Workload(str(trace), begin=1e6), 512).requests())


def test_a_prompt_without_tokens_is_a_mistake(tmp_path: Path) -> None:
    file = tmp_path / "trace"
    file.write_text('{"timestamp": 0, "input_length": 0, "output_length": 4}\n')
    with pytest.raises(TraceError, match="a request without input tokens"):
        Traffic(Workload(str(file)), 512)


def simulated(*arguments: str) -> dict[str, object]:
    done = CliRunner().invoke(app, ["simulate", *arguments, "--prefill", "1", "--decode", "1", "--json"])
    assert done.exit_code == 0, done.output
    report: dict[str, object] = json.loads(done.stdout)
    return report


def test_simulate_takes_every_flag(trace: Path) -> None:
    with trace.open("a") as file:
        file.write("oops\n")
    shape = "--from 1 --until 9 --first 5 --scale-input 6 --scale-output 2 --jitter 2 --speed 2"
    flags = f"{shape} --skip-bad --block-size 1024"
    report = simulated(str(trace), *flags.split(), "--seed", "3")
    assert report["workload"] == {
        "source": str(trace),
        "skip_bad": True,
        "block_size": 1024,
        "begin": 1.0,
        "until": 9.0,
        "first": 5,
        "scale_input": 6.0,
        "scale_output": 2.0,
        "jitter": 2.0,
        "speed": 2.0,
    }
    runs = report["runs"]
    assert isinstance(runs, list)
    summary = runs[0]["summary"]
    assert (report["skipped"], summary["requests"], summary["completed"]) == (1, 5, 5)
    assert summary["computed_tokens"] > 5 * 1000
    assert report != simulated(str(trace), *flags.split(), "--seed", "4"), "the seed draws the jitter"


def test_synthetic_requests_are_made_for_the_blocks_of_the_cluster() -> None:
    traffic = Traffic(Workload("synthetic:paper-16k?n=40&rate=.5", first=30), 64)
    requests = list(traffic.requests())
    assert len(requests) == 30
    assert {len(request.blocks) for request in requests} == {250}
    assert requests == list(traffic.requests())
    assert next(iter(traffic.requests(speed=2.0))).arrival == 0.0


def test_generated_traces_are_those_that_are_simulated(tmp_path: Path) -> None:
    file = tmp_path / "made.jsonl"
    generate = ["trace", "generate", "poisson?n=9&input=2000", "--requests", "5", "--rate", "3", "--seed", "2"]
    done = CliRunner().invoke(app, [*generate, "--out", str(file)])
    assert done.exit_code == 0, done.output
    assert "5 requests" in done.output
    written = list(Traffic(Workload(str(file)), 512).requests())
    drawn = list(Traffic(Workload("synthetic:poisson?n=5&rate=3&seed=2&input=2000"), 512).requests())
    assert [request.blocks for request in written] == [request.blocks for request in drawn]
    assert [request.arrival for request in written] == pytest.approx([request.arrival for request in drawn])


def test_every_kind_and_parameter_is_listed() -> None:
    done = CliRunner().invoke(app, ["trace", "kinds"])
    assert done.exit_code == 0
    for name in (*KINDS, *COMMON, *OF_ONE_FAMILY):
        assert f"\n {name} " in done.output


def test_a_trace_of_failed_requests_says_how_many(tmp_path: Path) -> None:
    file = tmp_path / "burst.csv"
    rows = "5,m,400,5,405,x\n6,m,400,0,400,x\n"
    file.write_text(f"Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n{rows}")
    done = CliRunner().invoke(app, ["simulate", str(file), "--prefill", "1", "--decode", "1"])
    assert done.exit_code == 0, done.output
    assert "1 requests without an answer were left out" in done.output
