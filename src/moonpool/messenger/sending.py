"""Runs on their way into rooms of another node."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from moonpool.errors import TransferError
from moonpool.messenger.channel import Arriving, Channel, Done, Write
from moonpool.messenger.pace import moving
from moonpool.messenger.transfer import Bytes, RoomWrite
from moonpool.messenger.waiting import RefusedError, Way

ANSWER_STALLS = 2
"""The node may be receiving these runs over another connection still: that has to stand still first."""


class Sending:
    """One `Write` frame with its payload, and the answer. A `waiting.Work`."""

    way = Way.OUT

    def __init__(
        self,
        writes: Sequence[RoomWrite],
        until: float,
        count: Callable[[str, int], None],
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        self.nbytes = sum(item.nbytes for item in writes)
        self._writes = writes
        self._until = until
        self._count = count
        self._is_wanted = is_wanted

    def send(self, channel: Channel) -> None:
        items = tuple(
            Arriving(w.request, w.attempt, w.block, w.first_run, w.runs, w.nbytes, tuple(w.checksums))
            for w in self._writes
        )
        channel.send_header(Write(items, self._until - time.monotonic()), self._until, more=True)
        channel.send_all([buffer for item in self._writes for buffer in item.buffers], self._until)
        self._count("bytes_sent", self.nbytes)

    def receive(self, channel: Channel) -> None:
        with moving(self.nbytes, self._until, ANSWER_STALLS) as limit:
            if not channel.await_frame(limit, self._is_wanted):
                raise TransferError("nobody wants what is written any more")
            answer = channel.receive_header(limit)
        if not isinstance(answer, Done):
            raise TransferError(f"{type(answer).__name__} came where Done was expected")
        if answer.failure:
            raise RefusedError(answer.failure)

    def rest(self) -> Sequence[Sending]:
        # What the node has of it already it will throw away.
        return (self,) if self._is_wanted() else ()

    def is_needed(self) -> bool:
        return self._is_wanted()


def pieces_to_send(
    writes: Sequence[RoomWrite],
    most: int,
    until: float,
    count: Callable[[str, int], None],
    is_wanted: Callable[[], bool] = lambda: True,
) -> list[Sending]:
    """Pieces of about `most` bytes, cut between runs."""
    pieces: list[list[RoomWrite]] = [[]]
    filled = 0
    for write in writes:
        run_bytes = write.nbytes // write.runs
        first = 0
        while first < write.runs:
            if pieces[-1] and filled + run_bytes // 2 > most:
                pieces.append([])
                filled = 0
            fitting = max(1, (most - filled + run_bytes // 2) // max(1, run_bytes))
            runs = min(fitting, write.runs - first)
            pieces[-1].append(write if runs == write.runs else _cut(write, first, runs, run_bytes))
            filled += runs * run_bytes
            first += runs
    return [Sending(piece, until, count, is_wanted) for piece in pieces if piece]


def _cut(write: RoomWrite, first: int, runs: int, run_bytes: int) -> RoomWrite:
    start, end = first * run_bytes, (first + runs) * run_bytes
    buffers: list[Bytes] = []
    passed = 0
    for buffer in write.buffers:
        part = buffer[max(0, start - passed) : max(0, end - passed)]
        if part.nbytes:
            buffers.append(part)
        passed += buffer.nbytes
    checksums = write.checksums[first : first + runs]
    return RoomWrite(write.request, write.attempt, write.block, write.first_run + first, runs, buffers, checksums)
