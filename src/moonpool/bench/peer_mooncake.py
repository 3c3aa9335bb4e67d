"""Mooncake Store as a side of `make bench-store`; runs in its own virtual environment (`bench/peer.py`).

Arguments: the master's address, bytes of the segment that this process owns (0: a purely remote client), bytes of the
walk. A process with a segment finds its own blocks there by memcpy, which is the store's default over tcp.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from mooncake.store import MooncakeDistributedStore

from moonpool.bench.walk import Buffers, Bytes, Call, serve

LOCAL_BUFFER_BYTES = 16 << 20


class MooncakeSide:
    def __init__(self, master: str, segment_bytes: int, buffers: Buffers) -> None:
        self._store = store = MooncakeDistributedStore()
        status = store.setup("127.0.0.1", "P2PHANDSHAKE", segment_bytes, LOCAL_BUFFER_BYTES, "tcp", "", master)
        _expect("setup", [status], [0])
        memory = buffers.memory
        _expect("register_buffer", [store.register_buffer(memory.ctypes.data, memory.nbytes)], [0])

    def put(self, keys: Sequence[str], pieces: Sequence[Bytes]) -> Call:
        store, names, addresses, sizes = self._store, *_arguments(keys, pieces)
        good = [0] * len(names)
        if len(names) == 1:
            return lambda: _expect("put_from", [store.put_from(names[0], addresses[0], sizes[0])], good)
        return lambda: _expect("batch_put_from", store.batch_put_from(names, addresses, sizes), good)

    def get(self, keys: Sequence[str], pieces: Sequence[Bytes]) -> Call:
        store, names, addresses, sizes = self._store, *_arguments(keys, pieces)
        if len(names) == 1:
            return lambda: _expect("get_into", [store.get_into(names[0], addresses[0], sizes[0])], sizes)
        return lambda: _expect("batch_get_into", store.batch_get_into(names, addresses, sizes), sizes)

    def view(self, keys: Sequence[str], size: int) -> Call:
        raise NotImplementedError("the store has no zero-copy view of a block")

    def exists(self, keys: Sequence[str], size: int) -> Call:
        store, names, good = self._store, list(keys), [1] * len(keys)
        if len(names) == 1:
            return lambda: _expect("is_exist", [store.is_exist(names[0])], good)
        return lambda: _expect("batch_is_exist", store.batch_is_exist(names), good)

    def remove(self, keys: Sequence[str], size: int) -> None:
        # By force: a block that was just read has a lease for some seconds.
        _expect("batch_remove", self._store.batch_remove(list(keys), True), [0] * len(keys))

    def close(self) -> None:
        self._store.close()


def _arguments(keys: Sequence[str], pieces: Sequence[Bytes]) -> tuple[list[str], list[int], list[int]]:
    return list(keys), [piece.ctypes.data for piece in pieces], [piece.nbytes for piece in pieces]


def _expect(call: str, statuses: Sequence[int], good: Sequence[int]) -> None:
    if list(statuses) != list(good):
        wrong = next(status for status, wanted in zip(statuses, good, strict=True) if status != wanted)
        raise RuntimeError(f"Mooncake's {call} answered {wrong}")


if __name__ == "__main__":
    serve(lambda buffers: MooncakeSide(sys.argv[1], int(sys.argv[2]), buffers), int(sys.argv[3]))
