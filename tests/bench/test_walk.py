"""The walk that measures a store, on stores that do what they should and on some that do not."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from moonpool.bench.walk import Buffers, Bytes, Call, Walk

NBYTES = 1 << 20


class DictSide:
    """A store in this process; `spoil` damages what it is given."""

    def __init__(self, spoil: bool = False) -> None:
        self.blocks: dict[str, Bytes] = {}
        self.calls: list[tuple[str, int]] = []
        self._spoil = spoil

    def put(self, keys: Sequence[str], pieces: Sequence[Bytes]) -> Call:
        def call() -> None:
            self.calls.append(("put", len(keys)))
            self.blocks.update({key: piece.copy() for key, piece in zip(keys, pieces, strict=True)})
            if self._spoil:
                self.blocks[keys[0]][0] ^= 1

        return call

    def get(self, keys: Sequence[str], pieces: Sequence[Bytes]) -> Call:
        def call() -> None:
            self.calls.append(("get", len(keys)))
            for key, piece in zip(keys, pieces, strict=True):
                piece[:] = self.blocks[key]

        return call

    def view(self, keys: Sequence[str], size: int) -> Call:
        return lambda: [self.blocks[key] for key in keys]

    def exists(self, keys: Sequence[str], size: int) -> Call:
        return lambda: self.calls.append(("exists", sum(key in self.blocks for key in keys)))

    def remove(self, keys: Sequence[str], size: int) -> None:
        for key in keys:
            del self.blocks[key]

    def close(self) -> None:
        pass


def order(do: str, batch: int = 1) -> dict[str, object]:
    return {"do": do, "name": "a", "size": NBYTES // 8, "batch": batch, "calls": 3}


def test_a_walk_puts_and_gets_every_byte_once() -> None:
    side, buffers = DictSide(), Buffers(NBYTES)
    walk = Walk(side, buffers)
    assert len(walk.carry_out(order("put"))["seconds"]) == 8
    assert np.array_equal(np.concatenate(list(side.blocks.values())), buffers.source)
    buffers.target.fill(9)
    assert len(walk.carry_out(order("get"))["seconds"]) == 8
    assert np.array_equal(buffers.target, buffers.source)
    assert side.calls == [("put", 1)] * 8 + [("get", 1)] * 8


def test_a_batch_is_one_call() -> None:
    side = DictSide()
    walk = Walk(side, Buffers(NBYTES))
    assert len(walk.carry_out(order("put", batch=4))["seconds"]) == 2
    assert len(walk.carry_out(order("exists", batch=4))["seconds"]) == 3
    assert side.calls == [("put", 4)] * 2 + [("exists", 4)] * 3


def test_wrong_bytes_end_the_measurement() -> None:
    walk = Walk(DictSide(spoil=True), Buffers(NBYTES))
    walk.carry_out(order("put"))
    with pytest.raises(ValueError, match="other bytes"):
        walk.carry_out(order("get"))


def test_what_is_removed_is_gone_before_the_next_turn() -> None:
    side = DictSide()
    walk = Walk(side, Buffers(NBYTES))
    walk.carry_out(order("put"))
    assert walk.carry_out(order("remove")) == {}
    assert not side.blocks
