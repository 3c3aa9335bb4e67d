"""A few connections to one peer, and the threads that move pieces of transfers over them.

A transfer's pieces are taken one by one by whichever lane is free, so that a large one is striped over all of them and
an urgent one waits at most for the pieces under way. One lock covers the lanes of all peers (`Connections`); what is
slow (sockets, callbacks) runs without it.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moonpool.errors import PoolError, TransferError
from moonpool.messenger.channel import Channel, greet
from moonpool.messenger.connections import Connections
from moonpool.messenger.waiting import Piece, RefusedError, Transfer, Waiting, Way

CONNECT_SECONDS = 5.0
IDLE_SECONDS = 30.0
CLOSE_SECONDS = 5.0
WATCH_SECONDS = 1.0
"""How often somebody looks whether anything waits still, at least."""
TURN_SECONDS = 1.0
"""After this time a busy peer's only connection is given up for a peer that waits for its first."""
AHEAD = 2
"""Pieces under way on one lane: the next is asked for before the last is there, so that no round trip is waited for."""
BREAKS = 2
"""Connections that may break under one piece before it fails."""


@dataclass(slots=True, eq=False)
class _Lane:
    opened: float
    used: float
    channel: Channel | None = None
    """None until the first piece comes."""
    is_open: bool = False
    """The peer has let us in."""


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
        self._lanes: set[_Lane] = set()
        self._idle: list[_Lane] = []
        self._is_watched = False
        self._retired = False
        self._closed = False

    def submit(self, transfer: Transfer[Any]) -> None:
        """It is over at `transfer.until` at the latest, give or take a system call. The lock is held.

        Raises TransferError if it is not let in.
        """
        self._admit(transfer)
        self._rouse(len(transfer.pieces))

    def begin(self, transfer: Transfer[Any]) -> _Lane | None:
        """`submit`, and a lane, if one is free, for `run`: no thread has to wake for what the caller moves itself."""
        is_first = not self._waiting
        self._admit(transfer)
        lane = self._acquire() if is_first and transfer.pieces else None
        self._rouse(len(transfer.pieces) - (lane is not None))
        return lane

    def run(self, transfer: Transfer[Any], lane: _Lane | None) -> None:
        """Move pieces of it on the caller's thread. Without the lock."""
        while lane is not None:
            self._carry(lane, lambda: self._waiting.take_of(transfer))
            with self._lock:
                lane = self._acquire() if transfer.pieces else None

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
        for transfer in over:
            transfer.settle()
        for lane in lanes:
            if lane.channel is not None:
                lane.channel.shut()
        until = time.monotonic() + CLOSE_SECONDS
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))
        with self._lock:
            for lane in self._idle[:]:
                self._idle.remove(lane)
                self._discard(lane)

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
            if lane.channel is not None:
                lane.channel.close()
        self._retired = not self.is_busy
        self.wake()
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

    def _await_lane(self) -> _Lane | None:
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
        if not self._is_watched:
            self._is_watched = True
            self._start(self._expire)
        elif self._waiting:
            self._watching.notify()

    def _expire(self) -> None:
        """While transfers wait for a lane: fail those whose deadline passes."""
        error = TransferError(f"the transfer with {self.address} did not begin before its deadline")
        while True:
            with self._lock:
                now = time.monotonic()
                late = [transfer for transfer in self._waiting.transfers if transfer.until <= now]
                over = [transfer for transfer in late if self._fail(transfer, error)]
                if not self._waiting:
                    self._connections.give_up(self)
                    self._is_watched = False
                    self._end_if_unused()
                elif not late:
                    earliest = min(transfer.until for transfer in self._waiting.transfers)
                    self._watching.wait(min(earliest - now, WATCH_SECONDS))
                is_over = not self._is_watched
            for transfer in over:
                transfer.settle()
            if is_over:
                return

    # ---- lanes

    def _acquire(self) -> _Lane | None:
        """The lock is held."""
        now = time.monotonic()
        self._drop_stale(now)
        if self._idle:
            return self._idle.pop()
        if len(self._lanes) >= self._limit or not self._connections.open(self, is_first=not self._lanes):
            return None
        lane = _Lane(now, now)
        self._lanes.add(lane)
        return lane

    def _release(self, lane: _Lane) -> None:
        """Nothing is under way on it."""
        with self._lock:
            lane.used = time.monotonic()
            is_spare = self._connections.is_wanted and not self._waiting
            if self._closed or lane.channel is None or is_spare or self._must_give_way(lane):
                self._discard(lane)
            else:
                self._idle.append(lane)
                if not self._threads:
                    # Somebody has to close it one day.
                    self._start(self._live)
            self._rouse(self._waiting.pieces)

    def _must_give_way(self, lane: _Lane) -> bool:
        """Another peer has no connection, and this one has others or had its turn. The lock is held."""
        is_due = len(self._lanes) > 1 or time.monotonic() >= lane.opened + TURN_SECONDS
        return self._connections.is_wanted and is_due

    def _discard(self, lane: _Lane) -> None:
        """The lock is held."""
        if lane in self._lanes:
            self._lanes.discard(lane)
            if lane.channel is not None:
                lane.channel.close()
            self._connections.close(self, is_last=not self._lanes)
            self._end_if_unused()

    # ---- moving

    def _carry(self, lane: _Lane, take: Callable[[], Piece | None]) -> None:
        """Move pieces over one lane until there are none, or it breaks."""
        underway: deque[Piece] = deque()
        current: Piece | None = None
        try:
            while (piece := self._next(lane, underway, take)) is not None or underway:
                if piece is None:
                    current = underway[0]
                    self._receive(lane.channel, underway)
                    continue
                underway.append(piece)
                while len(underway) > 1 and not _may_follow(underway[-2], piece):
                    current = underway[0]
                    self._receive(lane.channel, underway)
                current = piece
                piece.work.send(lane.channel or self._connect(lane, piece.transfer.until))
        except BaseException as e:
            self._broken(lane, underway, current, e)
            if not isinstance(e, Exception):
                raise
        else:
            self._release(lane)

    def _next(self, lane: _Lane, underway: deque[Piece], take: Callable[[], Piece | None]) -> Piece | None:
        if len(underway) >= AHEAD:
            return None
        with self._lock:
            if underway:
                # What a free lane could move at once is left to it.
                free = self._limit - len(self._lanes) + len(self._idle)
                if self._waiting.pieces <= free or self._closed:
                    return None
            if self._must_give_way(lane) and lane.channel is not None:
                return None
            return take()

    def _receive(self, channel: Channel | None, underway: deque[Piece]) -> None:
        """The answer to the first piece under way."""
        assert channel is not None
        piece = underway[0]
        error: Exception | None = None
        try:
            piece.work.receive(channel)
        except (RefusedError, PoolError) as e:
            error = e
        underway.popleft()
        self._over(piece, error)

    def _over(self, piece: Piece, error: Exception | None = None) -> None:
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

    def _connect(self, lane: _Lane, until: float) -> Channel:
        seconds = min(CONNECT_SECONDS, until - time.monotonic())
        if seconds <= 0:
            raise TimeoutError
        host, _, port = self.address.rpartition(":")
        try:
            sock = socket.create_connection((host.strip("[]"), int(port)), seconds)
        except TimeoutError:
            if time.monotonic() >= until:
                raise
            raise ConnectionError(f"no answer within {CONNECT_SECONDS:g} s") from None
        channel = Channel(sock)
        with self._lock:
            lane.channel = channel
            if self._closed:
                channel.shut()
        greet(channel, self._key, until)
        lane.is_open = True
        return channel

    def _broken(self, lane: _Lane, underway: deque[Piece], culprit: Piece | None, error: BaseException) -> None:
        """The lane is lost. What was under way goes on over another one, unless it is to blame, or out of tries."""
        over: list[Transfer[Any]] = []
        is_cut = isinstance(error, OSError | EOFError) and not isinstance(error, TimeoutError)
        failure = self._failure(error, is_cut)
        with self._lock:
            self._discard(lane)
            if is_cut:
                # The others to this peer that nothing runs on are no better.
                for other in self._idle[:]:
                    self._idle.remove(other)
                    self._discard(other)
            if not lane.is_open and not self._lanes:
                over += [transfer for transfer in self._waiting.transfers if self._fail(transfer, failure)]
                self._connections.give_up(self)
            for piece in reversed(underway):
                transfer = piece.transfer
                piece.breaks += is_cut
                if transfer.error is None and (self._is_lost(piece) if is_cut else piece is culprit):
                    self._fail(transfer, failure)
                if transfer.error is None:
                    self._waiting.give_back(piece)
                    self._count("resubmissions", is_cut)
                else:
                    transfer.left -= 1
                if not transfer.left:
                    over.append(transfer)
            self._rouse(self._waiting.pieces)
        for transfer in over:
            transfer.settle()

    def _failure(self, error: BaseException, is_cut: bool) -> Exception:
        if is_cut:
            return TransferError(f"the connection to {self.address} broke: {error or 'closed by the peer'}")
        if isinstance(error, TimeoutError):
            return TransferError(f"the transfer with {self.address} was not over by its deadline")
        if not isinstance(error, Exception):
            return TransferError(f"the transfer with {self.address} was interrupted")
        return error

    def _is_lost(self, piece: Piece) -> bool:
        return self._closed or piece.breaks >= BREAKS or time.monotonic() >= piece.transfer.until


def _may_follow(first: Piece, second: Piece) -> bool:
    """Whether the second may be sent before the first is answered.

    Not a write behind a read: both sides would wait for the other to take what it sends.
    """
    return first.work.way is second.work.way is not Way.CALL
