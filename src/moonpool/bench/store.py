"""`make bench-store`: this pool and Mooncake Store side by side on this machine, and what the machine gives at most.

Both stores run in processes of their own, take the same walk over the same buffer, and are measured in turn, so that
the ratios hold on a machine that is not quiet. What was read is compared with what was put, outside the timed calls;
this pool also verifies a checksum of what comes over the network or from an SSD, within them.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from moonpool.bench import limits, ssd
from moonpool.bench.bars import bars
from moonpool.bench.cluster import free_port
from moonpool.bench.figures import BATCH, KIB, LOCAL, MIB, OURS, PEER, REMOTE, Case, Figures, size_name
from moonpool.bench.peer import VERSION, Peer, PeerMissingError, set_up
from moonpool.bench.pool import running_pool
from moonpool.bench.process import Worker, running, wait_until, worker
from moonpool.bench.result import print_result
from moonpool.bench.walk import Buffers
from moonpool.engine.model import home
from moonpool.errors import MoonpoolError

SIZES = (64 * KIB, MIB, 8 * MIB)
BLOCK = 8 * MIB
"""Of the comparisons with raw sockets and raw files."""
CALL_SIZES = (MIB, BATCH * 64 * KIB, 8 * MIB)
"""Of calls that wait for each other, which no number of connections helps: singles, and a batch of small blocks."""
MASTER_SECONDS = 20.0
TABLE_COLUMNS = 120
"""Where nobody says how wide the output is."""

Sides = dict[str, Worker]


@dataclass(frozen=True, slots=True)
class Plan:
    walk_bytes: int = 256 * MIB
    repetitions: int = 9
    exists_calls: int = 1000


QUICK = Plan(walk_bytes=2 * BLOCK, repetitions=1, exists_calls=32)
"""A smoke test: every part runs, no figure means anything."""


def main() -> int:
    options = _options()
    plan = QUICK if options.quick else Plan(options.walk * MIB, options.repetitions)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = TABLE_COLUMNS
    figures = Figures(plan.walk_bytes)
    peer, lack = (None, "left out") if options.quick or options.no_peer else _peer(console)
    try:
        with tempfile.TemporaryDirectory(prefix="moonpool-bench-") as folder, Progress(console=console) as progress:
            above = Path(options.ssd_dir) if options.ssd_dir else home()
            disk = _measure(figures, plan, peer, Path(folder), above, progress)
    except MoonpoolError as error:
        console.print(f"the bench failed: {error}", soft_wrap=True, markup=False)
        return 1
    for table in figures.tables():
        console.print(table)
    console.print(f"SSD: {disk}" + (f"\nwithout Mooncake Store: {lack}" if lack else ""), soft_wrap=True, markup=False)
    print_result(bars(figures, lack), ssd=disk, peer=lack or f"Mooncake Store {VERSION}")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make bench-store", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="a smoke test of some seconds, without the peer")
    parser.add_argument("--no-peer", action="store_true", help="this pool and the raw limits alone")
    parser.add_argument("--repetitions", type=int, default=Plan().repetitions, help="walks of each kind (%(default)s)")
    parser.add_argument("--walk", type=_blocks, default=256, help="MiB of a walk, whole blocks of 8 (%(default)s)")
    parser.add_argument("--ssd-dir", help="a directory on the disk to be measured (Moonpool's cache directory)")
    return parser.parse_args()


def _blocks(mib: str) -> int:
    if int(mib) < 8 or int(mib) % 8:
        raise argparse.ArgumentTypeError(f"{mib}: must be a multiple of 8")
    return int(mib)


def _peer(console: Console) -> tuple[Peer | None, str]:
    """The peer, or why there is none."""
    try:
        return set_up(console), ""
    except PeerMissingError as error:
        console.print(f"without Mooncake Store: {error}", soft_wrap=True, markup=False)
        return None, str(error)


def _measure(figures: Figures, plan: Plan, peer: Peer | None, folder: Path, ssd_above: Path, progress: Progress) -> str:
    """All rows, and the SSD's description. Raises MoonpoolError where a part does not do what it should."""
    cases = 2 * len(SIZES) * 2
    turns = plan.repetitions + 1
    task = progress.add_task("measuring", total=(cases + 3) * turns)

    def step() -> None:
        progress.advance(task)

    buffers = Buffers(plan.walk_bytes)
    with limits.loopback(buffers, BLOCK, folder) as sockets:
        # In the same turn as what is compared with them: the machine's own rates come and go by the second.
        beside = {
            (REMOTE, BLOCK, BATCH): partial(_socket_limits, sockets),
            (LOCAL, MIB, BATCH): partial(_copy_limits, buffers),
        }
        for place in (REMOTE, LOCAL):
            with _sides(place, plan, peer, folder) as sides:
                for size in SIZES:
                    for batch in (1, BATCH):
                        case = place, size, batch
                        _measure_case(figures, plan, sides, case, beside.get(case, dict), step)
        for turn in range(turns):
            _note_limits(figures, _call_limits(sockets), turn)
            step()
    return ssd.measure(figures, buffers, BLOCK, plan.repetitions, ssd_above, step)


