"""`make bench-journal`: what the Conductor's journal costs, an event and a segment.

A Conductor with 16 instances of each kind takes requests of 4096 tokens, a few hundred at a time, from arrival to end.
Times are those of the event loop's thread, in processor time; what the writer's thread does for a record is timed by
itself, for in Python it is taken from the same interpreter.
"""

from __future__ import annotations

import argparse
import hashlib
import tempfile
import time
from collections import deque
from collections.abc import Generator, Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from moonpool.bench.result import bar, print_result
from moonpool.core import events as ev
from moonpool.core.actions import Action, Place, ReserveRoom
from moonpool.core.conductor import Conductor, ConductorConfig
from moonpool.core.vocabulary import (
    BlockKey,
    Capacity,
    Chain,
    Incarnation,
    KeySpace,
    KeySpaceId,
    PartId,
    PartKind,
    Peer,
    RequestId,
    Tier,
)
from moonpool.wire.journal import Record, pack, read_segment, segments_in
from moonpool.wire.recorder import JournalConfig, Recorder
from moonpool.wire.replay import replay, restore
from moonpool.wire.story import Stories

INSTANCES = 16
BLOCKS = 64
SPACE = KeySpace(KeySpaceId("ab" * 16), block_tokens=64, runs=30, run_bytes=1 << 16)
IN_FLIGHT = 256
RECORD_LIMIT_US = 10.0
Call = tuple[float, ev.Event, tuple[Action, ...]]


class Measured:
    """Processor time of this thread in what is done for the journal beside the decisions."""

    def __init__(self) -> None:
        self.calls = 0
        self.core = self.record = self.story = 0.0


def peer(kind: str, index: int) -> Peer:
    return Peer(PartId(f"{kind}-{index}"), Incarnation(f"{index:016x}"), f"tcp://127.0.0.1:{9000 + index}")


def fleet() -> Iterator[ev.Registered]:
    yield ev.Registered(PartKind.GATEWAY, peer("gateway", 0))
    for i in range(INSTANCES):
        yield ev.Registered(PartKind.NODE, peer("node", i), Capacity(dram_bytes=1 << 40), data_address="127.0.0.1:1")
    for kind in (PartKind.PREFILL, PartKind.DECODE):
        for i in range(INSTANCES):
            capacity, node = Capacity(pages=1 << 16, slots=512, context_tokens=1 << 17), PartId(f"node-{i}")
            yield ev.Registered(kind, peer(kind.value, i), capacity, SPACE, node=node, model="m")


