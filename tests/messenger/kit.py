"""A data server over blocks in memory, for tests of Messenger alone."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Iterator, Sequence

import numpy as np

from moonpool.core.vocabulary import BlockKey, KeySpaceId, RequestId
from moonpool.messenger.questions import Exists, Question, Refused, Reply, marks, unpacked
from moonpool.messenger.server import TcpServer
from moonpool.messenger.transfer import Bytes, RoomWrite, checksum

SECONDS = 20.0
SPACE = KeySpaceId("aa" * 16)
R = RequestId("r-1")


def keys_of(name: str, count: int) -> list[BlockKey]:
    return [BlockKey(hashlib.sha256(f"{name}/{i}".encode()).digest()[:16]) for i in range(count)]


def bytes_of(key: bytes, nbytes: int) -> Bytes:
    return np.random.default_rng(int.from_bytes(key, "little")).integers(0, 256, nbytes, np.uint8)


def write_of(block: int, data: Bytes, runs: int) -> RoomWrite:
    middle = data.nbytes // 3
    return RoomWrite(
        R, 1, block, 0, runs, [data[:middle], data[middle:]], [checksum(r) for r in data.reshape(runs, -1)]
    )


class Place:
    """A `Landing`."""

    def __init__(self, block: Bytes, runs: int, complete: set[int], first: int) -> None:
        self.run_bytes = block.nbytes // runs
        self.slices = [block[i * self.run_bytes : (i + 1) * self.run_bytes] for i in range(runs)]
        self._complete = complete
        self._first = first

    def landed(self, position: int, checksum: int) -> None:
        self._complete.add(self._first + position)

    def close(self) -> None:
        pass


class Leaving:
    """A `Departure`."""

    def __init__(self, blocks: Sequence[Bytes], checksums: Sequence[int]) -> None:
        self.blocks = blocks
        self.checksums = checksums

    def close(self) -> None:
        pass


class MemoryStore:
    def __init__(self, block_bytes: int, runs: int, blocks: int = 16) -> None:
        self.runs = runs
        self.rooms = [np.zeros(block_bytes, np.uint8) for _ in range(blocks)]
        self.complete: list[set[int]] = [set() for _ in range(blocks)]
        self.blocks: dict[BlockKey, tuple[Bytes, list[int]]] = {}
        self.asked: list[tuple[BlockKey, ...]] = []
        """The keys of each read, in the order in which they came."""
        self.landed: list[tuple[int, int, int]] = []
        """Block, first run and runs of each write."""
        self.gate = threading.Event()
        """Nothing is answered while it is closed."""
        self.gate.set()
        self._block_bytes = block_bytes

    def put(self, keys: Sequence[BlockKey], version: str = "") -> None:
        for key in keys:
            data = bytes_of(key + version.encode(), self._block_bytes)
            self.blocks[key] = data, [checksum(run) for run in data.reshape(self.runs, -1)]

    def land(
        self, request: RequestId, attempt: int, block: int, first_run: int, runs: int, nbytes: int, until: float
    ) -> Place:
        self.gate.wait(SECONDS)
        self.landed.append((block, first_run, runs))
        size = nbytes // runs
        return Place(
            self.rooms[block][first_run * size : (first_run + runs) * size], runs, self.complete[block], first_run
        )

    def depart(self, space: KeySpaceId, keys: Sequence[BlockKey]) -> Leaving:
        self.asked.append(tuple(keys))
        self.gate.wait(SECONDS)
        found = []
        for key in keys:
            if key not in self.blocks:
                break
            found.append(self.blocks[key])
        return Leaving([data for data, _ in found], [value for _, sums in found for value in sums])

    def answer(self, question: Question) -> Reply:
        if not isinstance(question, Exists):
            return Refused("no such question here")
        return marks(key in self.blocks for key in unpacked(question.keys))


@contextlib.contextmanager
def serving(store: MemoryStore) -> Iterator[TcpServer]:
    server = TcpServer("127.0.0.1", 0, None, store)
    try:
        yield server
    finally:
        store.gate.set()
        server.close()
