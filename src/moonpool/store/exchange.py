"""The arena as Messenger's tcp server sees it: places for runs that arrive, blocks that leave."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import CancelledError, Future, wait
from typing import Any, TypeVar

from moonpool.core.vocabulary import BlockKey, BlockMeta, KeySpaceId, RequestId
from moonpool.errors import PoolBusyError, PoolError
from moonpool.messenger.questions import (
    VERIFIED_KEYS,
    GetBlocks,
    PutBlocks,
    Question,
    Refused,
    Reply,
    Verify,
    marks,
    unpacked,
)
from moonpool.messenger.transfer import Bytes
from moonpool.store.arena import Arena
from moonpool.store.blocks import Block
from moonpool.store.bookings import BUSY_RETRY_SECONDS, BUSY_SECONDS
from moonpool.store.catalogue import HERE
from moonpool.store.claims import Claim
from moonpool.store.desk import ANSWER_SECONDS, Desk
from moonpool.store.leases import Lease
from moonpool.store.ledger import Ledger
from moonpool.store.loader import Hold, Loader
from moonpool.store.rooms import ClientId, Room
from moonpool.store.verifying import Verifier

T = TypeVar("T")

REMOTE = ClientId(0)
"""Whoever reads over tcp; such a lease ends with its transfer."""
SLACK_SECONDS = 5.0
"""What the node's loop may be late."""
LONGEST_SECONDS = 3600.0
LOOK_SECONDS = 0.5
"""How often it is looked whether whoever waits is there still."""


class Exchange:
    """A `messenger.transfer.Store`. Made on the node's loop, called on the threads of its tcp server."""

    def __init__(self, arena: Arena, ledger: Ledger, loader: Loader, desk: Desk, batch_bytes: int) -> None:
        """`batch_bytes`: the most that one put brings, if it is more than one block."""
        self._arena = arena
        self._ledger = ledger
        self._loader = loader
        self._desk = desk
        self._batch_bytes = batch_bytes
        self._verifier = Verifier(arena, ledger)
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._waiting: set[Future[Any]] = set()
        self._closed = False

    def land(
        self, request: RequestId, attempt: int, block: int, first_run: int, runs: int, nbytes: int, until: float
    ) -> RoomLanding | str:
        try:
            claim = self._ledger.claims.take_when_free(
                request, attempt, block, first_run, runs, nbytes, until - time.monotonic()
            )
        except PoolError as e:
            return str(e)
        return RoomLanding(self._arena, self._ledger, claim, first_run, runs)

    def depart(self, space: KeySpaceId, keys: Sequence[BlockKey]) -> LeaseDeparture:
        with self._loader.load_blocking(space, keys):
            return LeaseDeparture(self._arena, self._ledger, self._ledger.leases.remote(REMOTE, space, keys))

    def answer(self, question: Question) -> Reply:
        if isinstance(question, Verify):
            return self._verified(question)
        reply = self._desk.answer_now(question)
        if reply is not None:
            return reply
        try:
            return self._on_loop(self._desk.answer(question), 3 * ANSWER_SECONDS, lambda late: None)
        except PoolError as e:
            return Refused(str(e))

    def _verified(self, question: Verify) -> Reply:
        try:
            keys = unpacked(question.keys)
        except PoolError as e:
            return Refused(str(e))
        if len(keys) > VERIFIED_KEYS:
            return Refused(f"{len(keys)} blocks to verify in one question; at most {VERIFIED_KEYS}: ask in parts")
        return marks(self._verifier.verify(question.space, keys))

    def give(self, request: GetBlocks, is_gone: Callable[[], bool] = lambda: False) -> LeaseGift | str:
        space = request.space
        if request.first_run + request.runs > space.runs:
            return f"a block of key space {space.id} has {space.runs} runs, not {request.first_run + request.runs}"
        try:
            keys = unpacked(request.keys)
            with self._hold(request, keys, is_gone):
                return LeaseGift(self._arena, self._ledger, *self._ledger.leases.each(REMOTE, space, keys))
        except PoolError as e:
            return str(e)

    def take(self, request: PutBlocks) -> RoomIntake | str:
        try:
            keys = unpacked(request.keys)
            if len(keys) > 1 and len(keys) * request.space.block_bytes > self._batch_bytes:
                return (
                    f"{len(keys)} blocks of {request.space.block_bytes} bytes in one put; at most {self._batch_bytes} "
                    "bytes: put fewer at once"
                )
            owner = self._ledger.own_client()
            room = self._open(owner, request, keys)
        except PoolError as e:
            return str(e)
        return RoomIntake(self._arena, self._ledger, owner, room)

    def close(self) -> None:
        """Nobody waits for the loop any more."""
        with self._lock:
            self._closed = True
            waiting = list(self._waiting)
        for future in waiting:
            future.cancel()

    def _open(self, owner: ClientId, request: PutBlocks, keys: Sequence[BlockKey]) -> Room:
        """Half of the put's time, at most, is for an SSD to have written what is in its way."""
        until = time.monotonic() + min(request.time_left / 2, BUSY_SECONDS)
        while True:
            try:
                return self._ledger.rooms.open_each(owner, request.space, keys, request.metas)
            except PoolBusyError:
                if self._closed or time.monotonic() >= until:
                    raise
            time.sleep(BUSY_RETRY_SECONDS)

    def _hold(self, request: GetBlocks, keys: Sequence[BlockKey], is_gone: Callable[[], bool]) -> Hold:
        space = request.space
        if request.here:
            places = self._ledger.catalogue.places(space.id, keys)
            kept = [key for key, place in zip(keys, places, strict=True) if place in HERE]
            return self._loader.load_blocking(space.id, kept)
        if self._desk.is_ready(space.id, keys, request.waits):
            return Hold()
        seconds = min(request.time_left, LONGEST_SECONDS)
        bringing = self._desk.bring(space, keys, seconds, request.waits)
        return self._on_loop(bringing, seconds, Hold.close, is_gone)

    def _on_loop(
        self,
        work: Coroutine[Any, Any, T],
        seconds: float,
        dispose: Callable[[T], None],
        is_gone: Callable[[], bool] = lambda: False,
    ) -> T:
        """`dispose` of a result that comes when it is awaited no more. `is_gone`: whoever asked for it."""
        with self._lock:
            if self._closed:
                work.close()
                raise PoolError("this node is being shut down")
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
            self._waiting.add(future)
        try:
            if not _is_over(future, time.monotonic() + seconds + SLACK_SECONDS, is_gone):
                raise TimeoutError
            return future.result()
        except (TimeoutError, CancelledError):
            if not future.cancel() and not future.cancelled():
                dispose(future.result())
            raise PoolError("this node did not answer in time, or is being shut down") from None
        finally:
            with self._lock:
                self._waiting.discard(future)


