"""`make bench-engine` where what it is asked for is not there."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

GUARD_SECONDS = 60.0


def bench(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "moonpool.bench.engine", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=GUARD_SECONDS)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_named_in_one_line() -> None:
    run = bench("--device", "cuda")
    assert run.returncode == 2
    assert run.stderr.startswith("no device cuda here: ")
    assert run.stderr.count("\n") == 1
