"""What the machine gives at most, measured in the run that it is compared with: memory, sockets, disk.

The sockets' limit is two connections over loopback, set up as the pool's own are to a neighbour, a thread each, nothing
but `sendall` and `recv_into` in pieces of 1 MiB from one buffer into another; and the same with xxh3-64 of every block
at the receiver (as for a get, whose sums are there already) or at both ends (as for a put), taken piece by piece while
the piece is still in the cache. For calls that wait for each other: one connection, a question of some bytes, and for
an answer as much as one call moves, verified, before the next question; or as much as one call moves, summed up and
sent, and for an answer the sum that was found over there.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import xxhash

from moonpool.bench.process import running
from moonpool.bench.walk import Buffers, Bytes, pattern
from moonpool.errors import MoonpoolError
from moonpool.messenger.neighbour import Neighbour

COPY = "memory copy, one thread"
SHARED_COPY = "memory copy, two threads"
SOCKETS = "two sockets"
SOCKETS_VERIFIED = "two sockets with each block verified by xxh3-64"
SOCKETS_SUMMED = "two sockets with each block summed up by xxh3-64, and verified"
CALLS = "one socket, a question and {} verified"
CALLS_BACK = "one socket, {} summed up, sent and verified, and an answer"
"""What one call moves goes in."""
CONNECTIONS = 2
_WANTED = struct.Struct("<QQB")
"""First byte of the walk, how many, and what is to be done."""
_SEND, _SEND_SUMMED, _TAKE = range(3)
_SUM = struct.Struct("<Q")
PIECE_BYTES = 1 << 20
SOCKET_SECONDS = 30.0


def copy_seconds(buffers: Buffers) -> float:
    """One copy of all of the buffer by one thread."""
    began = time.perf_counter()
    buffers.target[:] = buffers.source
    return time.perf_counter() - began


def shared_copy_seconds(buffers: Buffers) -> float:
    """The same by two threads, each its half, in pieces of 1 MiB."""
    pairs = list(zip(_blocks(buffers.target, PIECE_BYTES), _blocks(buffers.source, PIECE_BYTES), strict=True))

    def copy(some: Sequence[tuple[Bytes, Bytes]]) -> None:
        for target, source in some:
            np.copyto(target, source)

    helper = threading.Thread(target=copy, args=(pairs[len(pairs) // 2 :],), name="limit", daemon=True)
    began = time.perf_counter()
    helper.start()
    copy(pairs[: len(pairs) // 2])
    helper.join()
    return time.perf_counter() - began


class Loopback:
    """Connections to a process that sends the walk's bytes when it is asked to. Use `loopback`."""

    def __init__(self, socks: Sequence[socket.socket], buffers: Buffers, block_bytes: int) -> None:
        self._socks = socks
        self._buffers = buffers
        self._block_bytes = block_bytes
        self._blocks = _blocks(buffers.target, block_bytes)
        self._sums = _sums(buffers.source, block_bytes)

    def seconds(self, verify: bool, sum_up: bool = False) -> float:
        """From the first question to the last byte (verified; summed up by the sender too).

        Raises MoonpoolError for wrong bytes or none.
        """
        share = -(-len(self._blocks) // len(self._socks))
        failures: list[Exception] = []

        def receive(sock: socket.socket, first: int) -> None:
            try:
                wanted = self._blocks[first : first + share]
                nbytes = sum(block.nbytes for block in wanted)
                sock.sendall(_WANTED.pack(first * self._block_bytes, nbytes, _SEND_SUMMED if sum_up else _SEND))
                for index in range(first, min(first + share, len(self._blocks))):
                    _receive(sock, self._blocks[index], self._sums[index] if verify else None)
            except Exception as error:
                failures.append(error)

        threads = [
            threading.Thread(target=receive, args=(sock, number * share), name=f"limit {number}", daemon=True)
            for number, sock in enumerate(self._socks)
        ]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SOCKET_SECONDS)
        took = time.perf_counter() - began
        if failures or any(thread.is_alive() for thread in threads):
            raise MoonpoolError(f"the raw sockets failed: {failures[0] if failures else 'no end'}")
        return took

    def call_seconds(self, call_bytes: int) -> float:
        """All of the walk over one connection, a question for every `call_bytes`; the answer is summed up as it comes.

        Raises MoonpoolError for wrong bytes.
        """
        sock, start = self._socks[0], 0
        calls = list(
            zip(_blocks(self._buffers.target, call_bytes), _sums(self._buffers.source, call_bytes), strict=True)
        )
        began = time.perf_counter()
        for target, expected in calls:
            sock.sendall(_WANTED.pack(start, target.nbytes, _SEND))
            _receive(sock, target, expected)
            start += target.nbytes
        return time.perf_counter() - began

    def call_back_seconds(self, call_bytes: int) -> float:
        """The other way: `call_bytes` after `call_bytes` go over, each answered with its sum. Raises MoonpoolError."""
        sock, start = self._socks[0], 0
        began = time.perf_counter()
        for block in _blocks(self._buffers.source, call_bytes):
            sock.sendall(_WANTED.pack(start, block.nbytes, _TAKE))
            digest = xxhash.xxh3_64()
            for piece in _blocks(block, PIECE_BYTES):
                digest.update(piece.data)
                sock.sendall(piece.data)
            if sock.recv(_SUM.size, socket.MSG_WAITALL) != _SUM.pack(digest.intdigest()):
                raise MoonpoolError("other bytes came out of the raw sockets than were sent")
            start += block.nbytes
        return time.perf_counter() - began


