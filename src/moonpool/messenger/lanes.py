"""A few connections to one peer, and the threads that move pieces of transfers over them.

A transfer's pieces are taken one by one by whichever lane is free, so that a large one is striped over all of them and
an urgent one waits at most for the pieces under way. No lane is kept free for urgent work: with background work in
pieces of 1 MiB an urgent transfer takes both lanes within a millisecond or so, was as fast or faster in the median and
better at the 90th percentile than with a lane of its own, and background work has both lanes while nothing else is
there. (Pieces of 4 MiB, or two at a time, made it wait three times as long; whole transfers of 64 MiB, ten times.)

One lock covers the lanes of all peers (`Connections`); what is slow (sockets, callbacks) runs without it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from moonpool.errors import TransferError
from moonpool.messenger.connections import Connections
from moonpool.messenger.lane import Lane, failure, is_cut
from moonpool.messenger.waiting import Piece, Priority, Transfer, Waiting

IDLE_SECONDS = 30.0
CLOSE_SECONDS = 5.0
WATCH_SECONDS = 1.0
"""How often somebody looks whether anything waits still, at least."""
TURN_SECONDS = 1.0
"""After this time a busy peer's only connection is given up for a peer that waits for its first."""
BREAKS = 2
"""Connections that may break under one piece before it fails."""


