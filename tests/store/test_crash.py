"""`kill -9` at any moment of puts, demotions and promotions: what is served afterwards is exact."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.soak import often

ROUNDS = int(os.environ.get("MOONPOOL_CRASH_ROUNDS", often(200, more=15)))


def test_what_is_served_after_kill_9_is_exact(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.store.crash_process", str(tmp_path), "1", str(ROUNDS)]
    root = str(Path(__file__).parents[2])
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60 + 2 * ROUNDS, check=False, cwd=root)
    assert ended.returncode == 0, ended.stderr[-4000:]
    told = json.loads(ended.stdout)
    assert "error" not in told, told
    assert told["rounds"] == ROUNDS
    # It would prove nothing if the lives left nothing behind.
    assert told["served"] > 2 * ROUNDS, told
    assert told["served"] + told["damaged"] >= told["found"], "what the index has is served, or found to be damaged"
