"""The measurements of `make bench-store`, the same for every store: one walk over one buffer, call by call.

A store is measured in a process of its own, a peer's in the peer's own environment: nothing but the standard library
and numpy may be imported here. The process takes orders as JSON lines on standard input and answers each with one line.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from moonpool.bench.orders import answering, carry_out_orders

Bytes = npt.NDArray[np.uint8]
"""One-dimensional and contiguous."""
Call = Callable[[], object]
"""One call to a store, ready to run. It raises where the store did not do all of it."""

SEED = 20240701


class Side(Protocol):
    """A store under test. Each method prepares one call: what the call does is timed, its preparation is not.

    One key is one block; several are one batch.
    """

    def put(self, keys: Sequence[str], pieces: Sequence[Bytes]) -> Call: ...

    def get(self, keys: Sequence[str], pieces: Sequence[Bytes]) -> Call:
        """Into the pieces."""
        ...

    def view(self, keys: Sequence[str], size: int) -> Call:
        """Without a copy, where the store can do that; the view is given back within the call."""
        ...

    def exists(self, keys: Sequence[str], size: int) -> Call: ...

    def remove(self, keys: Sequence[str], size: int) -> None: ...

    def close(self) -> None: ...


class Buffers:
    """What is put and where it is read back to: `nbytes` each, page-aligned, one behind the other, every page there."""

    def __init__(self, nbytes: int) -> None:
        self.memory: Bytes = np.frombuffer(mmap.mmap(-1, 2 * nbytes), np.uint8)
        self.source = self.memory[:nbytes]
        self.target = self.memory[nbytes:]
        self.source[:] = pattern(nbytes)
        self.target.fill(0)


def pattern(nbytes: int) -> Bytes:
    """The same bytes in every process, without a repetition."""
    return np.frombuffer(np.random.default_rng(SEED).bytes(nbytes), np.uint8)


class Walk:
    """Carries out orders on one side. An order names its blocks with `name`: the same name means the same blocks."""

    def __init__(self, side: Side, buffers: Buffers) -> None:
        self._side = side
        self._buffers = buffers

    def carry_out(self, order: dict[str, Any]) -> dict[str, Any]:
        """The seconds of every call, in order. Raises whatever the store raises, and ValueError for wrong bytes."""
        name, size, batch = order["name"], int(order["size"]), int(order["batch"])
        count = len(self._buffers.source) // size
        keys = [f"{name}/{index}" for index in range(count)]
        starts = range(0, count, batch)
        match order["do"]:
            case "put":
                pieces = self._pieces(self._buffers.source, size)
                return _timed([self._side.put(keys[i : i + batch], pieces[i : i + batch]) for i in starts])
            case "get":
                pieces = self._pieces(self._buffers.target, size)
                self._buffers.target.fill(0)
                timed = _timed([self._side.get(keys[i : i + batch], pieces[i : i + batch]) for i in starts])
                if not np.array_equal(self._buffers.source, self._buffers.target):
                    raise ValueError(f"the store gave other bytes for {name} than were put")
                return timed
            case "view" | "exists" as do:
                prepare = self._side.view if do == "view" else self._side.exists
                chosen = [prepare(keys[i : i + batch], size) for i in starts]
                # As many for each size of block.
                return _timed([chosen[turn % len(chosen)] for turn in range(int(order["calls"]))])
            case "remove":
                self._side.remove(keys, size)
                return {}
            case other:
                raise ValueError(f"no such order: {other}")

    def _pieces(self, buffer: Bytes, size: int) -> list[Bytes]:
        return [buffer[start : start + size] for start in range(0, len(buffer) // size * size, size)]


def serve(open_side: Callable[[Buffers], Side], nbytes: int) -> None:
    """Open a side over buffers of `nbytes`, say so, and carry out orders until the end of standard input."""
    with answering() as answer:
        buffers = Buffers(nbytes)
        side = open_side(buffers)
        try:
            carry_out_orders(Walk(side, buffers).carry_out, answer)
        finally:
            side.close()


def _timed(calls: Sequence[Call]) -> dict[str, Any]:
    seconds = []
    for call in calls:
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return {"seconds": seconds}