class Lanes:
    """Threads and connections come with the work, up to `limit`, and go when there was none for IDLE_SECONDS."""

    def __init__(
        self,
        address: str,
        key: bytes,
        limit: int,
        connections: Connections,
        on_unused: Callable[[Lanes], None],
        count: Callable[[str, int], None],
    ) -> None:
        """`on_unused` is called, with the lock held, when nothing is left here."""
        self.address = address
        self._key = key
        self._limit = limit
        self._connections = connections
        self._on_unused = on_unused
        self._count = count
        self._lock = connections.lock
        self._changed = threading.Condition(self._lock)
        self._watching = threading.Condition(self._lock)
        self._waiting = Waiting()
        self._threads: set[threading.Thread] = set()
        self._resting = 0
        """Threads that wait for work."""
        self._lanes: set[Lane] = set()
        self._idle: list[Lane] = []
        self._watched: float | None = None
        """When a thread looks next for what is late; None: there is no such thread."""
        self._retired = False
        self._closed = False

    def submit(self, transfer: Transfer[Any]) -> None:
        """It is over at `transfer.until` at the latest, give or take a system call. The lock is held.

        Raises TransferError if it is not let in.
        """
        self._admit(transfer)
        self._rouse(len(transfer.pieces))

    def close(self) -> None:
        """Running and queued transfers fail at once."""
        with self._lock:
            self._closed = True
            queued = self._waiting.transfers
            error = TransferError(f"Messenger was closed before the transfer with {self.address} was over")
            over = [transfer for transfer in queued if self._fail(transfer, error)]
            lanes, threads = list(self._lanes), list(self._threads)
            self._connections.give_up(self)
            self.wake()
            self._watching.notify_all()
        for transfer in over:
            transfer.settle()
        for lane in lanes:
            lane.shut()
        until = time.monotonic() + CLOSE_SECONDS
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))
        with self._lock:
            self._discard_idle()

    # ---- an Endpoint of Connections; the lock is held

    @property
    def is_busy(self) -> bool:
        return bool(self._waiting) or len(self._lanes) > len(self._idle)

    @property
    def waiting(self) -> Waiting:
        return self._waiting

    def close_idle(self) -> int:
        idle, self._idle = self._idle, []
        for lane in idle:
            self._lanes.discard(lane)
            lane.close()
        self._retired = True
        self.wake()
        self._end_if_unused()
        return len(idle)

    def wake(self) -> None:
        self._changed.notify_all()

    # ---- the queue; the lock is held

    def _admit(self, transfer: Transfer[Any]) -> None:
        if self._closed:
            raise TransferError(f"Messenger is closed; nothing more goes to {self.address}")
        if not self._waiting.has_room(transfer):
            self._count("refused_transfers", 1)
            held = f"{len(self._waiting)} transfers with {self._waiting.nbytes >> 20} MiB wait for {self.address}"
            raise TransferError(f"{held}: its queue is full for {transfer.priority.value} work; try again later")
        self._connections.use(self.address)
        self._retired = False
        if transfer.pieces:
            self._waiting.add(transfer)
        if self._watched is not None and transfer.until < self._watched:
            self._watching.notify()

    def _rouse(self, pieces: int) -> None:
        """So many pieces want lanes."""
        for _ in range(min(pieces - self._resting, self._limit - len(self._threads))):
            self._start(self._live)
        if pieces > 0:
            self._changed.notify(pieces)
        if self._waiting and pieces > self._resting:
            self._watch()

    def _start(self, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, name=f"messenger {self.address}", daemon=True)
        if target == self._live:
            self._threads.add(thread)
        thread.start()

    def _fail(self, transfer: Transfer[Any], error: Exception) -> bool:
        """Whether it is over with that: if not, its pieces under way are."""
        transfer.error = transfer.error or error
        self._waiting.withdraw(transfer)
        return not transfer.left

    # ---- threads

    def _live(self) -> None:
        try:
            while (lane := self._await_lane()) is not None:
                self._carry(lane, self._waiting.take)
        finally:
            with self._lock:
                self._leave()

    def _await_lane(self) -> Lane | None:
        """A lane for the pieces that wait; None: this thread is not needed any more."""
        until = time.monotonic() + IDLE_SECONDS
        with self._lock:
            while not self._closed:
                if self._waiting:
                    if (lane := self._acquire()) is not None:
                        return lane
                    self._watch()
                elif self._retired:
                    break
                now = time.monotonic()
                stale = self._drop_stale(now)
                if now >= until and not self._waiting and (stale is None or len(self._threads) > 1):
                    break
                self._resting += 1
                self._changed.wait(max(until, stale or 0.0) - now if not self._waiting else IDLE_SECONDS)
                self._resting -= 1
            # Under the lock: from now on nobody must count on this thread.
            self._leave()
            return None

    def _leave(self) -> None:
        self._threads.discard(threading.current_thread())
        self._end_if_unused()

    def _end_if_unused(self) -> None:
        if not (self._threads or self._lanes or self._waiting):
            self._on_unused(self)

    def _drop_stale(self, now: float) -> float | None:
        """Close what was idle too long; when the next one will have been. The lock is held."""
        for lane in [lane for lane in self._idle if lane.used + IDLE_SECONDS <= now]:
            self._idle.remove(lane)
            self._discard(lane)
        return min((lane.used + IDLE_SECONDS for lane in self._idle), default=None)

    def _watch(self) -> None:
        """See to it that what waits fails when its deadline passes. The lock is held."""
        if self._watched is None:
            self._watched = time.monotonic()
            self._start(self._expire)

    def _expire(self) -> None:
        """While transfers wait for a lane: fail those whose deadline passes."""
        error = TransferError(f"the transfer with {self.address} did not begin before its deadline")
        is_over = False
        while not is_over:
            with self._lock:
                now = time.monotonic()
                late = [transfer for transfer in self._waiting.transfers if transfer.until <= now]
                over = [transfer for transfer in late if self._fail(transfer, error)]
                if is_over := not self._waiting:
                    self._connections.give_up(self)
                    self._watched = None
                    self._end_if_unused()
                elif not late:
                    earliest = min(transfer.until for transfer in self._waiting.transfers)
                    self._watched = min(earliest, now + WATCH_SECONDS)
                    self._watching.wait(self._watched - now)
            for transfer in over:
                transfer.settle()

    # ---- lanes

    def _acquire(self) -> Lane | None:
        """The lock is held."""
        now = time.monotonic()
        self._drop_stale(now)
        if self._idle:
            return self._idle.pop()
        if len(self._lanes) >= self._limit or not self._connections.open(self, is_first=not self._lanes):
            return None
        lane = Lane(self.address, self._key)
        self._lanes.add(lane)
        return lane

    def _release(self, lane: Lane) -> None:
        """Nothing is under way on it."""
        with self._lock:
            lane.used = time.monotonic()
            is_spare = self._connections.is_wanted and not self._waiting
            if self._closed or not lane.is_open or is_spare or self._must_give_way(lane):
                self._discard(lane)
            else:
                self._idle.append(lane)
            self._rouse(self._waiting.pieces)

    def _must_give_way(self, lane: Lane) -> bool:
        """Another peer has no connection, and this one has others or had its turn. The lock is held."""
        is_due = len(self._lanes) > 1 or time.monotonic() >= lane.opened + TURN_SECONDS
        return self._connections.is_wanted and is_due

    def _discard(self, lane: Lane) -> None:
        """The lock is held."""
        if lane in self._lanes:
            self._lanes.discard(lane)
            lane.close()
            self._connections.close(self, is_last=not self._lanes)
            self._end_if_unused()

    def _discard_idle(self) -> None:
        """The lock is held."""
        for lane in self._idle[:]:
            self._idle.remove(lane)
            self._discard(lane)

    # ---- moving

    def _carry(self, lane: Lane, take: Callable[[], Piece | None]) -> None:
        """Move pieces over one lane until there are none, or it breaks."""
        try:
            lane.carry(lambda: self._next(lane, take), self._over)
        except BaseException as e:
            self._broken(lane, e)
            if not isinstance(e, Exception):
                raise
        else:
            self._release(lane)

    def _next(self, lane: Lane, take: Callable[[], Piece | None]) -> Piece | None:
        while True:
            with self._lock:
                if lane.underway and not self._may_go_ahead(lane):
                    return None
                piece = None if lane.is_open and self._must_give_way(lane) else take()
            if piece is None or piece.work.is_needed():
                return piece
            self._over(piece, None)

    def _may_go_ahead(self, lane: Lane) -> bool:
        """Whether it takes another piece before the last one is over. The lock is held."""
        if lane.underway[-1].transfer.priority is Priority.BACKGROUND or self._closed:
            # Else an urgent transfer would have to wait for both.
            return False
        # What a free lane could move at once is left to it.
        free = self._limit - len(self._lanes) + len(self._idle)
        return self._waiting.pieces > free

    def _over(self, piece: Piece, error: Exception | None) -> None:
        transfer = piece.transfer
        with self._lock:
            transfer.left -= 1
            transfer.error = transfer.error or error
            if transfer.error is not None:
                self._waiting.withdraw(transfer)
            elif transfer.pieces and not transfer.pieces[-1].work.is_needed():
                self._waiting.withdraw(transfer, lambda work: not work.is_needed())
            is_over = not transfer.left
        if is_over:
            transfer.settle()

    def _broken(self, lane: Lane, error: BaseException) -> None:
        """What was under way goes on over another lane, unless it is to blame, or out of tries."""
        over: list[Transfer[Any]] = []
        reason = failure(self.address, error)
        with self._lock:
            if is_cut(error):
                # The others to this peer that nothing runs on are no better.
                self._discard_idle()
            if not lane.is_open and self._lanes == {lane}:
                over += [transfer for transfer in self._waiting.transfers if self._fail(transfer, reason)]
                self._connections.give_up(self)
            for piece in reversed(lane.underway):
                piece.breaks += is_cut(error)
                self._go_on(piece, reason if self._is_lost(piece, lane, error) else None)
                if not piece.transfer.left:
                    over.append(piece.transfer)
            self._discard(lane)
            self._rouse(self._waiting.pieces)
        for transfer in over:
            transfer.settle()

    def _go_on(self, piece: Piece, reason: Exception | None) -> None:
        """After its lane was lost; `reason`: why it does not. The lock is held."""
        transfer = piece.transfer
        if transfer.error is None and reason is not None:
            self._fail(transfer, reason)
        if transfer.error is None:
            self._waiting.give_back(piece)
            self._count("resubmissions", 1)
        else:
            transfer.left -= 1

    def _is_lost(self, piece: Piece, lane: Lane, error: BaseException) -> bool:
        if not is_cut(error):
            return piece is lane.current
        return self._closed or piece.breaks >= BREAKS or time.monotonic() >= piece.transfer.until
