"""Transfers to one peer that wait for a lane, and which piece goes next. No threads and no clock in here."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, Protocol, TypeVar

from moonpool.errors import TransferError
from moonpool.messenger.channel import Channel

T = TypeVar("T")

QUEUE_BYTES = 256 << 20
"""A queue that holds more takes no background transfer, unless it is empty."""
QUEUE_TRANSFERS = 1024
URGENT_TRANSFERS = 16 * QUEUE_TRANSFERS
"""Their buffers exist anyway (pages, the arena): what an urgent one costs while it waits is its entry."""
URGENT_IN_A_ROW = 7
"""Pieces, while background work waits: it gets one of eight at least."""


class RefusedError(TransferError):
    """The peer answered no; the connection is still good."""


class Priority(Enum):
    URGENT = "urgent"
    """A running request waits for it."""
    BACKGROUND = "background"
    """Replication and the like: goes in small pieces, between which urgent work takes the lane."""


class Way(Enum):
    OUT = "out"
    """The payload goes with the request."""
    IN = "in"
    """The payload comes with the answer."""
    CALL = "call"
    """Whatever: nothing else may be under way on its connection."""


class Work(Protocol):
    """What one frame and its payload move, over whichever connection it gets."""

    @property
    def nbytes(self) -> int: ...

    @property
    def way(self) -> Way: ...

    def send(self, channel: Channel) -> None: ...

    def receive(self, channel: Channel) -> None:
        """Raises RefusedError if the peer says no and the connection is still good."""
        ...

    def rest(self) -> Sequence[Work]:
        """What is still to be done after the connection broke under it."""
        ...

    def is_needed(self) -> bool:
        """False once another piece has shown that nothing depends on this one, or nobody wants it any more."""
        ...


class Transfer(Generic[T]):
    """One call of Messenger. Over when all its pieces are: then nothing reads or writes its buffers any more."""

    def __init__(self, works: Sequence[Work], until: float, priority: Priority, result: Callable[[], T]) -> None:
        self.until = until
        self.priority = priority
        self.pieces = deque(Piece(self, work) for work in works)
        """Those that no lane has."""
        self.left = len(works)
        """Pieces that are not over."""
        self.nbytes = sum(work.nbytes for work in works)
        self.error: Exception | None = None
        self.future: Future[T] = Future()
        self._result = result
        # Never cancelled from outside: only its end says that the buffers are free.
        self.future.set_running_or_notify_cancel()

    def settle(self) -> None:
        """Once, when no piece is left, and with no lock held: callbacks run in here."""
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self._result())


@dataclass(slots=True, eq=False)
class Piece:
    transfer: Transfer[Any]
    work: Work
    breaks: int = 0
    """Connections that broke under it."""


class Waiting:
    """Urgent transfers before background ones, each kind first come first served."""

    def __init__(self) -> None:
        self._queues: dict[Priority, OrderedDict[Transfer[Any], None]] = {p: OrderedDict() for p in Priority}
        self._in_a_row = 0
        self.nbytes = 0
        self.pieces = 0

    @property
    def transfers(self) -> list[Transfer[Any]]:
        return [transfer for queue in self._queues.values() for transfer in queue]

    def __len__(self) -> int:
        """Transfers."""
        return sum(map(len, self._queues.values()))

    def __bool__(self) -> bool:
        return self.pieces > 0

    def has_room(self, transfer: Transfer[Any]) -> bool:
        if transfer.priority is Priority.URGENT:
            return len(self) < URGENT_TRANSFERS
        fits = self.nbytes + transfer.nbytes <= QUEUE_BYTES or not self.nbytes
        return fits and len(self) < QUEUE_TRANSFERS

    def add(self, transfer: Transfer[Any]) -> None:
        self._queues[transfer.priority][transfer] = None
        self.pieces += len(transfer.pieces)
        self.nbytes += sum(piece.work.nbytes for piece in transfer.pieces)

    def give_back(self, piece: Piece) -> None:
        """What is left of a piece that a lane had, before all others of its kind."""
        transfer = piece.transfer
        rest = [Piece(transfer, work, piece.breaks) for work in piece.work.rest()]
        transfer.left += len(rest) - 1
        if not rest:
            return
        transfer.pieces.extendleft(reversed(rest))
        queue = self._queues[transfer.priority]
        queue[transfer] = None
        queue.move_to_end(transfer, last=False)
        self.pieces += len(rest)
        self.nbytes += sum(piece.work.nbytes for piece in rest)

    def take(self) -> Piece | None:
        urgent, background = self._queues[Priority.URGENT], self._queues[Priority.BACKGROUND]
        if urgent and (not background or self._in_a_row < URGENT_IN_A_ROW):
            self._in_a_row = self._in_a_row + 1 if background else 0
            return self._take_of(next(iter(urgent)))
        self._in_a_row = 0
        return self._take_of(next(iter(background))) if background else None

    def _take_of(self, transfer: Transfer[Any]) -> Piece:
        piece = transfer.pieces.popleft()
        self.pieces -= 1
        self.nbytes -= piece.work.nbytes
        if not transfer.pieces:
            del self._queues[transfer.priority][transfer]
        return piece

    def withdraw(self, transfer: Transfer[Any], may_go: Callable[[Work], bool] = lambda work: True) -> None:
        """Its pieces that no lane has are over, as far as they may go."""
        gone = [piece for piece in transfer.pieces if may_go(piece.work)]
        if not gone:
            return
        self.pieces -= len(gone)
        self.nbytes -= sum(piece.work.nbytes for piece in gone)
        transfer.left -= len(gone)
        transfer.pieces = deque(piece for piece in transfer.pieces if not may_go(piece.work))
        if not transfer.pieces:
            del self._queues[transfer.priority][transfer]