@contextlib.contextmanager
def _sides(place: str, plan: Plan, peer: Peer | None, folder: Path) -> Iterator[Sides]:
    """The processes to be measured, by side, each with its store behind it."""
    dram = 4 * plan.walk_bytes
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(running_pool(folder, dram))
        where = pool.data_address if place == REMOTE else pool.socket_path
        walk = str(plan.walk_bytes)
        start = ("moonpool.bench.pool_side", [where, walk], sys.executable, os.environ)
        sides = {OURS: stack.enter_context(worker(OURS, folder, *start))}
        if peer is not None:
            master = stack.enter_context(_mooncake_master(peer, folder))
            module, python = "moonpool.bench.peer_mooncake", str(peer.python)
            owner = (module, [master, str(dram), walk], python, peer.environment)
            sides[PEER] = stack.enter_context(worker("mooncake-owner", folder, *owner))
            if place == REMOTE:
                client = (module, [master, "0", walk], python, peer.environment)
                sides[PEER] = stack.enter_context(worker("mooncake-client", folder, *client))
        yield sides


@contextlib.contextmanager
def _mooncake_master(peer: Peer, folder: Path) -> Iterator[str]:
    """Its address."""
    port, metrics = free_port(), free_port()
    log = folder / "mooncake-master.log"
    command = [str(peer.python), "-P", "-m", "mooncake.cli", "--rpc_address=127.0.0.1", f"--rpc_port={port}"]
    command += ["--metrics_host=127.0.0.1", f"--metrics_port={metrics}"]
    with running(command, log, peer.environment) as process:
        wait_until(lambda: _listens(port), process, log, MASTER_SECONDS)
        yield f"127.0.0.1:{port}"


def _listens(port: int) -> bool:
    """Some process listens on this port of ours."""
    wanted = f":{port:04X}"
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return any(row[1].endswith(wanted) and row[3] == "0A" for row in rows)


def _measure_case(
    figures: Figures,
    plan: Plan,
    sides: Sides,
    case: tuple[str, int, int],
    beside: Callable[[], dict[str, float]],
    step: Callable[[], None],
) -> None:
    """Put and get (and once `exists`, and ours without a copy) by each side in turn, the first one changing.

    `beside`: limits to be measured in each turn.
    """
    place, size, batch = case
    for turn in range(plan.repetitions + 1):
        for name in sorted(sides, reverse=turn % 2 == 1):
            side = sides[name]
            orders = ["put", "get"]
            if size == SIZES[0]:
                orders.append("exists")
            if name == OURS and place == LOCAL and batch == 1:
                orders.append("view")
            for do in orders:
                what = {"name": f"{size}/{batch}/{turn}", "size": size, "batch": batch, "calls": plan.exists_calls}
                seconds = side.order(do, **what)
                if turn:
                    figures.add(Case(place, do, size, batch), name, seconds)
            side.order("remove", **what)
        _note_limits(figures, beside(), turn)
        step()


def _note_limits(figures: Figures, found: dict[str, float], turn: int) -> None:
    """Seconds by what was measured; the first turn warms up."""
    for name, seconds in found.items() if turn else ():
        figures.add_limit(name, seconds)


def _copy_limits(buffers: Buffers) -> dict[str, float]:
    return {limits.COPY: limits.copy_seconds(buffers), limits.SHARED_COPY: limits.shared_copy_seconds(buffers)}


def _socket_limits(sockets: limits.Loopback) -> dict[str, float]:
    return {
        limits.SOCKETS: sockets.seconds(verify=False),
        limits.SOCKETS_VERIFIED: sockets.seconds(verify=True),
        limits.SOCKETS_SUMMED: sockets.seconds(verify=True, sum_up=True),
    }


def _call_limits(sockets: limits.Loopback) -> dict[str, float]:
    found = {limits.CALLS.format(size_name(size)): sockets.call_seconds(size) for size in CALL_SIZES}
    return found | {limits.CALLS_BACK.format(size_name(size)): sockets.call_back_seconds(size) for size in CALL_SIZES}


if __name__ == "__main__":
    sys.exit(main())
