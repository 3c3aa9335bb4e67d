"""docs/capacity.md: each of its commands runs as it stands there, on a small trace."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from moonpool.bench.cluster import running_cluster
from moonpool.trace.kinds import parse_kind
from moonpool.trace.synthesize import synthesize
from moonpool.trace.write import write_trace

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "capacity.md"
TRACE = "poisson?n=300&rate=6&input=3000&output=20&shared=.4&turns=2"
SECONDS = 300.0
"""A hang guard."""


def commands() -> list[str]:
    blocks = re.findall(r"^```sh\n(.*?)^```", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


def run(line: str, folder: Path) -> str:
    command, _, target = line.partition(" > ")
    words = shlex.split(command)
    assert words[0] == "moonpool", line
    done = subprocess.run(
        [sys.executable, "-P", "-m", *words],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        cwd=folder,
        env=os.environ,
    )
    assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    if target:
        (folder / target).write_text(done.stdout)
    return done.stdout


@pytest.mark.live
@pytest.mark.timeout(900)
def test_every_command_of_the_page_runs(tmp_path: Path, smollm2: Path) -> None:
    write_trace(tmp_path / "trace.jsonl", synthesize(parse_kind(TRACE)))
    lines = commands()
    served = next(at for at, line in enumerate(lines) if line.startswith("moonpool serve"))
    for line in lines[:served]:
        run(line, tmp_path)
    assert (tmp_path / "four.yaml").is_file()
    flags = shlex.split(lines[served])[2:]
    # The stand chooses the port itself.
    at = flags.index("--port")
    with running_cluster(*flags[:at], *flags[at + 2 :], "--dram-per-node", "32MiB") as cluster:
        for line in lines[served + 1 :]:
            told = run(line.replace("http://127.0.0.1:8000", cluster.url), tmp_path)
    assert "TTFT, mean" in told
    assert (tmp_path / "both.html").stat().st_size > 1000
