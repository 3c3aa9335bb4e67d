"""Keeps the journal of a live Conductor. The event loop only puts references into a queue; a thread writes.

A disk that is too slow, or full, costs records and never time: what is dropped is counted, and a new segment begins
with a new snapshot as soon as there is room again.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from pathlib import Path

from msgspec import Struct

from moonpool.core.actions import Action
from moonpool.core.conductor import Conductor, ConductorConfig
from moonpool.core.events import Event, RequestArrived, Snapshot
from moonpool.core.keydump import KeyDump, ShardCopy
from moonpool.wire.journal import (
    MAGIC,
    SUFFIX,
    Ended,
    Keys,
    KeysDone,
    Origin,
    Record,
    State,
    code_version,
    pack,
)

log = logging.getLogger(__name__)

SEGMENTS = 8
"""So many make up the whole journal."""
MOST_FILES = 64
"""A Conductor that starts again and again writes short ones."""
MOST_WAITING = 8192
"""Items in the queue: records, most of them."""
MOST_KEYS_WAITING = 1 << 20
"""Block keys of the records in the queue."""
KEYS_A_STEP = 4096
"""So many of a snapshot's keys are copied with each record."""
BELL = 512
WRITE_SECONDS = 0.2
"""At least so often what waits is written."""
BATCH = 64
RETRY_SECONDS = 30.0
"""After the disk refused, until it is tried again."""
CLOSE_SECONDS = 1.0


class JournalConfig(Struct, frozen=True):
    directory: Path
    most_bytes: int
    """Of all segments together but the one that is being written."""


class _Begin(Struct, frozen=True):
    origin: Origin
    state: State


class _End(Struct, frozen=True):
    pass


_Item = tuple[int, float, Event, tuple[Action, ...]] | _Begin | list[ShardCopy] | KeysDone | _End


class Recorder:
    """`record` after every call of the core, `close` at the end; both on the core's thread."""

    def __init__(self, config: JournalConfig, rules: ConductorConfig, core: Conductor, incarnation: str) -> None:
        self._rules = rules
        self._core = core
        self._incarnation = incarnation
        self._queue: deque[_Item] = deque()
        self._writer = _Writer(config, self._queue)
        self._seq = 0
        self._number = 0
        self._dropped = 0
        self._keys_put = 0
        self._dump: KeyDump | None = None
        self._is_off = False
        """Something in the core cannot be kept."""
        self._lacks = True
        """Records are missing since the last segment began: only a new one makes sense of more."""
        self._begin()

    def record(self, now: float, event: Event, actions: tuple[Action, ...]) -> None:
        self._seq += 1
        waiting = len(self._queue)
        if self._lacks or waiting >= MOST_WAITING or self._keys_put - self._writer.keys_done >= MOST_KEYS_WAITING:
            self._drop(waiting)
            return
        self._keys_put += _keys_of(event)
        self._queue.append((self._seq, now, event, actions))
        if self._dump is not None:
            self._dump_some(self._dump)
        elif self._writer.full == self._number:
            self._begin()
        if waiting >= BELL:
            self._writer.bell.set()
        if self._writer.failed == self._number:
            self._lacks = True
            self._end_dump()

    def counters(self) -> dict[str, float]:
        writer = self._writer
        return {
            "journal_records": float(writer.records),
            "journal_dropped": float(self._dropped + writer.lost),
            "journal_bytes": float(writer.total_bytes + writer.current_bytes),
            "journal_segments": float(self._number),
        }

    def close(self) -> None:
        """Write what waits, for CLOSE_SECONDS at most."""
        self._end_dump()
        self._queue.append(_End())
        self._writer.bell.set()
        self._writer.thread.join(CLOSE_SECONDS)
        if self._writer.thread.is_alive():
            log.warning("the journal's end is not written: the disk is too slow")

    def _drop(self, waiting: int) -> None:
        self._dropped += 1
        if not self._lacks:
            self._lacks = True
            self._end_dump()
            log.warning("the journal's disk is too slow: records are dropped, a new segment will begin")
        if not self._is_off and waiting <= MOST_WAITING // 4 and self._writer.may_try():
            self._begin()

    def _begin(self) -> None:
        """A new segment, from the core's state as it is now."""
        try:
            snapshot, dump = self._core.snapshot()
        except TypeError as e:
            self._is_off = self._lacks = True
            log.error("there is no journal: %s", e)
            return
        self._number += 1
        dropped = self._dropped + self._writer.lost
        origin = Origin(code_version(), self._incarnation, self._number, self._seq + 1, time.time(), dropped)
        self._lacks = False
        self._queue.append(_Begin(origin, State(self._rules, snapshot)))
        self._dump = dump
        self._dump_some(dump)

    def _dump_some(self, dump: KeyDump) -> None:
        if copies := dump.take(KEYS_A_STEP):
            self._queue.append(copies)
        if dump.is_done:
            self._queue.append(KeysDone())
            self._end_dump()

    def _end_dump(self) -> None:
        if self._dump is not None:
            self._dump = None
            self._core.end_dump()