@contextlib.contextmanager
def loopback(buffers: Buffers, block_bytes: int, folder: Path) -> Iterator[Loopback]:
    """Connected to a sender in a process of its own, which ends with the block."""
    command = [sys.executable, "-P", "-m", "moonpool.bench.limits", str(buffers.source.nbytes)]
    log = folder / "sender.log"
    with (
        running(command, log, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process,
        contextlib.ExitStack() as stack,
    ):
        assert process.stdout is not None
        port = process.stdout.readline().strip()
        if not port:
            raise MoonpoolError(f"the sender of the raw limit did not come up\n{log.read_text()[-2000:]}")
        socks = []
        for _ in range(CONNECTIONS):
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", int(port)), SOCKET_SECONDS))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            Neighbour.of(sock)
            socks.append(sock)
        yield Loopback(socks, buffers, block_bytes)


def send_when_asked(nbytes: int) -> None:
    """The other process: each connection sends what of the walk it is asked for, or takes it, until stdin ends."""
    walk = pattern(nbytes)
    taken = np.zeros(nbytes, np.uint8)

    def serve(sock: socket.socket) -> None:
        with sock:
            neighbour = Neighbour.of(sock)
            while question := sock.recv(_WANTED.size, socket.MSG_WAITALL):
                start, wanted, order = _WANTED.unpack(question)
                digest = xxhash.xxh3_64()
                if neighbour is not None:
                    neighbour.step_aside()
                for piece in _blocks((taken if order == _TAKE else walk)[start : start + wanted], PIECE_BYTES):
                    if order == _TAKE:
                        sock.recv_into(piece.data, 0, socket.MSG_WAITALL)
                    if order != _SEND:
                        digest.update(piece.data)
                    if order != _TAKE:
                        sock.sendall(piece.data)
                if order == _TAKE:
                    sock.sendall(_SUM.pack(digest.intdigest()))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        for number in range(CONNECTIONS):
            sock, _ = listener.accept()
            threading.Thread(target=serve, args=(sock,), name=f"sender {number}", daemon=True).start()
        sys.stdin.read()


class RawFile:
    """Plain sequential reads and writes of a file, past the page cache where its filesystem can do that."""

    def __init__(self, path: Path, is_direct: bool) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_DIRECT if is_direct else 0))

    def read_seconds(self, buffer: Bytes, block_bytes: int) -> float:
        """From the file's start into the buffer, one call a block. Raises OSError."""
        return self._seconds(os.preadv, buffer, block_bytes)

    def write_seconds(self, buffer: Bytes, block_bytes: int) -> float:
        """The buffer to the file's start, one call a block. Raises OSError."""
        return self._seconds(os.pwritev, buffer, block_bytes)

    def close(self) -> None:
        os.close(self._fd)

    def _seconds(self, call: Callable[[int, Sequence[memoryview], int], int], buffer: Bytes, block_bytes: int) -> float:
        view = buffer.data
        offset = 0
        began = time.perf_counter()
        while offset < buffer.nbytes:
            moved = call(self._fd, [view[offset : offset + block_bytes]], offset)
            if moved <= 0:
                raise OSError(f"the file ends at {offset}")
            offset += moved
        return time.perf_counter() - began


def _receive(sock: socket.socket, block: Bytes, expected: int | None) -> None:
    digest = xxhash.xxh3_64()
    view = block.data
    while len(view):
        received = sock.recv_into(view[:PIECE_BYTES])
        if not received:
            raise MoonpoolError("the sender of the raw limit is gone")
        if expected is not None:
            digest.update(view[:received])
        view = view[received:]
    if expected is not None and digest.intdigest() != expected:
        raise MoonpoolError("the raw sockets gave other bytes than were sent")


def _sums(buffer: Bytes, block_bytes: int) -> list[int]:
    return [xxhash.xxh3_64_intdigest(block.data) for block in _blocks(buffer, block_bytes)]


def _blocks(buffer: Bytes, block_bytes: int) -> list[Bytes]:
    return [buffer[start : start + block_bytes] for start in range(0, buffer.nbytes, block_bytes)]


if __name__ == "__main__":
    send_when_asked(int(sys.argv[1]))
