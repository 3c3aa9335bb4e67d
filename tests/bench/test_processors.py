"""Processor time of processes by name: children are found, what is not named counts among others."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from moonpool.bench.processors import OTHERS, Meter, machine_seconds, process_seconds

BUSY = "while True: pass"
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {BUSY!r}, '--id', 'worker-7'])"
SECONDS = 60.0
"""A hang guard."""


@pytest.fixture
def parent() -> Iterator[int]:
    """A process whose child computes without end."""
    with subprocess.Popen([sys.executable, "-c", PARENT], start_new_session=True) as process:
        try:
            yield process.pid
        finally:
            os.killpg(process.pid, 9)


def test_a_child_counts_by_its_own_id(parent: int) -> None:
    until = time.monotonic() + SECONDS
    while (found := process_seconds({"root": parent})).get("worker-7", 0.0) < 0.1:
        assert time.monotonic() < until, found
    meter = Meter({"root": parent, "gone": 1 << 30})
    while (used := meter.read()).shares["worker-7"] < 0.05:
        assert time.monotonic() < until, used
    assert set(used.shares) == {"root", "worker-7", OTHERS}
    assert used.shares["worker-7"] > used.shares["root"]
    assert list(used.shares.values()) == sorted(used.shares.values(), reverse=True)
    assert 0.0 <= used.idle <= 1.0


def test_the_machine_has_seconds_and_an_idle_part_of_them() -> None:
    whole, idle = machine_seconds()
    assert 0.0 < idle < whole
