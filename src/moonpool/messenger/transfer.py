"""What Messenger moves, and what it asks of the store at the other end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Protocol

import numpy as np
import numpy.typing as npt
import xxhash
from msgspec import Meta

from moonpool.core.vocabulary import BlockKey, BlockMeta, KeySpaceId, RequestId
from moonpool.messenger.questions import GetBlocks, PutBlocks, Question, Reply

Checksum = Annotated[int, Meta(ge=0)]
"""xxh3-64 of a run. (No more than u64 fits into a message.)"""

Bytes = npt.NDArray[np.uint8]
"""One-dimensional and contiguous."""

TAIL = -1
"""The index, in a room, of the block that is not whole."""


def checksum(*parts: Bytes) -> int:
    """xxh3-64 of the concatenated parts: the checksum of one run."""
    if len(parts) == 1:
        return xxhash.xxh3_64_intdigest(parts[0].data)
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(part.data)
    return digest.intdigest()


@dataclass(frozen=True, slots=True)
class RoomWrite:
    """Consecutive runs of one block of a room. The buffers must stay as they are until the transfer is over."""

    request: RequestId
    attempt: int
    block: int
    """Index in the room's keys, or TAIL."""
    first_run: int
    runs: int
    buffers: Sequence[Bytes]
    """Together exactly the bytes of the runs, in order."""
    checksums: Sequence[int]
    """One per run."""

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers)


class Landing(Protocol):
    """Where the runs of one write go. No byte is written after `close`."""

    @property
    def run_bytes(self) -> int: ...

    @property
    def slices(self) -> Sequence[Bytes | None]:
        """One per run; None where the bytes are to be thrown away."""
        ...

    def landed(self, position: int, checksum: int) -> None:
        """The run at this position of `slices` is all there and its checksum is right."""
        ...

    def close(self) -> None: ...


class Departure(Protocol):
    """Blocks that stay where they are until `close`."""

    @property
    def blocks(self) -> Sequence[Bytes]: ...

    @property
    def checksums(self) -> Sequence[int]:
        """One per run, block after block."""
        ...

    def close(self) -> None: ...


class Gift(Protocol):
    """Blocks for a client, which stay where they are until `close`."""

    @property
    def blocks(self) -> Sequence[Bytes | None]:
        """One a key; None for a miss."""
        ...

    @property
    def checksums(self) -> Sequence[Sequence[int]]:
        """Of each block that is there, one a run."""
        ...

    @property
    def metas(self) -> Sequence[BlockMeta]:
        """Of each block that is there."""
        ...

    def close(self) -> None: ...


class Intake(Protocol):
    """Places for the blocks of one put. No byte is written after `close`; what has not landed then is nothing."""

    def places(self, blocks: slice) -> Iterator[tuple[int, Bytes | None]]:
        """Of these blocks: so many that lie one behind the other, and where; the next ones; and so on.

        None where the bytes are to be thrown away: the blocks are there already.
        """
        ...

    def landed(self, positions: Sequence[int], checksums: Sequence[int]) -> None:
        """The blocks at these positions are all there and right; with the checksums of all their runs."""
        ...

    def close(self) -> None: ...

    def tell(self) -> None:
        """After `close`: let those know what is new who need not know it at once."""
        ...


class Store(Protocol):
    """What the tcp server needs of a node's store. Called from many threads."""

    def land(
        self, request: RequestId, attempt: int, block: int, first_run: int, runs: int, nbytes: int, until: float
    ) -> Landing | str:
        """A place for the runs, or why there is none. May wait, until `until`, for another write of the same runs."""
        ...

    def depart(self, space: KeySpaceId, keys: Sequence[BlockKey]) -> Departure:
        """The longest leading run of readable blocks, which may be empty."""
        ...

    def answer(self, question: Question) -> Reply: ...

    def give(self, request: GetBlocks, is_gone: Callable[[], bool]) -> Gift | str:
        """All of these blocks that can be had, or why none. `is_gone`: nobody waits for them any more."""
        ...

    def take(self, request: PutBlocks) -> Intake | str: ...
