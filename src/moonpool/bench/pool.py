"""A pool by itself for `make bench-store`: a Conductor and one node, each a process as `moonpool` starts it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from moonpool.bench.cluster import free_port
from moonpool.bench.process import running, tail, wait_until

READY_SECONDS = 60.0
"""A hang guard: a node takes a second, and a third of one for each GiB."""
NODE = "node-0"


@dataclass(frozen=True, slots=True)
class Pool:
    socket_path: str
    """For clients on this host."""
    data_address: str
    """`host:port`, for those that come over tcp."""


@contextlib.contextmanager
def running_pool(folder: Path, dram_bytes: int, *options: str) -> Iterator[Pool]:
    """Until the block ends. One client may hold all of the node; `options` are further ones of `moonpool node`.

    Raises MoonpoolError if it does not come up.
    """
    control, data = free_port(), free_port()
    run_dir = folder / "run"
    run_dir.mkdir(mode=0o700, exist_ok=True)
    with contextlib.ExitStack() as stack:
        _start(stack, folder, ["conductor", "--control-port", str(control), "--journal", "off"], "conductor at ")
        size = f"{dram_bytes >> 20}MiB"
        node = ["node", "--conductor", f"127.0.0.1:{control}", "--id", NODE, "--data-port", str(data)]
        node += ["--run-dir", str(run_dir), "--dram-per-node", size, "--client-quota", size, *options]
        _start(stack, folder, node, "joined the cluster")
        yield Pool(str(run_dir / f"{NODE}.sock"), f"127.0.0.1:{data}")


def _start(stack: contextlib.ExitStack, folder: Path, arguments: Sequence[str], is_up: str) -> None:
    log = folder / f"{arguments[0]}.log"
    process = stack.enter_context(running([sys.executable, "-P", "-m", "moonpool", *arguments], log))
    wait_until(lambda: is_up in tail(log), process, log, READY_SECONDS)
