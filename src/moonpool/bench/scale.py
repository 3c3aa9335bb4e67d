"""`make bench-scale`: the Conductor's directory of ten million blocks, a node that restarts with a million on SSD.

The directory is filled through its announcements, one block at a time, each timed by the processor time of this thread
(what another process takes of a shared machine is not the directory's doing), with the garbage collector on and what
was there before frozen, as in a live Conductor. Its memory is what the process grew by. The node's restart is all that
`Disks` does but for the slab itself: read the index, believe what can be believed, and have it ready to be looked up
and announced.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from moonpool.bench.result import bar, print_result
from moonpool.core.directory import Directory
from moonpool.core.vocabulary import BlockKey, Chain, Incarnation, KeySpace, KeySpaceId, PartId, Tier
from moonpool.store.arena import Arena
from moonpool.store.disks import Disks
from moonpool.store.extents import PAGE_BYTES
from moonpool.store.index import Index, Recovered, Shelved
from moonpool.store.ledger import Ledger
from moonpool.store.slab import Slab

ENTRIES = 10_000_000
BLOCKS = 1_000_000
NODES = 16
PROMPT_BLOCKS = 64
LOOKUPS = 20_000
MESSAGE_KEYS = 2048
INSERT_LIMIT_MS = 5.0
RESTART_LIMIT_SECONDS = 30.0
SPACE = KeySpace(KeySpaceId("ab" * 16), block_tokens=64, runs=30, run_bytes=128)
"""Small blocks of as many layers as SmolLM2 has: the index holds a checksum for each layer."""

Row = tuple[str, str]


def measure_directory(entries: int, seed: int = 0) -> tuple[list[Row], dict[str, float]]:
    """Fill a directory with so many blocks of NODES nodes, then look up, announce and lose. Rows to print; figures."""
    rng = random.Random(seed)
    nodes = [PartId(f"node-{number}") for number in range(NODES)]
    directory, seqs = Directory(), dict.fromkeys(nodes, 0)
    for node in nodes:
        directory.join(node)
        directory.replace(node, 0, ())
    collection_before = _collection_ms()
    gc.freeze()
    before = _resident_bytes()
    worst = total = 0.0
    slow = 0
    prompts: list[tuple[BlockKey, ...]] = []
    keep_one_in = max(1, entries // PROMPT_BLOCKS // 1000)
    for number in range(entries // PROMPT_BLOCKS):
        keys = _keys(rng, PROMPT_BLOCKS)
        node = nodes[number % NODES]
        for key in keys:
            seqs[node] += 1
            began = time.thread_time()
            directory.stored(node, seqs[node], SPACE.id, Tier.SSD, (key,))
            took = time.thread_time() - began
            total += took
            slow += took > 1e-3
            worst = max(worst, took)
        if not number % keep_one_in:
            prompts.append(tuple(keys))
    grown = _resident_bytes() - before
    filled = sum(directory.counts(node)[Tier.SSD] for node in nodes)
    lookups = sorted(_timed_lookup(directory, rng.choice(prompts)) for _ in range(LOOKUPS))
    misses = sorted(_timed_lookup(directory, _keys(rng, PROMPT_BLOCKS)) for _ in range(LOOKUPS // 10))
    message = _worst_message(directory, nodes[0], seqs[nodes[0]], rng, min(entries // 10, 50 * MESSAGE_KEYS))
    began = time.thread_time()
    directory.forget(nodes[1])
    forgotten = time.thread_time() - began
    mean, p99 = sum(lookups) / len(lookups), lookups[len(lookups) * 99 // 100]
    figures = {"bytes": grown / filled, "lookup": mean, "p99": p99, "worst": worst * 1e3}
    return [
        ("entries", f"{filled:,}"),
        ("memory, bytes an entry (its 16-byte key included)", f"{grown / filled:.0f}"),
        ("insert, one block: mean", f"{total / filled * 1e6:.2f} µs"),
        ("insert, one block: worst", f"{worst * 1e3:.2f} ms"),
        ("inserts that took more than 1 ms", f"{slow}"),
        (f"announcement of {MESSAGE_KEYS} blocks: worst", f"{message * 1e3:.1f} ms"),
        (f"lookup of a prompt of {PROMPT_BLOCKS} blocks that one node has: mean", f"{mean * 1e6:.1f} µs"),
        (f"lookup of a prompt of {PROMPT_BLOCKS} blocks that one node has: p99", f"{p99 * 1e6:.1f} µs"),
        ("lookup of an unknown prompt: mean", f"{sum(misses) / len(misses) * 1e6:.1f} µs"),
        ("a node leaves", f"{forgotten * 1e3:.2f} ms"),
        (
            "full garbage collection: of all modules, of all entries",
            f"{collection_before:.0f}, {_collection_ms():.0f} ms",
        ),
    ], figures


def measure_restart(blocks: int, seed: int = 0) -> tuple[list[Row], float]:
    """A node's start with so many blocks in the index of its SSD. Rows to print; seconds."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="moonpool-scale-") as folder:
        directory = Path(folder)
        _write_index(directory / "index", blocks, rng)
        index_bytes = (directory / "index").stat().st_size
        gc.collect()
        before = _resident_bytes()
        arena = Arena(1 << 20)
        ledger = Ledger(arena.extents, PartId("node-0"), Incarnation("1"))
        began = time.perf_counter()
        disks = Disks(arena, ledger.shelf, [directory], blocks * PAGE_BYTES, open_slab=_NoSlab)
        seconds = time.perf_counter() - began
        grown = _resident_bytes() - before
        found = int(ledger.counters()["ssd_blocks"])
        ledger.ask_snapshot()
        worst = announced = 0.0
        while True:
            began = time.thread_time()
            message = ledger.next_announcement()
            took = time.thread_time() - began
            if message is None:
                break
            worst, announced = max(worst, took), announced + took
        disks.close()
        arena.close()
    if found != blocks:
        raise RuntimeError(f"{found} of {blocks} blocks were found")
    return [
        ("blocks on SSD", f"{found:,}"),
        ("index, bytes a block", f"{index_bytes / blocks:.0f}"),
        ("restart", f"{seconds:.1f} s"),
        ("memory, bytes a block", f"{grown / blocks:.0f}"),
        ("all of it announced; longest message", f"{announced:.2f} s; {worst * 1e3:.1f} ms"),
    ], seconds


