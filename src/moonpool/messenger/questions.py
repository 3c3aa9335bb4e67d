"""What a client of the pool asks its home node, over the node's Unix socket or its data address (docs/protocol.md).

Keys travel packed, one behind the other; answers hold one byte a key, in the same order.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Final

from msgspec import Meta, Struct

from moonpool.core.vocabulary import (
    BLOCK_KEY_BYTES,
    BlockKey,
    BlockMeta,
    Count,
    Incarnation,
    KeySpace,
    KeySpaceId,
    PartId,
    Seconds,
)
from moonpool.errors import PoolError

_KEY = struct.Struct(f"{BLOCK_KEY_BYTES}s")
_KEY_LENGTHS = {BLOCK_KEY_BYTES}

STRETCH_BYTES = 1 << 20
KEYS_A_QUESTION = 8192
"""At most: a node's books are locked for about a microsecond a key, and everybody waits meanwhile."""

VERIFIED_KEYS = 64
"""At most in one `Verify`: all their bytes are summed up."""

NO: Final = 0
YES: Final = 1
LEASED: Final = 2
"""Not removed: somebody reads it."""
PINNED: Final = 3
"""Not removed."""
BUSY: Final = 4
"""Not removed: it is on its way to or from an SSD."""
DAMAGED: Final = 5
"""Not put: it did not arrive as it was sent."""


class Enter(Struct, frozen=True, tag=True):
    """The first question of a client that comes over the network: who are you?"""


class Exists(Struct, frozen=True, tag=True):
    """Is it in the pool, in whatever tier? `here`: on this node."""

    space: KeySpaceId
    keys: bytes
    here: bool = False


class Pin(Struct, frozen=True, tag=True):
    space: KeySpace
    keys: bytes
    ttl: Seconds


class Unpin(Struct, frozen=True, tag=True):
    space: KeySpaceId
    keys: bytes


class Remove(Struct, frozen=True, tag=True):
    """`here`: from this node alone."""

    space: KeySpaceId
    keys: bytes
    here: bool = False


class CountHolders(Struct, frozen=True, tag=True):
    """On how many nodes is it, or, if `copies` are wanted, will it be?"""

    space: KeySpace
    keys: bytes
    copies: Count = 0


class DescribeBlocks(Struct, frozen=True, tag=True):
    space: KeySpaceId
    keys: bytes


class TakeStock(Struct, frozen=True, tag=True):
    """The node's counters and gauges."""


class Verify(Struct, frozen=True, tag=True):
    """Over the data address only: these came with a wrong checksum. Are they damaged where they lie, in DRAM?

    The node looks for itself. `Marks`: YES where one was and is gone, LEASED or BUSY where it was and has to stay.
    """

    space: KeySpaceId
    keys: bytes


class Entered(Struct, frozen=True, tag=True):
    node: PartId
    incarnation: Incarnation
    arena_bytes: int
    batch_bytes: int
    """A batch of more is moved in parts."""


class Marks(Struct, frozen=True, tag=True):
    """A byte a key: NO, YES, or why not."""

    marks: bytes


class Numbers(Struct, frozen=True, tag=True):
    numbers: tuple[int, ...]


class Described(Struct, frozen=True, tag=True):
    """None for a block that is not on this node."""

    metas: tuple[BlockMeta | None, ...]


class Stock(Struct, frozen=True, tag=True):
    values: dict[str, float]


class Refused(Struct, frozen=True, tag=True):
    reason: str


class GetBlocks(Struct, frozen=True, tag=True):
    """Over the data address only: runs `first_run` to `first_run + runs` of each block."""

    space: KeySpace
    keys: bytes
    first_run: Annotated[int, Meta(ge=0, le=1 << 20)]
    runs: Annotated[int, Meta(ge=1, le=1 << 20)]
    time_left: Seconds
    waits: bool = False
    """Also for blocks that somebody is writing now."""
    here: bool = False
    """Only what this node has: the question of another node."""


class Given(Struct, frozen=True, tag=True):
    """The answer to `GetBlocks`; the runs follow, block after block, of those that are marked with YES."""

    marks: bytes
    checksums: bytes
    """u64 (little-endian), one a run that follows."""
    metas: tuple[BlockMeta, ...] = ()
    """With `here`: one a block that follows."""
    copies: bytes = b""
    """Where not all runs were wanted: u64 a block that follows, of all its checksums. Equal ones mean equal bytes, so
    that parts of a block that came in two answers belong together."""


class PutBlocks(Struct, frozen=True, tag=True):
    """Over the data address only. All blocks follow, and `Checksums` after each of the `stretches` of them; the answer
    is `Marks`."""

    space: KeySpace
    keys: bytes
    metas: tuple[BlockMeta, ...]
    """One a key, or none."""
    time_left: Seconds


class Checksums(Struct, frozen=True, tag=True):
    """u64 (little-endian), one a run of the stretch before: known to the sender only when it has read that."""

    checksums: bytes


Question = Enter | Exists | Pin | Unpin | Remove | CountHolders | DescribeBlocks | TakeStock | Verify
Reply = Entered | Marks | Numbers | Described | Stock | Refused


def packed(keys: Sequence[BlockKey]) -> bytes:
    """Raises PoolError for what is no key."""
    if isinstance(keys, bytes | bytearray | memoryview | str):
        # Its elements would pass for keys.
        raise PoolError("one key was given where several are expected: give a list of keys")
    try:
        if not set(map(len, keys)) <= _KEY_LENGTHS:
            wrong = next(key for key in keys if len(key) != BLOCK_KEY_BYTES)
            raise _no_key(f"{len(wrong)}")
        return b"".join(keys)
    except TypeError:
        wrong = next(key for key in keys if not isinstance(key, bytes | bytearray | memoryview))
        raise _no_key(f"those of {type(wrong).__name__}") from None


def _no_key(what: str) -> PoolError:
    return PoolError(
        f"a block key has {BLOCK_KEY_BYTES} bytes, not {what}: take `Space.keys_of` or `moonpool.store.key_of` to "
        "make one"
    )


def unpacked(keys: bytes) -> list[BlockKey]:
    """Raises PoolError for what cannot be keys, or is more of them than a question has."""
    if len(keys) > KEYS_A_QUESTION * BLOCK_KEY_BYTES:
        raise PoolError(f"{len(keys) // BLOCK_KEY_BYTES} keys in one question; at most {KEYS_A_QUESTION}: ask in parts")
    if len(keys) % BLOCK_KEY_BYTES:
        raise PoolError(f"{len(keys)} bytes are no whole block keys of {BLOCK_KEY_BYTES} bytes")
    return [key for (key,) in _KEY.iter_unpack(keys)]


def stretches(count: int, block_bytes: int) -> Iterator[slice]:
    """The blocks of a put that are verified, and become readable, together: whole ones, of about STRETCH_BYTES.

    So the node writes its books while more is under way. At least one, which is empty where nothing is put.
    """
    size = max(1, STRETCH_BYTES // max(1, block_bytes))
    return (slice(start, min(start + size, count)) for start in range(0, max(count, 1), size))


def marks(values: Iterable[int]) -> Marks:
    return Marks(bytes(values))


def pack_sums(sums: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(sums)}Q", *sums)


def unpack_sums(data: bytes) -> tuple[int, ...]:
    """Raises PoolError for what is no whole number of checksums."""
    if len(data) % 8:
        raise PoolError(f"{len(data)} bytes are no checksums of 8 bytes")
    return struct.unpack(f"<{len(data) // 8}Q", data)
