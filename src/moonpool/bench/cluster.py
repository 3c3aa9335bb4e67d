"""A whole `moonpool serve` as a child process, for benchmarks and tests: real processes, real sockets."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

from moonpool.errors import MoonpoolError

READY_SECONDS = 200.0
"""A hang guard: five times what a start may take."""
STOP_SECONDS = 25.0


class RunningCluster:
    """Its supervisor, its URL and its log. Use `running_cluster`, which always ends it."""

    def __init__(self, process: subprocess.Popen[bytes] | subprocess.Popen[str], url: str, log: Path) -> None:
        self.process = process
        self.url = url
        self._log = log

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def get(self, path: str, timeout: float = 10.0) -> bytes:
        """The body of GET `path`. Raises OSError (also for an error status)."""
        with urllib.request.urlopen(self.url + path, timeout=timeout) as response:
            body: bytes = response.read()
            return body

    def describe(self) -> dict[str, object]:
        """GET /cluster."""
        state: dict[str, object] = json.loads(self.get("/cluster"))
        return state

    def wait_ready(self, timeout: float = READY_SECONDS) -> None:
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise MoonpoolError(f"moonpool serve ended with {self.process.returncode}:\n{self.log()[-4000:]}")
            with contextlib.suppress(OSError, urllib.error.URLError):
                self.get("/ready")
                return
            time.sleep(0.1)
        raise MoonpoolError(f"not ready after {timeout:g} s:\n{self.log()[-4000:]}")

    def stop(self) -> int:
        """Ask the supervisor to end, insist after STOP_SECONDS. Returns its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        return self.process.returncode


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


@contextlib.contextmanager
def running_cluster(
    *options: str, env: Mapping[str, str] | None = None, cwd: Path | None = None, wait: bool = True
) -> Iterator[RunningCluster]:
    """`moonpool serve *options` on a free port until the block ends. Raises MoonpoolError if it does not come up."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="moonpool-run-") as folder:
        log = Path(folder) / "serve.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "moonpool", "serve", "--port", str(port), *options],
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **(env or {})},
                cwd=cwd,
            )
        cluster = RunningCluster(process, f"http://127.0.0.1:{port}", log)
        try:
            if wait:
                cluster.wait_ready()
            yield cluster
        finally:
            cluster.stop()
