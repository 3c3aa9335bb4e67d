"""SIGINT ends what a shell without job control has put into the background, where it is ignored to begin with."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from moonpool import cli
from moonpool.bench.cluster import READY_SECONDS, STOP_SECONDS, free_port
from moonpool.live import process


@contextlib.contextmanager
def in_background(*words: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """`moonpool *words &` in a shell's script; the shell, which waits for it and ends as it does, and its process."""
    script = '"$@" & echo $!; wait $!'
    command = ["sh", "-c", script, "sh", sys.executable, "-P", "-m", "moonpool", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as shell:
        assert shell.stdout is not None
        pid = int(shell.stdout.readline())
        try:
            yield shell, pid
        finally:
            if shell.poll() is None:
                os.kill(pid, signal.SIGKILL)


def answers(url: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5):
        return True
    return False


def listens(port: int) -> bool:
    with contextlib.suppress(OSError):
        return f":{port:04X} 00000000:0000 0A" in Path("/proc/net/tcp").read_text()
    return False


@pytest.mark.live
@pytest.mark.parametrize("part", ["serve", "gateway", "conductor"])
def test_what_serves_in_the_background_ends_by_sigint(smollm2: Path, part: str) -> None:
    port, control = free_port(), free_port()
    words = {
        "serve": ("--engine", "timed", "--port", str(port)),
        "gateway": ("--engine", "timed", "--port", str(port), "--control-port", str(control)),
        "conductor": ("--control-port", str(control)),
    }[part]
    with in_background(part, *words) as (shell, pid):
        until = time.monotonic() + READY_SECONDS
        while not (listens(control) if part == "conductor" else answers(f"http://127.0.0.1:{port}/health")):
            assert shell.poll() is None, "it has ended"
            assert time.monotonic() < until
            time.sleep(0.05)
        os.kill(pid, signal.SIGINT)
        assert shell.wait(STOP_SECONDS) == 0


def test_any_command_in_the_background_ends_by_sigint(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(cli, "app", lambda **_: signal.raise_signal(signal.SIGINT))
    monkeypatch.setattr(process, "leave", ended.append)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        cli.main()
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended == [128 + signal.SIGINT]
