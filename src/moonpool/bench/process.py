"""Processes of benches: each with a log, each ended with its block; those that measure take orders."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import moonpool
from moonpool.errors import MoonpoolError

ORDER_SECONDS = 120.0
"""A hang guard: the slowest pass takes some seconds."""
END_SECONDS = 15.0
TAIL_CHARACTERS = 2000


def anonymous_bytes(pid: int) -> int:
    """Of a process's memory, without what it shares: pages of an arena that it alone has touched are in its USS."""
    status = Path(f"/proc/{pid}/status").read_text()
    (kib,) = re.findall(r"RssAnon:\s+(\d+) kB", status)
    return int(kib) << 10


@contextlib.contextmanager
def running(
    command: Sequence[str],
    log: Path,
    environment: Mapping[str, str] | None = None,
    stdin: int = subprocess.DEVNULL,
    stdout: int | None = None,
) -> Iterator[subprocess.Popen[str]]:
    """A process until the block ends. Its standard error goes to `log`, and its output unless it is piped."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            stdin=stdin,
            stdout=out if stdout is None else stdout,
            stderr=out,
            env=dict(os.environ if environment is None else environment),
            text=True,
        )
    try:
        yield process
    finally:
        _end(process)


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str], log: Path, seconds: float) -> None:
    """Raises MoonpoolError where the process ends before that, or it takes longer."""
    until = time.monotonic() + seconds
    while not condition():
        if process.poll() is not None or time.monotonic() > until:
            how = "did not come up in time" if process.poll() is None else f"ended with {process.returncode}"
            raise MoonpoolError(f"{log.stem} {how}\n{tail(log)}")
        time.sleep(0.02)


def tail(log: Path) -> str:
    return log.read_text(errors="replace")[-TAIL_CHARACTERS:]


class Worker:
    """A store's measuring process: orders out, answers in, each with a deadline. Use `worker`."""

    def __init__(self, name: str, process: subprocess.Popen[str], log: Path) -> None:
        self._name = name
        self._process = process
        self._log = log

    def order(self, do: str, **what: Any) -> list[float]:
        """Seconds of every call. Raises MoonpoolError where the store fails, answers nothing, or has ended."""
        seconds: list[float] = self.ask(do, **what).get("seconds", [])
        return seconds

    def ask(self, do: str, **what: Any) -> dict[str, Any]:
        """All that is answered. Raises as `order`."""
        self.send(do, **what)
        return self.receive(do)

    def send(self, do: str, **what: Any) -> None:
        """Its answer is to be received."""
        stdin = self._process.stdin
        assert stdin is not None
        with contextlib.suppress(BrokenPipeError):
            stdin.write(json.dumps({"do": do, **what}) + "\n")
            stdin.flush()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(END_SECONDS)

    def receive(self, what: str, within: float = ORDER_SECONDS) -> dict[str, Any]:
        stdout = self._process.stdout
        assert stdout is not None
        if not select.select([stdout], [], [], within)[0]:
            raise MoonpoolError(f"{self._name}: nothing came of {what} for {within:g} s\n{tail(self._log)}")
        line = stdout.readline()
        if not line:
            raise MoonpoolError(f"{self._name} ended during {what}\n{tail(self._log)}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise MoonpoolError(f"{self._name}: {what} failed: {answer['error']}\n{tail(self._log)}")
        return answer


@contextlib.contextmanager
def worker(
    name: str,
    folder: Path,
    module: str,
    arguments: Sequence[str],
    python: str,
    environment: Mapping[str, str],
    start_seconds: float = ORDER_SECONDS,
) -> Iterator[Worker]:
    """`python -m module arguments` until the block ends, ready for orders. Its log lies in `folder`.

    The process can import this package and what its own environment has, nothing else of ours.
    """
    package = folder / "package"
    package.mkdir(exist_ok=True)
    with contextlib.suppress(FileExistsError):
        (package / "moonpool").symlink_to(Path(moonpool.__file__).parent)
    log = folder / f"{name}.log"
    with running(
        [python, "-P", "-m", module, *arguments],
        log,
        {**environment, "PYTHONPATH": str(package)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        started = Worker(name, process, log)
        started.receive("its start", start_seconds)
        yield started


def _end(process: subprocess.Popen[str]) -> None:
    """A process that reads from us ends with its input; any other one is asked to go. Who stays is killed."""
    if process.stdin is None:
        process.terminate()
    else:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()