def _is_over(future: Future[T], until: float, is_gone: Callable[[], bool]) -> bool:
    while not wait([future], max(0.0, min(LOOK_SECONDS, until - time.monotonic()))).done:
        if time.monotonic() >= until or is_gone():
            return False
    return True


class RoomLanding:
    def __init__(self, arena: Arena, ledger: Ledger, claim: Claim, first_run: int, runs: int) -> None:
        self._ledger = ledger
        self._claim = claim
        self._first_run = first_run
        self.run_bytes = claim.block.run_bytes
        self.slices: list[Bytes | None] = [
            arena.slice(claim.block.offset + run * self.run_bytes, self.run_bytes) if claim.runs >> run & 1 else None
            for run in range(first_run, first_run + runs)
        ]

    def landed(self, position: int, checksum: int) -> None:
        self._ledger.claims.landed(self._claim, self._first_run + position, checksum)

    def close(self) -> None:
        self._ledger.claims.end(self._claim)


class LeaseDeparture:
    def __init__(self, arena: Arena, ledger: Ledger, lease: Lease) -> None:
        self._ledger = ledger
        self._lease = lease
        self.blocks = [arena.slice(block.offset, block.nbytes) for block in lease.blocks]
        self.checksums = [checksum for block in lease.blocks for checksum in block.checksums]

    def close(self) -> None:
        self._ledger.leases.end(REMOTE, self._lease.id)


class LeaseGift:
    def __init__(self, arena: Arena, ledger: Ledger, lease: Lease, found: Sequence[Block | None]) -> None:
        self._ledger = ledger
        self._lease = lease
        self.blocks = [None if block is None else arena.slice(block.offset, block.nbytes) for block in found]
        self.checksums = [block.checksums for block in lease.blocks]
        self.metas = [BlockMeta(block.parent, block.index, block.tokens) for block in lease.blocks]

    def close(self) -> None:
        self._ledger.leases.end(REMOTE, self._lease.id)


class RoomIntake:
    def __init__(self, arena: Arena, ledger: Ledger, owner: ClientId, room: Room) -> None:
        self._ledger = ledger
        self._owner = owner
        self._room = room
        self._arena = arena
        self._offsets = [-1 if block is None or block.resident else block.offset for block in room.blocks]

    def places(self, blocks: slice) -> Iterator[tuple[int, Bytes | None]]:
        offsets, size = self._offsets[blocks], self._room.space.block_bytes
        at = 0
        while at < len(offsets):
            first, end = offsets[at], at + 1
            step = 0 if first < 0 else size
            while end < len(offsets) and offsets[end] == first + (end - at) * step:
                end += 1
            yield end - at, None if first < 0 else self._arena.slice(first, (end - at) * size)
            at = end

    def landed(self, positions: Sequence[int], checksums: Sequence[int]) -> None:
        self._ledger.rooms.complete_blocks(self._owner, self._room.id, positions, checksums)

    def close(self) -> None:
        self._ledger.rooms.close(self._owner, self._room.id)

    def tell(self) -> None:
        self._ledger.rooms.tell()
