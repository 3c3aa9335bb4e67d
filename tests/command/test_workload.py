"""The flags that say what is sent to a simulated cluster."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moonpool.cli import app
from moonpool.command.workload import Traffic, Workload
from moonpool.errors import ConfigError, TraceError


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
    first = next(Traffic(Workload(str(trace)), 64).requests())
    assert first.blocks == (*range(8), *range(8, 16))
    with pytest.raises(ConfigError, match="--block-size 512: must be a multiple of the hardware's own, 100 tokens"):
        Traffic(Workload(str(trace)), 100)


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