def arrival(number: int) -> ev.RequestArrived:
    """Half of the prompt is that of one in sixteen families."""
    names = [f"{number % 16}/{i}" if i < BLOCKS // 2 else f"-{number}/{i}" for i in range(BLOCKS)]
    keys = tuple(BlockKey(hashlib.sha256(name.encode()).digest()[:16]) for name in names)
    tokens = BLOCKS * SPACE.block_tokens + 5
    chains = (Chain(SPACE.id, keys),)
    return ev.RequestArrived(RequestId(f"g-{number}"), 1, peer("gateway", 0), "m", tokens, 0, 64, chains, 600.0)


def requests(count: int) -> Generator[ev.Event, tuple[Action, ...], None]:
    """The events of so many requests, IN_FLIGHT of them at a time. It is sent the actions of each."""
    running: deque[tuple[Place, ev.RequestArrived]] = deque()
    seqs = [0] * INSTANCES
    for number in range(count + IN_FLIGHT):
        if number < count:
            arrived = arrival(number)
            room = next(a for a in (yield arrived) if isinstance(a, ReserveRoom))
            confirmed = ev.RoomConfirmed(room.node.id, room.node.incarnation, arrived.request, 1, ())
            place = next(a for a in (yield confirmed) if isinstance(a, Place))
            yield ev.PrefillDone(arrived.request, 1, place.prefill.id, arrived.prompt_tokens, 0, 0.0, 0.5)
            node = int(place.prefill_node.id.rsplit("-", 1)[1])
            seqs[node] += 1
            keys = arrived.chains[0].keys[BLOCKS // 2 :]
            where = place.prefill_node
            yield ev.BlocksStored(where.id, where.incarnation, seqs[node], SPACE.id, Tier.DRAM, keys)
            yield ev.DecodeJoined(arrived.request, 1, place.decode.id)
            running.append((place, arrived))
        if running and (len(running) > IN_FLIGHT or number >= count):
            place, arrived = running.popleft()
            yield ev.Finished(arrived.request, 1, place.decode.id, 64, "length")


def drive(core: Conductor, recorder: Recorder, count: int) -> tuple[Measured, list[Call]]:
    """All of it; and the last calls, to time what the writer does for them."""
    measured, stories, now = Measured(), Stories(), 0.0
    last: deque[Call] = deque(maxlen=2000)
    for registered in fleet():
        actions = core.handle(registered, now)
        recorder.record(now, registered, actions)
    for i in range(INSTANCES):
        snapshot = ev.Snapshot(PartId(f"node-{i}"), peer("node", i).incarnation, 0, ())
        recorder.record(now, snapshot, core.handle(snapshot, now))
    script = requests(count)
    event = next(script)
    clock = time.thread_time
    while True:
        now += 1e-3
        a = clock()
        actions = core.handle(event, now)
        b = clock()
        recorder.record(now, event, actions)
        c = clock()
        stories.note(now, event, actions)
        d = clock()
        measured.calls += 1
        measured.core, measured.record, measured.story = (
            measured.core + b - a,
            measured.record + c - b,
            measured.story + d - c,
        )
        last.append((now, event, actions))
        try:
            event = script.send(actions)
        except StopIteration:
            return measured, list(last)


def snapshot_ms(core: Conductor) -> float:
    times = []
    for _ in range(5):
        began = time.thread_time()
        core.snapshot()
        times.append(time.thread_time() - began)
        core.end_dump()
    return 1e3 * sorted(times)[2]


def writing_us(calls: list[Call]) -> tuple[float, float]:
    """Microseconds of the writer's thread, and bytes, for a record."""
    began = time.thread_time()
    size = sum(len(pack(Record(seq, *call))) for seq, call in enumerate(calls))
    return 1e6 * (time.thread_time() - began) / len(calls), size / len(calls)


def busy(core: Conductor) -> float:
    """Milliseconds of a snapshot with IN_FLIGHT requests under way."""
    now, script = 1e6, requests(IN_FLIGHT)
    event = next(script)
    for number in range(4 * IN_FLIGHT):
        actions = core.handle(event, now + number * 1e-3)
        event = script.send(actions)
    return snapshot_ms(core)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=4000)
    count: int = parser.parse_args().requests
    with tempfile.TemporaryDirectory(prefix="moonpool-bench-") as folder:
        config = ConductorConfig(admission="none", queue_bound=10_000)
        core = Conductor(config, 0)
        recorder = Recorder(JournalConfig(Path(folder), 1 << 32), config, core, "0" * 16)
        measured, calls = drive(core, recorder, count)
        idle = snapshot_ms(core)
        recorder.close()
        written, size = writing_us(calls)
        began = time.perf_counter()
        records = 0
        for file in segments_in(Path(folder)):
            segment = read_segment(file)
            records += replay(segment, restore(segment)).records
        replayed = records / (time.perf_counter() - began)
        dropped = recorder.counters()["journal_dropped"]
    fresh = Conductor(config, 0)
    for registered in fleet():
        fresh.handle(registered, 1e6)
    under_way = busy(fresh)
    per = 1e6 / measured.calls
    table = Table("what", "value")
    for row in (
        ("the decision core, an event", f"{measured.core * per:.1f} µs"),
        ("the journal on the event loop, an event", f"{measured.record * per:.2f} µs"),
        ("its writer's thread, a record", f"{written:.1f} µs, {size:.0f} bytes"),
        ("stories for /cluster, an event", f"{measured.story * per:.2f} µs"),
        ("a snapshot at rest", f"{idle:.2f} ms"),
        (f"a snapshot with {IN_FLIGHT} requests under way", f"{under_way:.2f} ms"),
        ("decided again in a replay", f"{replayed:.0f} records a second, reading included"),
        ("dropped", f"{dropped:.0f}"),
    ):
        table.add_row(*row)
    Console().print(table)
    print_result([bar("journal µs an event", measured.record * per, RECORD_LIMIT_US, at_most=True)], requests=count)


if __name__ == "__main__":
    main()
