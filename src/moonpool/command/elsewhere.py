"""Simulated runs in a process of their own: `python -m moonpool.command.elsewhere`, frames in and out.

A frame is a length of four bytes, little-endian, and as many bytes of msgpack: `Task`s in; for each, any number of
`Said` out, the last of which has a run, a trial or an error. It ends when its input does.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from typing import IO

import msgspec

from moonpool.command.workload import Traffic, Workload
from moonpool.errors import MoonpoolError
from moonpool.report.run import Run
from moonpool.sim.cluster import Setup
from moonpool.sim.coupled_cluster import CoupledSetup, run_coupled
from moonpool.sim.run import run
from moonpool.sim.trial import Goal, Trial, try_out
from moonpool.trace.hits import rare_collection

COMMAND = (sys.executable, "-P", "-m", "moonpool.command.elsewhere")
MOST_FRAME_BYTES = 1 << 28


class Task(msgspec.Struct, frozen=True):
    """One run. Its seed is `setup.seed`."""

    name: str
    workload: Workload
    setup: Setup | CoupledSetup
    speed: float | None = None
    """None: the workload's own."""
    first: int | None = None
    """Only so many requests."""
    goal: Goal | None = None
    """It only has to become certain whether this is reached: a trial comes of it, and no run."""


class Said(msgspec.Struct, frozen=True):
    over: int = 0
    """Requests, so far."""
    run: Run | None = None
    trial: Trial | None = None
    seconds: float = 0.0
    """That the run took."""
    error: str = ""


class Runner:
    """Performs tasks one after another; a workload is read once."""

    def __init__(self, traffic: Traffic | None = None) -> None:
        """`traffic`: what was read already."""
        self._traffic: dict[tuple[Workload, int], Traffic] = {}
        if traffic is not None:
            self._traffic[traffic.workload, traffic.block_tokens] = traffic

    def perform(self, task: Task, on_progress: Callable[[int], None] = lambda over: None) -> Said:
        """Raises ConfigError or TraceError."""
        # A run makes some million objects and hardly a cycle.
        with rare_collection():
            return self._perform(task, on_progress)

    def _perform(self, task: Task, on_progress: Callable[[int], None]) -> Said:
        key = task.workload, task.setup.profile.block_tokens
        if key not in self._traffic:
            self._traffic[key] = Traffic(*key)
        requests = self._traffic[key].requests(task.speed, task.setup.seed, task.first)
        began = time.perf_counter()
        if task.goal is not None:
            trial = try_out(task.setup, requests, task.goal, on_progress)
            return Said(len(requests), trial=trial, seconds=time.perf_counter() - began)
        if isinstance(task.setup, CoupledSetup):
            done = run_coupled(task.name, task.setup, requests, on_progress)
        else:
            done = run(task.name, task.setup, requests, on_progress)
        return Said(len(requests), done, seconds=time.perf_counter() - began)


def send(stream: IO[bytes], what: Task | Said) -> None:
    data = msgspec.msgpack.encode(what)
    stream.write(len(data).to_bytes(4, "little") + data)
    stream.flush()


def receive(stream: IO[bytes]) -> bytes | None:
    """None at the end. Raises ValueError for what is no frame."""
    head = stream.read(4)
    if not head:
        return None
    size = int.from_bytes(head, "little")
    data = stream.read(size) if size <= MOST_FRAME_BYTES else b""
    if len(data) != size:
        raise ValueError(f"a frame of {size} bytes is cut off or too long")
    return data


def main() -> int:
    # Ctrl-C goes to the whole group: whoever started this tells of it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    runner, source, sink = Runner(), sys.stdin.buffer, sys.stdout.buffer
    while (frame := receive(source)) is not None:
        try:
            task = msgspec.msgpack.decode(frame, type=Task)
            said = runner.perform(task, lambda over: send(sink, Said(over)))
        except (MoonpoolError, ValueError, AssertionError) as e:
            said = Said(error=str(e) or type(e).__name__)
        send(sink, said)
    return 0


if __name__ == "__main__":
    sys.exit(main())
