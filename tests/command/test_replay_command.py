"""`moonpool replay` as a user meets it, with an endpoint of a few lines."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from moonpool.command.replay import INTERRUPTED, Wanted, replay
from moonpool.command.simulate import Wanted as Simulated
from moonpool.command.simulate import simulate
from moonpool.command.workload import Workload
from moonpool.errors import ConfigError, MoonpoolError
from tests.bench.fake_endpoint import Answering, fake_endpoint_beside, serve_at_once

HANG = 60.0


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    file = tmp_path / "trace.jsonl"
    lines = (
        {"timestamp": 10 * at, "input_length": 600, "output_length": 3, "hash_ids": [0, at]} for at in range(1, 31)
    )
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def nowhere(name: str) -> Path:
    raise AssertionError("no model is looked for")


def wanted(source: Path, url: str | None, **changes: Any) -> Wanted:
    return Wanted(**({"workload": Workload(str(source)), "url": url, "ttft": 10.0, "tbt": 1.0} | changes))


def test_figures_are_told_in_the_terminal_json_and_html(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    html, out = tmp_path / "a.html", tmp_path / "a.json"
    with fake_endpoint_beside() as fake:
        assert replay(wanted(trace, fake.url, name="mine", html=html, out=out, key="sesame"), nowhere) == 0
    told = capsys.readouterr().out
    assert "30 requests, seed 0" in told
    assert "replay itself: sent" in told
    assert "100.0%" in told
    assert {headers["authorization"] for headers in fake.headers} == {"bearer sesame"}
    report = json.loads(out.read_text())
    (run,) = report["runs"]
    assert (run["name"], run["summary"]["attained"], run["live"]["output_tokens"]) == ("mine", 30, 90)
    assert run["live"]["errors"] == {}
    page = html.read_text()
    assert "mine" in page
    assert "Load of both pools" not in page, "nobody has looked inside"
    assert "sesame" not in page + out.read_text()


def test_a_live_run_and_its_simulation_lie_side_by_side(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    simulated = Simulated(
        Workload(str(trace)),
        (),
        False,
        "a800-llama2-70b",
        1,
        1,
        "algorithm-1",
        "early",
        1.0,
        10.0,
        1.0,
        "0",
        None,
        True,
        1,
    )
    assert simulate(simulated) == 0
    sim = tmp_path / "sim.json"
    sim.write_text(capsys.readouterr().out)
    out, html = tmp_path / "live.json", tmp_path / "both.html"
    with fake_endpoint_beside() as fake:
        both = wanted(trace, fake.url, name="live", files=(sim,), compare=True, out=out, html=html)
        assert replay(both, nowhere) == 0
    told = capsys.readouterr().out
    assert "algorithm-1 early" in told
    assert "more than live" in told
    row = next(line for line in told.splitlines() if line.strip().startswith("decode busy"))
    assert row.split()[2] == "-", "of a real endpoint it is not known"
    assert "Load of both pools" in html.read_text()
    # The same from files alone, in any order.
    assert replay(wanted(sim, None, files=(out, out), compare=True), nowhere) == 0
    told = capsys.readouterr().out
    assert "live: live" in told
    assert "more than algorithm-1 early" in told


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"url": None}, "give --url"),
        ({"files": (Path("b.json"),)}, "give --compare"),
        ({"compare": True}, "--compare: give one or more reports"),
        ({"files": (Path("b.json"),), "compare": True}, "b.json: No such file"),
        ({"files": (Path("other.jsonl"),)}, "give one trace"),
        ({"rate": 2.0, "workload": Workload("x", speed=2.0)}, "--rate draws the arrivals anew"),
        ({"think": 2.0}, "--sessions"),
        ({"send_limits": True, "ttft": None, "tbt": None}, "give --ttft or --tbt"),
        ({"api": "chat"}, "--tokenizer"),
        ({"prompts": "text"}, "--tokenizer"),
        ({"api": "chat", "prompts": "ids"}, "a chat is text"),
        ({"tokenizer": __file__}, "is no tokenizer"),
        ({"vocabulary": 7}, "--vocabulary 7"),
    ],
)
def test_mistakes_are_told_before_anything_is_sent(trace: Path, changes: dict[str, Any], said: str) -> None:
    if "workload" in changes:
        changes = changes | {"workload": Workload(str(trace), speed=2.0)}
    with fake_endpoint_beside() as fake, pytest.raises(ConfigError, match=said):
        replay(wanted(trace, **({"url": fake.url} | changes)), nowhere)
    assert not fake.bodies


def test_a_report_of_something_else_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    for text, said in (
        ('{"runs": [{"name": 1}]}', "is no report"),
        ('{"runs": []}', "has no runs"),
        ("x", "is no report"),
    ):
        other.write_text(text)
        with pytest.raises(ConfigError, match=said):
            replay(wanted(other, None, compare=True), nowhere)


def test_reports_alone_are_shown_and_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing is sent"):
        replay(wanted(tmp_path / "a.json", None, compare=True, out=tmp_path / "o"), nowhere)


def test_all_in_the_warm_up(trace: Path) -> None:
    with fake_endpoint_beside() as fake, pytest.raises(MoonpoolError, match="--warm-up"):
        replay(wanted(trace, fake.url, warm_up=100.0), nowhere)


def test_ctrl_c_tells_what_was_measured_so_far(trace: Path, tmp_path: Path) -> None:
    """As a process of its own: the probes and the first 20 are answered, the others never."""
    seen: list[int] = []

    async def serve(body: dict[str, Any], answering: Answering) -> None:
        seen.append(len(body["prompt"]))
        if len(seen) <= 22:
            await serve_at_once(body, answering)
        else:
            answering.begin()
            await asyncio.sleep(HANG)

    out = tmp_path / "out.json"
    with fake_endpoint_beside(serve) as fake:
        process = subprocess.Popen(
            [sys.executable, "-m", "moonpool", "replay", str(trace), "--url", fake.url, "--out", str(out)],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ,
        )
        until = time.monotonic() + HANG
        while len(fake.bodies) < 32 and time.monotonic() < until:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        told, _ = process.communicate(timeout=HANG)
    assert process.returncode == INTERRUPTED
    assert "interrupted: 10 requests were under way" in told
    report = json.loads(out.read_text())
    assert report["interrupted"]
    assert report["runs"][0]["summary"]["completed"] == 20
