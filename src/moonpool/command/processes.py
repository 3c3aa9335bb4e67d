"""Many simulated runs on several cores. The order of the answers is that of the tasks, whoever is ready first."""

from __future__ import annotations

import contextlib
import subprocess
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from moonpool.command.elsewhere import COMMAND, Runner, Said, Task, receive, send
from moonpool.command.workload import Traffic
from moonpool.errors import MoonpoolError

Progress = Callable[[int, int], None]
"""(number of the task, requests that are over)."""


def run_all(
    tasks: Sequence[Task],
    jobs: int,
    on_progress: Progress = lambda task, over: None,
    traffic: Traffic | None = None,
) -> list[Said]:
    """As `Runners.run`, of which there is one call only."""
    with Runners(jobs, traffic) as runners:
        return runners.run(tasks, on_progress)


class Runners:
    """Processes that take tasks until it is left, so that each reads a trace once; they start when they are needed."""

    def __init__(self, jobs: int, traffic: Traffic | None = None) -> None:
        """`traffic`: what was read already."""
        self._jobs = jobs
        self._here = Runner(traffic)
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Runners:
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            _close(process)
        self._processes.clear()

    def run(self, tasks: Sequence[Task], on_progress: Progress = lambda task, over: None) -> list[Said]:
        """Each with what it asks for, by up to `jobs` processes; one alone runs in this process.

        `on_progress` is called by several threads. Raises ConfigError, TraceError or MoonpoolError, after which there
        is nothing to do but to leave.
        """
        jobs = min(self._jobs, len(tasks))
        if jobs <= 1:
            return [self._here.perform(task, _of_task(at, on_progress)) for at, task in enumerate(tasks)]
        while len(self._processes) < jobs:
            self._processes.append(subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        waiting = deque(enumerate(tasks))
        answers: dict[int, Said] = {}

        def work(process: subprocess.Popen[bytes]) -> None:
            while True:
                try:
                    at, task = waiting.popleft()
                except IndexError:
                    return
                answers[at] = _ask(process, task, _of_task(at, on_progress))

        with ThreadPoolExecutor(jobs) as threads:
            try:
                for working in [threads.submit(work, process) for process in self._processes[:jobs]]:
                    working.result()
            except BaseException:
                waiting.clear()
                # Whoever waits for an answer gets the end of its pipe.
                for process in self._processes:
                    process.kill()
                raise
        return [answers[at] for at in range(len(tasks))]


def _ask(process: subprocess.Popen[bytes], task: Task, on_progress: Callable[[int], None]) -> Said:
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        send(process.stdin, task)
        while (frame := receive(process.stdout)) is not None:
            said = msgspec.msgpack.decode(frame, type=Said)
            if said.error:
                raise MoonpoolError(f"{task.name}: {said.error}")
            on_progress(said.over)
            if said.run is not None or said.trial is not None:
                return said
    except (OSError, ValueError, msgspec.MsgspecError) as e:
        raise MoonpoolError(f"{task.name}: the process that simulated it ended: {e} (try --jobs 1)") from None
    raise MoonpoolError(f"{task.name}: the process that simulated it ended (try --jobs 1)")


def _of_task(at: int, on_progress: Progress) -> Callable[[int], None]:
    return lambda over: on_progress(at, over)


def _close(process: subprocess.Popen[bytes]) -> None:
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            # What was still to be sent to it went nowhere.
            with contextlib.suppress(BrokenPipeError):
                stream.close()
