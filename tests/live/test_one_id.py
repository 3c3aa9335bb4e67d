"""Nodes that say they are one, as processes: whoever lives is it, and a life follows another without delay."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from moonpool.bench.cluster import free_port
from moonpool.bench.process import tail
from moonpool.store import Client, key_of

pytestmark = pytest.mark.live
GUARD_SECONDS = 60.0


class Host:
    """A Conductor, and nodes that the test starts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[subprocess.Popen[bytes]] = []
        self.control = free_port()
        self.start("conductor", "--control-port", str(self.control), "--journal", "off")

    def start(self, kind: str, *options: str) -> tuple[subprocess.Popen[bytes], Path]:
        log = self.folder / f"{len(self.processes)}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "moonpool", kind, *options],
                stdout=out,
                stderr=out,
                stdin=subprocess.DEVNULL,
            )
        self.processes.append(process)
        return process, log

    def node(self, run_dir: str) -> tuple[subprocess.Popen[bytes], Path]:
        folder = self.folder / run_dir
        folder.mkdir(mode=0o700, exist_ok=True)
        where = ("--conductor", f"127.0.0.1:{self.control}", "--run-dir", str(folder))
        return self.start("node", "--id", "node-0", "--dram-per-node", "1MiB", *where)


@pytest.fixture
def host() -> Iterator[Host]:
    with tempfile.TemporaryDirectory(prefix="mp") as folder:
        host = Host(Path(folder))
        yield host
        for process in host.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
        for process in host.processes:
            process.wait(GUARD_SECONDS)


def joined(process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + GUARD_SECONDS
    while "joined the cluster" not in tail(log):
        assert process.poll() is None, tail(log)
        assert time.monotonic() < until, tail(log)
        time.sleep(0.01)


def test_a_second_node_of_an_id_ends_with_the_way_out_and_the_first_goes_on(host: Host) -> None:
    joined(*host.node("one"))
    with Client.connect(host.folder / "one" / "node-0.sock") as pool:
        space = pool.space("documents", block_bytes=4096)
        space.put(key_of("a"), bytes(4096))
        second, log = host.node("two")
        assert second.wait(GUARD_SECONDS) == 2, tail(log)
        said = [line for line in tail(log).splitlines() if line.startswith("moonpool: ")]
        assert len(said) == 1
        for text in ("node-0", "tcp://127.0.0.1:", "--id"):
            assert text in said[0]
        assert not [*(host.folder / "two").iterdir()]
        assert space.exists(key_of("a"))
        assert space.put(key_of("b"), bytes(4096))
    assert "registered" in tail(host.folder / "0.log")
    assert "in place of" not in tail(host.folder / "0.log")


@pytest.mark.parametrize("run_dir", ["one", "two"], ids=["where it was", "elsewhere"])
def test_a_node_that_was_killed_comes_back_at_once(host: Host, run_dir: str) -> None:
    first, log = host.node("one")
    joined(first, log)
    first.kill()
    first.wait(GUARD_SECONDS)
    killed = time.monotonic()
    again, log = host.node(run_dir)
    joined(again, log)
    # A node is up after a second or two; without its old life's silence to be waited for.
    assert time.monotonic() - killed < GUARD_SECONDS / 2
    with Client.connect(host.folder / run_dir / "node-0.sock") as pool:
        assert pool.space("documents", block_bytes=4096).put(key_of("a"), bytes(4096))
    assert again.poll() is None


def test_a_node_that_another_has_replaced_ends_instead_of_taking_puts_that_nobody_finds(host: Host) -> None:
    first, log = host.node("one")
    joined(first, log)
    first.send_signal(signal.SIGSTOP)
    try:
        until = time.monotonic() + GUARD_SECONDS
        while "node-0 lost" not in tail(host.folder / "0.log"):
            assert time.monotonic() < until, "it is silent for long enough"
            time.sleep(0.05)
        second, other = host.node("two")
        joined(second, other)
    finally:
        first.send_signal(signal.SIGCONT)
    assert first.wait(GUARD_SECONDS) == 2, tail(log)
    assert "--id" in tail(log).splitlines()[-1]
    assert second.poll() is None
