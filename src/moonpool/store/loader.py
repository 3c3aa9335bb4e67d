"""Brings blocks from the SSDs into the arena when somebody wants them; everybody else is served meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np

from moonpool.core.vocabulary import BlockKey, BlockMeta, KeySpace, KeySpaceId
from moonpool.errors import PoolError
from moonpool.store.arena import Arena
from moonpool.store.blocks import Block, Name
from moonpool.store.disks import Disks
from moonpool.store.extents import page_aligned
from moonpool.store.index import Shelved
from moonpool.store.ledger import Ledger
from moonpool.store.reads import Load
from moonpool.store.rooms import ClientId, Room

LOAD_SECONDS = 5.0
"""The most that anybody waits for a disk; then what is in DRAM must do."""


class Hold:
    """What was loaded stays in DRAM until `close`, so that it can be leased or read."""

    def __init__(self, let_go: Callable[[], None] = lambda: None) -> None:
        self._let_go = let_go

    def close(self) -> None:
        let_go, self._let_go = self._let_go, lambda: None
        let_go()

    def __enter__(self) -> Hold:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Loader:
    """Thread-safe. A block is loaded once, however many ask for it at a time."""

    def __init__(self, arena: Arena, ledger: Ledger, disks: Disks) -> None:
        self._arena = arena
        self._ledger = ledger
        self._disks = disks
        self._lock = threading.Lock()
        self._loading: dict[Name, Future[None]] = {}

    def is_needed(self, space: KeySpaceId, keys: Sequence[BlockKey]) -> bool:
        """Whether some of the leading blocks that are here are not in DRAM: only then `load` waits for anything."""
        return self._ledger.shelf.has_more(space, keys)

    async def load(self, space: KeySpace, keys: Sequence[BlockKey], seconds: float = LOAD_SECONDS) -> Hold:
        """Load the leading blocks as far as they are here in any tier and as DRAM has room. Never fails."""
        until = time.monotonic() + min(seconds, LOAD_SECONDS)
        hold, pending = self._begin(space, keys)
        try:
            await _until(pending, until)
        except BaseException:
            hold.close()
            raise
        return hold

    def load_blocking(self, space: KeySpaceId, keys: Sequence[BlockKey], seconds: float = LOAD_SECONDS) -> Hold:
        """The same, on a thread that may wait, for one who does not know what the blocks look like."""
        until = time.monotonic() + seconds
        known = self._ledger.shelf.space_of(space, keys)
        if known is None:
            return Hold()
        hold, pending = self._begin(known, keys)
        for future in pending:
            with contextlib.suppress(TimeoutError):
                future.result(max(0.0, until - time.monotonic()))
        return hold

    def _begin(self, space: KeySpace, keys: Sequence[BlockKey]) -> tuple[Hold, list[Future[None]]]:
        """Start what nobody loads yet; what is to be waited for."""
        shelf = self._ledger.shelf
        leading, borrowed = shelf.borrow(space.id, keys)
        borrowed_blocks = [shelved for _, shelved in borrowed]
        if not borrowed:
            return Hold(), []
        owner = self._ledger.own_client()
        try:
            metas = [BlockMeta(keys[index - 1] if index else None, index) for index in range(leading)]
            for index, shelved in borrowed:
                metas[index] = BlockMeta(shelved.parent, shelved.index, shelved.tokens)
            room = self._ledger.rooms.open(owner, space, keys[:leading], metas=metas)
        except PoolError:
            shelf.give_back(borrowed_blocks)
            return Hold(), []
        work = _Work(self._ledger, owner, room)
        with self._lock:
            pending = [f for _, shelved in borrowed if (f := self._loading.get(shelved.name)) is not None]
            wanted = [
                (index, shelved, block)
                for index, shelved in borrowed
                if shelved.name not in self._loading
                and shelved.space == space
                and (block := room.blocks[index]) is not None
                and not block.resident
            ]
            for _, shelved, _ in wanted:
                self._loading[shelved.name] = work.finished
        if wanted:
            pending.append(work.finished)
        work.start(len(wanted), lambda bad: self._end(work, borrowed_blocks, [s for _, s, _ in wanted], bad))
        self._disks.load([self._load(work, *each) for each in wanted])
        return Hold(work.let_go), pending

    def _load(self, work: _Work, index: int, shelved: Shelved, block: Block) -> Load:
        target = self._arena.slice(block.offset, page_aligned(block.nbytes))
        return Load(shelved, target, lambda is_good, is_bad: work.done(index, shelved, is_good, is_bad))

    def _end(self, work: _Work, borrowed: Sequence[Shelved], wanted: Sequence[Shelved], bad: Sequence[Shelved]) -> None:
        with self._lock:
            for shelved in wanted:
                self._loading.pop(shelved.name, None)
        self._ledger.shelf.give_back(borrowed, bad)
        work.finished.set_result(None)


class _Work:
    """One room that is being filled. It is closed when all I/O has ended and its holder has let go."""

    def __init__(self, ledger: Ledger, owner: ClientId, room: Room) -> None:
        self.finished: Future[None] = Future()
        # One who no longer waits must not cancel it for the others.
        self.finished.set_running_or_notify_cancel()
        self._ledger = ledger
        self._owner = owner
        self._room = room
        self._lock = threading.Lock()
        self._left = 0
        self._claims = 2
        """The holder and the I/O."""
        self._bad: list[Shelved] = []
        self._on_end: Callable[[list[Shelved]], None] = lambda bad: None

    def start(self, loads: int, on_end: Callable[[list[Shelved]], None]) -> None:
        self._left = loads
        self._on_end = on_end
        if not loads:
            self._end()

    def done(self, index: int, shelved: Shelved, is_good: bool, is_bad: bool) -> None:
        if is_good:
            sums = [int(value) for value in np.frombuffer(shelved.checksums, "<u8")]
            self._ledger.rooms.complete(self._owner, self._room.id, [(index, 0, shelved.space.runs)], sums)
            self._ledger.shelf.count("ssd_promotions")
        with self._lock:
            if is_bad:
                self._bad.append(shelved)
            self._left -= 1
            is_over = not self._left
        if is_over:
            self._end()

    def let_go(self) -> None:
        with self._lock:
            self._claims -= 1
            is_over = not self._claims
        if is_over:
            self._ledger.rooms.close(self._owner, self._room.id)

    def _end(self) -> None:
        self._on_end(self._bad)
        self.let_go()


async def _until(pending: Sequence[Future[None]], until: float) -> None:
    if pending:
        waits = [asyncio.wrap_future(future) for future in pending]
        await asyncio.wait(waits, timeout=max(0.0, until - time.monotonic()))