class _Writer:
    """The thread, and what it tells the recorder: plain numbers and flags, each written by one side at a time."""

    def __init__(self, config: JournalConfig, queue: deque[_Item]) -> None:
        self._config = config
        self._queue = queue
        self._file: _File | None = None
        self._failed_at: float | None = None
        self.bell = threading.Event()
        self._number = 0
        """Of the segment that is being written."""
        self.full = self.failed = 0
        """The newest segment that is long enough; that the disk did not take."""
        self.records = self.lost = self.keys_done = self.total_bytes = 0
        self.thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self.thread.start()

    @property
    def current_bytes(self) -> int:
        file = self._file
        return 0 if file is None else file.nbytes

    def may_try(self) -> bool:
        return self._failed_at is None or time.monotonic() - self._failed_at >= RETRY_SECONDS

    def _run(self) -> None:
        while True:
            self.bell.wait(WRITE_SECONDS)
            self.bell.clear()
            while self._queue:
                batch = [self._queue.popleft() for _ in range(min(BATCH, len(self._queue)))]
                self._try_to_write(batch)
                if isinstance(batch[-1], _End):
                    return

    def _try_to_write(self, batch: list[_Item]) -> None:
        records, written = sum(isinstance(item, tuple) for item in batch), self.records
        try:
            self._write(batch)
        except OSError as e:
            self._failed_at = time.monotonic()
            self.failed = self._number
            log.warning("the journal in %s is not written: %s", self._config.directory, e.strerror or e)
            if self._file is not None:
                self._file.abandon()
                self._file = None
        self.lost += records - (self.records - written)

    def _write(self, batch: list[_Item]) -> None:
        out = bytearray()
        for item in batch:
            match item:
                case _Begin(origin, state):
                    self._end(out)
                    self._number = origin.number
                    self._file = _File(self._config.directory, origin)
                    out += pack(origin) + pack(state)
                case _End():
                    self._end(out)
                case KeysDone():
                    out += pack(item)
                    self._flush(out)
                    if self._file is not None:
                        self._file.head_bytes = self._file.nbytes
                    self._prune()
                case list():
                    for copy in item:
                        out += pack(Keys(tuple(copy.groups())))
                case _:
                    self.keys_done += _keys_of(item[2])
                    if self._file is not None:
                        out += pack(Record(*item))
                        self._file.unwritten += 1
        self._flush(out)

    def _flush(self, out: bytearray) -> None:
        if self._file is not None and out:
            file = self._file
            file.write(out)
            self.records += file.unwritten
            file.records, file.unwritten = file.records + file.unwritten, 0
            # A segment that is mostly snapshot is worth little: it is as long again, at least.
            least = max(self._config.most_bytes // SEGMENTS, 2 * file.head_bytes)
            if file.head_bytes and file.nbytes >= least:
                self.full = self._number
        out.clear()

    def _end(self, out: bytearray) -> None:
        self._flush(out)
        if self._file is not None:
            file, self._file = self._file, None
            file.end()

    def _prune(self) -> None:
        """The oldest go. Only when the new segment replays alone, so that there is always one that does."""
        current = self._file.path if self._file is not None else None
        older: list[tuple[Path, int]] = []
        for path in sorted(self._config.directory.glob(f"*{SUFFIX}")):
            # Other Conductors may keep their journal here, and prune it.
            with contextlib.suppress(FileNotFoundError):
                older.append((path, path.stat().st_size))
        older = [(path, size) for path, size in older if path != current]
        total = sum(size for _, size in older)
        for at, (path, size) in enumerate(older):
            if total <= self._config.most_bytes and len(older) - at < MOST_FILES:
                break
            path.unlink(missing_ok=True)
            total -= size
        self.total_bytes = total


class _File:
    """One segment."""

    def __init__(self, directory: Path, origin: Origin) -> None:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime(origin.written_at))
        self.path = directory / f"{stamp}-{origin.conductor[:8]}-{origin.number:06d}{SUFFIX}"
        self.nbytes = self.head_bytes = self.records = self.unwritten = 0
        self._file = self.path.open("xb", buffering=0)
        self.path.chmod(0o600)
        self.write(MAGIC)

    def write(self, data: bytes | bytearray) -> None:
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) :]
        self.nbytes += len(data)

    def end(self) -> None:
        self.write(pack(Ended(self.records)))
        self._file.close()

    def abandon(self) -> None:
        self._file.close()


def _keys_of(event: Event) -> int:
    """Block keys that it holds on to while it waits."""
    match event:
        case RequestArrived(chains=chains):
            return sum(len(chain.keys) for chain in chains)
        case Snapshot(blocks=blocks):
            return sum(len(keys) for _, _, keys in blocks)
        case _:
            return len(getattr(event, "keys", ()))
