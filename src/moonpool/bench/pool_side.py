"""Moonpool's pool as a side of `make bench-store`, through its public client.

Arguments: the node's Unix socket, or `host:port` of its data address; bytes of the walk.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from moonpool.bench.walk import Bytes, Call, serve
from moonpool.core.vocabulary import BlockKey
from moonpool.store import Client, Space, key_of

RUN_BYTES = 1 << 20
"""Blocks are of runs of at most that, with a checksum each, as those of a model are."""


class PoolSide:
    def __init__(self, address: str) -> None:
        self._client = Client.connect(address, name="bench")

    def put(self, keys: Sequence[str], pieces: Sequence[Bytes]) -> Call:
        space, names, good = self._space(pieces[0].nbytes), _keys(keys), [True] * len(keys)
        if len(names) == 1:
            return lambda: _expect("put", [space.put(names[0], pieces[0])], good)
        return lambda: _expect("put_many", space.put_many(names, pieces), good)

    def get(self, keys: Sequence[str], pieces: Sequence[Bytes]) -> Call:
        space, names, good = self._space(pieces[0].nbytes), _keys(keys), [True] * len(keys)
        targets = [[piece] for piece in pieces]
        if len(names) == 1:
            return lambda: _expect("get_into", [space.get_into(names[0], targets[0])], good)
        return lambda: _expect("get_into_many", space.get_into_many(names, targets), good)

    def view(self, keys: Sequence[str], size: int) -> Call:
        space, names = self._space(size), _keys(keys)

        def call() -> None:
            with space.get(names) as blocks:
                _expect("get", [view is not None for view in blocks], [True] * len(names))

        return call

    def exists(self, keys: Sequence[str], size: int) -> Call:
        space, names, good = self._space(size), _keys(keys), [True] * len(keys)
        if len(names) == 1:
            return lambda: _expect("exists", [space.exists(names[0])], good)
        return lambda: _expect("exists_many", space.exists_many(names), good)

    def remove(self, keys: Sequence[str], size: int) -> None:
        _expect("remove", self._space(size).remove(_keys(keys)), [True] * len(keys))

    def saved_bytes(self) -> float:
        """Written to the node's SSDs since its start."""
        return self._client.stats()["ssd_written_bytes"]

    def close(self) -> None:
        self._client.close()

    def _space(self, size: int) -> Space:
        return self._client.space(f"bench of {size}", block_bytes=size, layers=max(1, size // RUN_BYTES))


def _keys(names: Sequence[str]) -> list[BlockKey]:
    return [key_of(name) for name in names]


def _expect(call: str, outcomes: Sequence[bool], good: Sequence[bool]) -> None:
    if outcomes != good:
        raise RuntimeError(f"{call} did {sum(outcomes)} of {len(good)} blocks")


if __name__ == "__main__":
    serve(lambda buffers: PoolSide(sys.argv[1]), int(sys.argv[2]))
