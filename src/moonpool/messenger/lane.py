"""One connection to a peer, and the pieces under way on it."""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Callable

from moonpool.errors import TransferError
from moonpool.messenger.channel import Channel, greet
from moonpool.messenger.waiting import Piece, RefusedError, Way

CONNECT_SECONDS = 5.0
AHEAD = 2
"""Pieces under way on one lane: the next is asked for before the last is there, so that no round trip is waited for."""


class Lane:
    """Used by one thread at a time; `shut` by any."""

    def __init__(self, address: str, key: bytes) -> None:
        self.opened = self.used = time.monotonic()
        self.is_open = False
        """The peer has let us in."""
        self.underway: deque[Piece] = deque()
        self.current: Piece | None = None
        """What it is or was busy with: to blame for whatever goes wrong but the connection's end."""
        self._address = address
        self._key = key
        self._channel: Channel | None = None
        self._is_shut = False

    def carry(self, take: Callable[[], Piece | None], over: Callable[[Piece, Exception | None], None]) -> None:
        """Move pieces until `take` has none; it is asked for more while some are under way.

        Opens the connection if need be. Raises whatever went wrong; then the lane is lost, and `underway` is not done.
        """
        underway = self.underway
        while (piece := take() if len(underway) < AHEAD else None) is not None or underway:
            if piece is None:
                self._receive(over)
                continue
            underway.append(piece)
            while len(underway) > 1 and not _may_follow(underway[-2], piece):
                self._receive(over)
            self.current = piece
            piece.work.send(self._channel or self._connect(piece.transfer.until))

    def shut(self) -> None:
        """Whoever moves something gets an error at once."""
        self._is_shut = True
        if self._channel is not None:
            self._channel.shut()

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()

    def _receive(self, over: Callable[[Piece, Exception | None], None]) -> None:
        assert self._channel is not None
        piece = self.current = self.underway[0]
        error: Exception | None = None
        try:
            piece.work.receive(self._channel)
        except RefusedError as e:
            error = e
        self.underway.popleft()
        over(piece, error)

    def _connect(self, until: float) -> Channel:
        seconds = min(CONNECT_SECONDS, until - time.monotonic())
        if seconds <= 0:
            raise TimeoutError
        host, _, port = self._address.rpartition(":")
        try:
            sock = socket.create_connection((host.strip("[]"), int(port)), seconds)
        except (ValueError, OverflowError):
            raise TransferError(f"{self._address!r} is no data address, which is host:port") from None
        except TimeoutError:
            if time.monotonic() >= until:
                raise
            raise ConnectionError(f"no answer within {CONNECT_SECONDS:g} s") from None
        self._channel = Channel(sock)
        if self._is_shut:
            self._channel.shut()
        greet(self._channel, self._key, until)
        self.is_open = True
        return self._channel


def is_cut(error: BaseException) -> bool:
    """Whether the connection ended, rather than the time or the peer's good sense."""
    # The kernel gives up on a peer that is silent with an error of its own; a passed deadline has no number.
    is_late = isinstance(error, TimeoutError) and error.errno is None
    return isinstance(error, OSError | EOFError) and not is_late


def failure(address: str, error: BaseException) -> Exception:
    """What a transfer fails with."""
    if is_cut(error):
        return TransferError(f"the connection to {address} broke: {str(error) or 'closed by the peer'}")
    if isinstance(error, TimeoutError):
        return TransferError(f"the transfer with {address} was not over by its deadline")
    if not isinstance(error, Exception):
        return TransferError(f"the transfer with {address} was interrupted")
    return error


def _may_follow(first: Piece, second: Piece) -> bool:
    """Whether the second may be sent before the first is answered.

    Not a write behind a read: both sides would wait for the other to take what it sends.
    """
    return first.work.way is second.work.way is not Way.CALL
