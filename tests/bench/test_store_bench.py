"""`make bench-store ARGS=--quick`: every part of the bench runs, and its last line is its result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.live
SECONDS = 120.0


def test_a_quick_run_measures_every_row_that_needs_no_peer(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-P", "-m", "moonpool.bench.store", "--quick"],
        env={**os.environ, "MOONPOOL_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    last = run.stdout.splitlines()[-1]
    assert last.startswith("RESULT ")
    result = json.loads(last.removeprefix("RESULT "))
    assert {"cores", "machine", "python", "ssd", "peer"} == result["env"].keys()
    for bar in result["bars"]:
        assert (bar["value"] is None) == ("Mooncake" in bar["name"]), bar
    assert not list(tmp_path.iterdir()), "nothing may be left of the SSD's measurement"
