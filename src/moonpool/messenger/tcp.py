"""Messenger's connecting side over tcp: write into rooms of other nodes, read blocks from them.

The transport on one host is the arena itself (`store.client`): a write there is a copy into a view. The two have no
interface in common beyond the bytes they move, so there is no transport Protocol; one contract suite tests both.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

from moonpool.core.vocabulary import BlockKey, KeySpaceId
from moonpool.errors import TransferError
from moonpool.messenger.channel import Arriving, Blocks, Channel, Done, Read, Write
from moonpool.messenger.lanes import Lanes, RefusedError
from moonpool.messenger.transfer import Bytes, RoomWrite, checksum
from moonpool.wire.security import data_key

T = TypeVar("T")
R = TypeVar("R")

SPLIT_BYTES = 4 << 20
"""Transfers of at least this size use all connections to the peer."""
LONGEST_SECONDS = 3600.0


class TcpMessenger:
    """Moves bytes to and from other nodes on threads of its own; one per process.

    Every transfer is over, one way or the other, when its future is: from then on nothing reads or writes its buffers.
    Futures fail with TransferError.
    """

    def __init__(self, token: str | None, connections_per_peer: int = 2) -> None:
        self._key = data_key(token)
        self._limit = connections_per_peer
        self._lock = threading.Lock()
        self._peers: dict[str, Lanes] = {}
        self._counts: Counter[str] = Counter()
        self._closed = False

    def write(self, address: str, writes: Sequence[RoomWrite], time_left: float) -> Future[None]:
        """Put runs into rooms of the node at `address` (`host:port`); done when the node has verified all of them."""
        until = _until(time_left)
        for item in writes:
            if len(item.checksums) != item.runs:
                raise ValueError(f"{item.runs} runs with {len(item.checksums)} checksums")
        parts = self._split(writes, [item.nbytes for item in writes])
        futures = [self._submit(address, _Sending(part, until, self._count), until) for part in parts]
        return _when_all(futures, lambda results: None)

    def read(
        self,
        address: str,
        space: KeySpaceId,
        keys: Sequence[BlockKey],
        destinations: Sequence[Bytes],
        time_left: float,
        on_block: Callable[[int, Sequence[int]], None] | None = None,
    ) -> Future[int]:
        """Get blocks from the node at `address`: the number of leading keys that were read whole and verified.

        `on_block(index, checksums of its runs)` is called on a Messenger thread for each block that is complete;
        blocks of a transfer that fails later have been read all the same.
        """
        if len(keys) != len(destinations):
            raise ValueError(f"{len(keys)} keys with {len(destinations)} destinations")
        until = _until(time_left)
        parts = self._split(range(len(keys)), [destination.nbytes for destination in destinations])
        futures = []
        for part in parts:
            chosen = slice(part[0], part[-1] + 1)
            work = _Receiving(space, tuple(keys[chosen]), destinations[chosen], part[0], until, on_block, self._count)
            futures.append(self._submit(address, work, until))
        return _when_all(futures, lambda counts: _leading(counts, [len(part) for part in parts]))

    def counters(self) -> dict[str, float]:
        """Since the start: bytes_sent, bytes_received, transfers, failures, checksum_failures."""
        with self._lock:
            names = ("bytes_sent", "bytes_received", "transfers", "failures", "checksum_failures")
            return {name: float(self._counts[name]) for name in names}

    def close(self) -> None:
        """Running and queued transfers fail at once; no thread and no connection is left."""
        with self._lock:
            self._closed = True
            peers = list(self._peers.values())
        for lanes in peers:
            lanes.close()

    def _submit(self, address: str, work: Callable[[Channel], T], until: float) -> Future[T]:
        with self._lock:
            lanes = self._peers.get(address)
            if lanes is None:
                lanes = self._peers[address] = Lanes(address, self._key, self._limit)
                if self._closed:
                    lanes.close()
            self._counts["transfers"] += 1
        future = lanes.submit(work, until)
        future.add_done_callback(self._note)
        return future

    def _note(self, future: Future[T]) -> None:
        if future.cancelled() or future.exception() is not None:
            self._count("failures", 1)

    def _count(self, name: str, amount: int) -> None:
        with self._lock:
            self._counts[name] += amount

    def _split(self, items: Sequence[T], sizes: Sequence[int]) -> list[Sequence[T]]:
        """Consecutive parts of about equal size, one per connection, where the whole is large enough to gain by it."""
        total = sum(sizes)
        wanted = self._limit if total >= SPLIT_BYTES else 1
        parts: list[list[T]] = [[]]
        filled = 0
        for item, size in zip(items, sizes, strict=True):
            if parts[-1] and filled >= total * len(parts) / wanted:
                parts.append([])
            parts[-1].append(item)
            filled += size
        return [part for part in parts if part]


class _Sending:
    """One `Write` frame with its payload, and the answer."""

    def __init__(self, writes: Sequence[RoomWrite], until: float, count: Callable[[str, int], None]) -> None:
        self._writes = writes
        self._until = until
        self._count = count

    def __call__(self, channel: Channel) -> None:
        items = tuple(
            Arriving(w.request, w.attempt, w.block, w.first_run, w.runs, w.nbytes, tuple(w.checksums))
            for w in self._writes
        )
        channel.send_header(Write(items, self._until - time.monotonic()), self._until, more=True)
        buffers = [buffer for item in self._writes for buffer in item.buffers]
        for position, buffer in enumerate(buffers):
            channel.send(buffer, self._until, more=position + 1 < len(buffers))
        self._count("bytes_sent", sum(item.nbytes for item in items))
        answer = channel.receive_header(self._until)
        if not isinstance(answer, Done):
            raise TransferError(f"{type(answer).__name__} came where Done was expected")
        if answer.failure:
            raise RefusedError(answer.failure)


class _Receiving:
    """One `Read` frame, and the blocks of the answer."""

    def __init__(
        self,
        space: KeySpaceId,
        keys: tuple[BlockKey, ...],
        destinations: Sequence[Bytes],
        first: int,
        until: float,
        on_block: Callable[[int, Sequence[int]], None] | None,
        count: Callable[[str, int], None],
    ) -> None:
        self._space = space
        self._keys = keys
        self._destinations = destinations
        self._first = first
        self._until = until
        self._on_block = on_block
        self._count = count
        self._read = 0
        """Blocks complete already, when a broken connection is followed by a second try."""

    def __call__(self, channel: Channel) -> int:
        keys = self._keys[self._read :]
        channel.send_header(Read(self._space, keys, self._until - time.monotonic()), self._until)
        answer = channel.receive_header(self._until)
        if not isinstance(answer, Blocks):
            raise TransferError(f"{type(answer).__name__} came where Blocks was expected")
        runs = self._runs_a_block(answer, len(keys))
        for position in range(answer.count):
            destination = self._destinations[self._read]
            if destination.nbytes != answer.block_bytes:
                raise TransferError(
                    f"the peer's blocks of key space {self._space} have {answer.block_bytes} bytes, "
                    f"the room here {destination.nbytes}"
                )
            self._receive(channel, destination, answer.checksums[position * runs : (position + 1) * runs])
        return self._read

    def _runs_a_block(self, answer: Blocks, wanted: int) -> int:
        runs, rest = divmod(len(answer.checksums), answer.count) if answer.count else (0, 0)
        if answer.count > wanted or rest or (answer.count and (not runs or answer.block_bytes % runs)):
            raise TransferError(
                f"{answer.count} blocks of {answer.block_bytes} bytes with {len(answer.checksums)} checksums "
                f"came for {wanted} keys"
            )
        return runs

    def _receive(self, channel: Channel, destination: Bytes, checksums: tuple[int, ...]) -> None:
        run_bytes = destination.nbytes // len(checksums)
        for run, expected in enumerate(checksums):
            piece = destination[run * run_bytes : (run + 1) * run_bytes]
            channel.receive_into(piece, self._until)
            self._count("bytes_received", run_bytes)
            if checksum(piece) != expected:
                self._count("checksum_failures", 1)
                raise TransferError(f"run {run} of a block of key space {self._space} arrived with a wrong checksum")
        if self._on_block is not None:
            self._on_block(self._first + self._read, checksums)
        self._read += 1


def _until(time_left: float) -> float:
    return time.monotonic() + min(time_left, LONGEST_SECONDS)


def _leading(counts: Sequence[int], wanted: Sequence[int]) -> int:
    total = 0
    for count, most in zip(counts, wanted, strict=True):
        total += count
        if count < most:
            break
    return total


def _when_all(futures: Sequence[Future[T]], combine: Callable[[Sequence[T]], R]) -> Future[R]:
    """Resolves when every part is over, so that no part still moves bytes then; the first part's error wins."""
    whole: Future[R] = Future()
    whole.set_running_or_notify_cancel()
    lock = threading.Lock()
    waiting = len(futures)

    def over(_: Future[T]) -> None:
        nonlocal waiting
        with lock:
            waiting -= 1
            if waiting:
                return
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            whole.set_exception(errors[0])
        else:
            whole.set_result(combine([future.result() for future in futures]))

    for future in futures:
        future.add_done_callback(over)
    if not futures:
        whole.set_result(combine([]))
    return whole
