"""What the machine gives at most, measured in the run that it is compared with: memory, sockets, disk.

The sockets' limit is two connections over loopback, a thread each, nothing but `sendall` and `recv_into` in pieces of
1 MiB from one buffer into another; and the same with xxh3-64 of every block at the receiver, taken piece by piece while
the piece is still in the cache.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import xxhash

from moonpool.bench.process import running
from moonpool.bench.walk import Buffers, Bytes, pattern
from moonpool.errors import MoonpoolError

COPY = "memory copy, one thread"
SOCKETS = "two sockets"
SOCKETS_VERIFIED = "two sockets with each block verified by xxh3-64"
CONNECTIONS = 2
PIECE_BYTES = 1 << 20
SOCKET_SECONDS = 30.0


def copy_seconds(buffers: Buffers) -> float:
    """One copy of all of the buffer by one thread."""
    began = time.perf_counter()
    buffers.target[:] = buffers.source
    return time.perf_counter() - began


class Loopback:
    """Connections to a process that sends the walk's bytes when it is asked to. Use `loopback`."""

    def __init__(self, socks: Sequence[socket.socket], buffers: Buffers, block_bytes: int) -> None:
        self._socks = socks
        self._blocks = _blocks(buffers.target, block_bytes)
        self._sums = [xxhash.xxh3_64_intdigest(block.data) for block in _blocks(buffers.source, block_bytes)]

    def seconds(self, verify: bool) -> float:
        """From the first question to the last byte (verified). Raises MoonpoolError for wrong bytes or none."""
        share = -(-len(self._blocks) // len(self._socks))
        failures: list[Exception] = []

        def receive(sock: socket.socket, first: int) -> None:
            try:
                sock.sendall(b"?")
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


@contextlib.contextmanager
def loopback(buffers: Buffers, block_bytes: int, folder: Path) -> Iterator[Loopback]:
    """Connected to a sender in a process of its own, which ends with the block."""
    command = [sys.executable, "-P", "-m", "moonpool.bench.limits", str(buffers.source.nbytes), str(block_bytes)]
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
            socks.append(sock)
        yield Loopback(socks, buffers, block_bytes)


def send_when_asked(nbytes: int, block_bytes: int) -> None:
    """The other process: each connection sends its share of the walk for every byte that it gets, until stdin ends."""
    blocks = _blocks(pattern(nbytes), block_bytes)
    share = -(-len(blocks) // CONNECTIONS)

    def send(sock: socket.socket, first: int) -> None:
        with sock:
            while sock.recv(1):
                for block in blocks[first : first + share]:
                    for start in range(0, block.nbytes, PIECE_BYTES):
                        sock.sendall(block.data[start : start + PIECE_BYTES])

    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        for number in range(CONNECTIONS):
            sock, _ = listener.accept()
            threading.Thread(target=send, args=(sock, number * share), name=f"sender {number}", daemon=True).start()
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


def _blocks(buffer: Bytes, block_bytes: int) -> list[Bytes]:
    return [buffer[start : start + block_bytes] for start in range(0, buffer.nbytes, block_bytes)]


if __name__ == "__main__":
    send_when_asked(int(sys.argv[1]), int(sys.argv[2]))
