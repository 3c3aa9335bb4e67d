"""Which blocks are in DRAM, and where: a board in shared memory that clients of the host read without asking the node.

A bucket of WAYS entries for each key; a block that finds no place in its bucket is not on the board, and is asked for.
An entry's version is odd while it changes and never the same twice, so a client that finds the same even version before
and after copying has copied that block: an entry is taken off before its memory can be used for anything else. That
takes a processor that keeps the order of loads and of stores; on others nothing is on the board.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import platform
import struct
from collections.abc import Iterable
from functools import lru_cache
from typing import Final

import xxhash
from msgspec import Struct

from moonpool.core.vocabulary import BlockKey, KeySpaceId

WAYS = 8
LEAST_ENTRIES = 1 << 10
MOST_ENTRIES = 1 << 18
BLOCK_BYTES = 64 << 10
"""Blocks smaller than this may be too many for the board of an arena full of them."""
_WORDS: Final = 8
"""u64 words of an entry: a cache line."""
_BUCKET_WORDS = WAYS * _WORDS
_VERSION, _SPACE, _KEY, _KEY_END, _OFFSET, _BYTES = range(6)
_KEY_WORDS = struct.Struct("<2Q")
_ENTRY = struct.Struct("<5Q")
"""All of it but the version."""
_F_SEAL_FUTURE_WRITE = 0x10
"""Of <linux/fcntl.h>: whoever maps it from now on may only read."""
_KEEPS_ORDER = platform.machine() in ("x86_64", "AMD64")


class Board:
    """The node's side. Not thread-safe: the ledger's lock covers it."""

    def __init__(self, arena_bytes: int) -> None:
        wanted = min(max(2 * arena_bytes // BLOCK_BYTES, LEAST_ENTRIES), MOST_ENTRIES)
        self.entries = 1 << (wanted - 1).bit_length()
        self.fd = os.memfd_create("moonpool-board", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        size = self.entries * _WORDS * 8
        os.ftruncate(self.fd, size)
        self._memory = memoryview(mmap.mmap(self.fd, size))
        self._words = self._memory.cast("Q")
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
        try:
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals | _F_SEAL_FUTURE_WRITE)
        except OSError:
            # A kernel before 5.1.
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals)
        self._at: dict[tuple[KeySpaceId, BlockKey], int] = {}

    def show(self, blocks: Iterable[tuple[tuple[KeySpaceId, BlockKey], int, int]]) -> None:
        """These blocks are readable; where they lie (offset, bytes)."""
        words, memory, places, buckets = self._words, self._memory, self._at, self.entries // WAYS
        unpack, pack = _KEY_WORDS.unpack, _ENTRY.pack_into
        for name, offset, nbytes in blocks:
            low, high = unpack(name[1])
            at = end = low % buckets * _BUCKET_WORDS
            end += _BUCKET_WORDS
            while at < end:
                if not words[at + _BYTES]:
                    version = words[at]
                    words[at] = version + 1
                    pack(memory, (at + _SPACE) * 8, space_tag(name[0]), low, high, offset, nbytes)
                    words[at] = version + 2
                    places[name] = at
                    break
                at += _WORDS

    def hide(self, space: KeySpaceId, key: BlockKey) -> None:
        """The block is about to leave its memory."""
        at = self._at.pop((space, key), None)
        if at is not None:
            words = self._words
            words[at] += 1
            words[at + _BYTES] = 0
            words[at] += 1

    def close(self) -> None:
        """Nothing is shown any more; the memory is freed when no client maps it."""
        os.close(self.fd)
        self._words.release()
        self._memory.release()

    def check_integrity(self, resident: dict[tuple[KeySpaceId, BlockKey], tuple[int, int]]) -> None:
        """Raises AssertionError unless all on the board are among these blocks: name -> (offset, bytes)."""
        words = self._words
        assert all(not words[at] & 1 for at in range(0, len(words), _WORDS))
        shown = sum(bool(words[at + _BYTES]) for at in range(0, len(words), _WORDS))
        assert shown == len(self._at), "an entry of the board belongs to nobody"
        for (space, key), at in self._at.items():
            entry = words[at + _SPACE], words[at + _KEY], words[at + _KEY_END]
            assert entry == (space_tag(space), *_KEY_WORDS.unpack(key))
            assert resident.get((space, key)) == (words[at + _OFFSET], words[at + _BYTES])


class Sighting(Struct, frozen=True):
    """A block that was on the board a moment ago."""

    at: int
    version: int
    offset: int
    nbytes: int


class BoardView:
    """A client's side. Thread-safe."""

    def __init__(self, fd: int, entries: int) -> None:
        """Raises OSError or ValueError for what is no board."""
        self._entries = entries if _KEEPS_ORDER else 0
        self._words = memoryview(mmap.mmap(fd, entries * _WORDS * 8, prot=mmap.PROT_READ)).cast("Q")

    def find(self, tag: int, key: BlockKey) -> Sighting | None:
        """`tag`: `space_tag` of its key space."""
        if not self._entries:
            return None
        words = self._words
        low, high = _KEY_WORDS.unpack(key)
        first = low % (self._entries // WAYS) * _BUCKET_WORDS
        for at in range(first, first + _BUCKET_WORDS, _WORDS):
            if words[at + _KEY] == low:
                seen = Sighting(at, words[at], words[at + _OFFSET], words[at + _BYTES])
                is_it = (words[at + _SPACE], words[at + _KEY], words[at + _KEY_END]) == (tag, low, high)
                if is_it and seen.nbytes and not seen.version & 1 and self.is_still(seen):
                    return seen
        return None

    def is_still(self, seen: Sighting) -> bool:
        """Whether the block has been there all the time since."""
        return self._words[seen.at] == seen.version


@lru_cache(1024)
def space_tag(space: KeySpaceId) -> int:
    return xxhash.xxh3_64_intdigest(space.encode())
