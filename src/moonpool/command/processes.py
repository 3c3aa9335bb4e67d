"""Many simulated runs on several cores. The order of the answers is that of the tasks, whoever is ready first."""

from __future__ import annotations

import contextlib
import subprocess
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from moonpool.command.elsewhere import COMMAND, Runner, Said, Task, receive, send
from moonpool.errors import MoonpoolError

Progress = Callable[[int, int], None]
"""(number of the task, requests that are over)."""


def run_all(tasks: Sequence[Task], jobs: int, on_progress: Progress = lambda task, over: None) -> list[Said]:
    """Each with its `run`, by up to `jobs` processes; one alone runs in this process.

    `on_progress` is called by several threads. Raises ConfigError, TraceError or MoonpoolError.
    """
    jobs = min(jobs, len(tasks))
    if jobs <= 1:
        runner = Runner()
        return [runner.perform(task, _of_task(at, on_progress)) for at, task in enumerate(tasks)]
    waiting = deque(enumerate(tasks))
    answers: dict[int, Said] = {}
    processes = [subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(jobs)]

    def work(process: subprocess.Popen[bytes]) -> None:
        while True:
            try:
                at, task = waiting.popleft()
            except IndexError:
                return
            answers[at] = _ask(process, task, _of_task(at, on_progress))

    try:
        with ThreadPoolExecutor(jobs) as threads:
            try:
                for working in [threads.submit(work, process) for process in processes]:
                    working.result()
            finally:
                waiting.clear()
                for process in processes:
                    process.kill()
    finally:
        for process in processes:
            _close(process)
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
            if said.run is not None:
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