class _NoSlab(Slab):
    """The place of a slab: nothing is read or written."""

    def __init__(self, path: Path, nbytes: int) -> None:
        self.path = path
        self.size = nbytes
        self.is_direct = True

    def close(self) -> None:
        return


def _write_index(path: Path, blocks: int, rng: random.Random) -> None:
    places = list(range(blocks))
    rng.shuffle(places)
    index = Index(path, Recovered())
    for start in range(0, blocks, MESSAGE_KEYS):
        some = places[start : start + MESSAGE_KEYS]
        keys = _keys(rng, len(some) + 1)
        checksums = rng.randbytes(8 * SPACE.runs)
        entries = [
            Shelved(place * PAGE_BYTES, SPACE, key, parent, checksums, PAGE_BYTES)
            for place, key, parent in zip(some, keys[1:], keys, strict=False)
        ]
        index.append(entries, ())
    index.close()


def _worst_message(directory: Directory, node: PartId, seq: int, rng: random.Random, keys: int) -> float:
    """Seconds: the blocks of one node are announced anew, so a tenth of what is known is on its way out meanwhile."""
    directory.replace(node, seq, ())
    worst = 0.0
    for _ in range(keys // MESSAGE_KEYS):
        message = _keys(rng, MESSAGE_KEYS)
        seq += 1
        began = time.thread_time()
        directory.stored(node, seq, SPACE.id, Tier.DRAM, message)
        worst = max(worst, time.thread_time() - began)
    return worst


def _timed_lookup(directory: Directory, keys: Sequence[BlockKey]) -> float:
    chain = Chain(SPACE.id, tuple(keys))
    began = time.thread_time()
    directory.match(chain)
    return time.thread_time() - began


def _keys(rng: random.Random, count: int) -> list[BlockKey]:
    data = rng.randbytes(16 * count)
    return [BlockKey(data[at : at + 16]) for at in range(0, 16 * count, 16)]


def _collection_ms() -> float:
    began = time.perf_counter()
    gc.collect()
    return (time.perf_counter() - began) * 1e3


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    parser = argparse.ArgumentParser(description="The directory and a node's index at scale.")
    parser.add_argument("--entries", type=int, default=ENTRIES, help="of the directory")
    parser.add_argument("--blocks", type=int, default=BLOCKS, help="on a node's SSD")
    chosen = parser.parse_args()
    console = Console()
    console.print(f"filling a directory with {chosen.entries:,} blocks …")
    directory_rows, figures = measure_directory(chosen.entries)
    gc.collect()
    console.print(f"restarting a node with {chosen.blocks:,} blocks …")
    node_rows, restart = measure_restart(chosen.blocks)
    for title, rows in (("the Conductor's directory", directory_rows), ("a node's restart", node_rows)):
        table = Table("measure", "value", title=title)
        for row in rows:
            table.add_row(*row)
        console.print(table)
    print_result(
        [
            bar("worst insert into the directory, ms", figures["worst"], INSERT_LIMIT_MS, at_most=True),
            bar("restart of a node, s", restart, RESTART_LIMIT_SECONDS, at_most=True),
        ],
        entries=chosen.entries,
        blocks=chosen.blocks,
        bytes_an_entry=round(figures["bytes"]),
        lookup_us=round(figures["lookup"] * 1e6, 1),
        lookup_p99_us=round(figures["p99"] * 1e6, 1),
    )


if __name__ == "__main__":
    main()
