"""Moonpool's pool as a side of `make bench-store`, through `moonpool.store.client`.

Arguments: the node's Unix socket, bytes of the walk.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence

from moonpool.bench.walk import Bytes, Call, serve
from moonpool.core.vocabulary import BlockKey, KeySpace, KeySpaceId
from moonpool.messenger.transfer import checksum
from moonpool.store.client import NodeClient

SECONDS = 30.0


class PoolSide:
    def __init__(self, where: str) -> None:
        self._client = NodeClient.connect(where, name="bench", incarnation="1")

    def put(self, keys: Sequence[str], pieces: Sequence[Bytes]) -> Call:
        space, client, names = _space(pieces[0].nbytes), self._client, _keys(keys)

        def call() -> None:
            with client.open_room(space, names).result(SECONDS) as room:
                for index, piece in enumerate(pieces):
                    view = room.view(index)
                    assert view is not None
                    view[:] = piece
                    sums = [checksum(run) for run in piece.reshape(space.runs, -1)]
                    client.complete(room, [(index, 0, space.runs)], sums)

        return call

    def get(self, keys: Sequence[str], pieces: Sequence[Bytes]) -> Call:
        space, client, names = _space(pieces[0].nbytes), self._client, _keys(keys)

        def call() -> None:
            with client.lease(space, names).result(SECONDS) as lease:
                for view, piece in zip(lease.views, pieces, strict=True):
                    piece[:] = view

        return call

    def view(self, keys: Sequence[str], size: int) -> Call:
        space, client, names = _space(size), self._client, _keys(keys)

        def call() -> None:
            with client.lease(space, names).result(SECONDS) as lease:
                assert len(lease.views) == len(names)

        return call

    def exists(self, keys: Sequence[str], size: int) -> Call:
        return self.view(keys, size)

    def remove(self, keys: Sequence[str], size: int) -> None:
        pass

    def saved_bytes(self) -> float:
        """Written to the node's SSDs since its start."""
        return self._client.stats().result(SECONDS)["ssd_written_bytes"]

    def close(self) -> None:
        self._client.close()


def _space(size: int) -> KeySpace:
    runs = max(1, size >> 20)
    return KeySpace(KeySpaceId(f"{size:032x}"), 64, runs, size // runs)


def _keys(names: Sequence[str]) -> list[BlockKey]:
    return [BlockKey(hashlib.sha256(name.encode()).digest()[:16]) for name in names]


if __name__ == "__main__":
    serve(lambda buffers: PoolSide(sys.argv[1]), int(sys.argv[2]))
