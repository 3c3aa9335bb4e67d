"""Blocks of a prompt come into the arena layer after layer, from SSD and from another node (PAPER §3).

Whoever computes on them begins when the first layer of all of them is there; the others come meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

import numpy as np
from msgspec.structs import replace

from moonpool.core.vocabulary import BlockMeta, KeySpace
from moonpool.errors import PoolError, TransferError
from moonpool.messenger.digest import copy_mark
from moonpool.messenger.questions import pack_sums
from moonpool.messenger.receiving import ReadGroup
from moonpool.messenger.tcp import TcpMessenger
from moonpool.store.arena import Arena
from moonpool.store.blocks import Block
from moonpool.store.catalogue import HERE
from moonpool.store.disks import Disks
from moonpool.store.extents import page_aligned
from moonpool.store.fetch import There
from moonpool.store.index import Shelved
from moonpool.store.ledger import Ledger
from moonpool.store.messages import Arrived, StreamBlocks, Streaming
from moonpool.store.reads import Load
from moonpool.store.rooms import ClientId, Room

log = logging.getLogger(__name__)

FETCH_BYTES = 1 << 20
"""Of as many layers as make so much, from all blocks together, at least one."""

Tell = Callable[[Arrived], None]
"""It may only wake somebody."""


ASK_SECONDS = 1.0
"""The most that a source may take to say what it has: it is asked first, for room may cost other blocks."""


class Streamer:
    """`begin` may be called from any thread, and never waits."""

    def __init__(self, arena: Arena, ledger: Ledger, disks: Disks, messenger: TcpMessenger, own_address: str) -> None:
        self._arena = arena
        self._ledger = ledger
        self._disks = disks
        self._messenger = messenger
        self._own_address = own_address

    async def asked(self, client: ClientId, call: StreamBlocks) -> StreamBlocks:
        """The same, with no more to be fetched than the source says it has: nothing of one that is gone.

        Raises PoolError as `begin`.
        """
        source, space = call.source, call.space
        keys = call.keys[: call.fetched]
        if source is None or source.data_address == self._own_address or call.time_left <= 0:
            return call
        self._ledger.rooms.check_share(client, space, len(keys))
        places = self._ledger.catalogue.places(space.id, keys)
        here = next((index for index, place in enumerate(places) if place not in HERE), len(keys))
        if here == len(keys):
            return call
        began = time.monotonic()
        seconds = min(ASK_SECONDS, call.time_left)
        there = There(space.id, keys[here:], began + seconds)
        try:
            found = await asyncio.wrap_future(self._messenger.carry(source.data_address, there, seconds))
        except TransferError as e:
            log.warning("%d blocks do not come from %s: %s", len(keys) - here, source.id, e)
            found = 0
        left = call.time_left - (time.monotonic() - began)
        return replace(call, fetched=here + found if found else 0, time_left=left)

    def begin(self, client: ClientId, call: StreamBlocks, tell: Tell) -> Streaming:
        """The client reads the room from now on; `tell` (on whatever thread) says what of it has come.

        Raises PoolError for impossible keys or space, or where the client holds too much.
        """
        space, keys, shelf = call.space, call.keys, self._ledger.shelf
        is_fetched = call.source is not None and call.source.data_address != self._own_address and call.time_left > 0
        here, borrowed = shelf.borrow(space.id, keys)
        reach = max(here, min(call.fetched, len(keys))) if is_fetched else here
        owner, copy = self._ledger.own_client(), self._ledger.copies.begin(space.id, keys[here:reach])
        try:
            self._ledger.rooms.check_share(client, space, reach)
            metas = [BlockMeta(keys[index - 1] if index else None, index) for index in range(reach)]
            for index, shelved in borrowed:
                metas[index] = BlockMeta(shelved.parent, shelved.index, shelved.tokens)
            room = self._ledger.rooms.open(owner, space, keys[:reach], metas=metas, gone=copy.gone)
        except PoolError:
            self._ledger.copies.end(copy)
            shelf.give_back([shelved for _, shelved in borrowed])
            raise
        saved = {index: shelved for index, shelved in borrowed if shelved.space == space}
        blocks = _to_come(room, here, saved)
        try:
            self._ledger.rooms.share(client, room, len(keys), len(blocks))
        except PoolError:
            self._ledger.copies.end(copy)
            self._ledger.rooms.close(owner, room.id)
            shelf.give_back([shelved for _, shelved in borrowed])
            raise

        def end() -> None:
            self._ledger.copies.end(copy)
            shelf.give_back([shelved for _, shelved in borrowed], coming.damaged)
            self._ledger.rooms.close(owner, room.id)

        coming = _Coming(self._ledger, owner, room, blocks, tell, end, call.marks)
        loads = [
            self._load(coming, index, saved[index], block)
            for index, block in enumerate(blocks)
            if not block.resident and index in saved
        ]
        wanted = [index for index, block in enumerate(blocks) if not block.resident and index not in saved]
        reads = _layers_at_once(space, len(wanted)) if wanted else []
        answer = coming.start(call.serial, len(loads) + len(reads))
        self._disks.load(loads, by_layers=True)
        group = ReadGroup(space.runs, lambda: not room.ended)
        for first, count in reads:
            self._fetch(coming, call, wanted, first, count, group)
        return answer

    def _load(self, coming: _Coming, index: int, shelved: Shelved, block: Block) -> Load:
        target = self._arena.slice(block.offset, page_aligned(block.nbytes))
        return Load(shelved, target, partial(coming.loaded, index, shelved), partial(coming.landed, index))

    def _fetch(
        self, coming: _Coming, call: StreamBlocks, wanted: Sequence[int], first: int, count: int, group: ReadGroup
    ) -> None:
        assert call.source is not None
        source, space = call.source, call.space
        start, nbytes = first * space.run_bytes, count * space.run_bytes
        read = self._messenger.read(
            source.data_address,
            space.id,
            [call.keys[index] for index in wanted],
            [self._arena.slice(coming.blocks[index].offset + start, nbytes) for index in wanted],
            call.time_left,
            lambda position, checksums: coming.landed(wanted[position], first, checksums),
            layers=(first, count),
            group=group,
        )

        def over(done: Future[int]) -> None:
            error = done.exception()
            if isinstance(error, TransferError) and group.is_wanted():
                log.warning("layers %d… of %d blocks did not come from %s: %s", first, len(wanted), source.id, error)
            elif error is not None and not isinstance(error, TransferError):
                log.error("layers %d… of %d blocks from %s", first, len(wanted), source.id, exc_info=error)
            coming.end_part()

        read.add_done_callback(over)


def _to_come(room: Room, here: int, saved: dict[int, Shelved]) -> list[Block]:
    """The leading blocks of the room that are there, or can come: from SSD those below `here`, the others by tcp."""
    blocks: list[Block] = []
    for index, block in enumerate(room.blocks):
        if block is None or not (block.resident or index in saved or index >= here):
            break
        blocks.append(block)
    return blocks


def _layers_at_once(space: KeySpace, blocks: int) -> list[tuple[int, int]]:
    """(first layer, layers) of each transfer."""
    count = min(space.runs, -(-FETCH_BYTES // (blocks * space.run_bytes)))
    return [(first, min(count, space.runs - first)) for first in range(0, space.runs, count)]


class _Coming:
    """One stream: which runs of its blocks are there."""

    def __init__(
        self,
        ledger: Ledger,
        owner: ClientId,
        room: Room,
        blocks: Sequence[Block],
        tell: Tell,
        on_end: Callable[[], None],
        tells_marks: bool,
    ) -> None:
        self.blocks = blocks
        self.damaged: list[Shelved] = []
        """What the SSD has of them that is not what was put."""
        self._ledger = ledger
        self._owner = owner
        self._room = room
        self._tell = tell
        self._on_end = on_end
        self._lock = threading.Lock()
        runs = room.space.runs
        self._all = (1 << runs) - 1
        self._there = [self._all if block.resident else 0 for block in blocks]
        """Of each block a bitmask of its runs."""
        self._missing = [sum(not there for there in self._there)] * runs
        """Of each run, how many blocks lack it."""
        self._runs = 0
        """How many leading ones nobody lacks."""
        self._parts = 0
        self._marked = 0 if tells_marks else len(blocks)
        """So many leading blocks were told of, which copy each is."""
        self._advance()

    def start(self, serial: int, parts: int) -> Streaming:
        self._parts = parts
        offsets = tuple(block.offset for block in self.blocks)
        whole = self._whole()
        answer = Streaming(serial, self._room.id, offsets, self._runs, whole, not parts, self._marks(whole))
        if not parts:
            self._on_end()
        return answer

    def landed(self, index: int, first: int, checksums: Sequence[int]) -> None:
        """Runs of a block are there and verified."""
        self._ledger.rooms.complete(self._owner, self._room.id, [(index, first, len(checksums))], checksums)
        with self._lock:
            before = self._runs
            for run in range(first, first + len(checksums)):
                if not self._there[index] >> run & 1:
                    self._there[index] |= 1 << run
                    self._missing[run] -= 1
            self._advance()
            if self._runs > before:
                # Under the lock: they are told in order.
                self._tell(self._arrived(is_over=False))

    def loaded(self, index: int, shelved: Shelved, is_good: bool, is_bad: bool) -> None:
        """A disk is through with a block."""
        if is_good:
            self.landed(index, 0, np.frombuffer(shelved.checksums, "<u8").tolist())
            self._ledger.shelf.count("ssd_promotions")
        elif is_bad:
            with self._lock:
                self.damaged.append(shelved)
        self.end_part()

    def end_part(self) -> None:
        with self._lock:
            self._parts -= 1
            if self._parts:
                return
            arrived = self._arrived(is_over=True)
        self._on_end()
        self._tell(arrived)

    def _advance(self) -> None:
        while self._runs < len(self._missing) and not self._missing[self._runs]:
            self._runs += 1

    def _whole(self) -> int:
        return next((index for index, there in enumerate(self._there) if there != self._all), len(self._there))

    def _arrived(self, is_over: bool) -> Arrived:
        whole = self._whole()
        return Arrived(self._room.id, self._runs, whole, is_over, self._marks(whole))

    def _marks(self, whole: int) -> bytes:
        some = self.blocks[self._marked : whole]
        self._marked = max(self._marked, whole)
        return pack_sums([copy_mark(block.checksums) for block in some]) if some else b""
