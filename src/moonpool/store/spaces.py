"""Which key spaces a node has blocks of, in any tier: one layout each. The ledger's lock covers it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from moonpool.core.vocabulary import BLOCK_KEY_BYTES, BlockKey, KeySpace, KeySpaceId
from moonpool.errors import PoolError

MAX_SPACES = 256
"""Each costs the Conductor's directory some hundred kilobytes."""
MAX_RUNS = 1 << 16
_KEY_LENGTHS = {BLOCK_KEY_BYTES}


class Spaces:
    """A layout is known as long as it has a block: who asks with a wrong one, and puts nothing, has done no harm."""

    def __init__(self) -> None:
        self._known: dict[KeySpaceId, KeySpace] = {}
        self._blocks: Counter[KeySpaceId] = Counter()

    def check(self, space: KeySpace) -> None:
        """Raises PoolError where there are blocks of this key space that look different, or could be none at all."""
        known = self._known.get(space.id)
        # Most are one object.
        if known is space:
            return
        if known is None:
            if not (1 <= space.runs <= MAX_RUNS and space.run_bytes >= 1 and space.block_tokens >= 1):
                raise PoolError(
                    f"key space {space.id}: 1 to {MAX_RUNS} runs; run_bytes and block_tokens must be at least 1"
                )
        elif known != space:
            raise PoolError(
                f"key space {space.id} has {known.runs} runs of {known.run_bytes} bytes on this node, "
                f"not {space.runs} of {space.run_bytes}; its blocks have {known.block_tokens} "
                "tokens: give the layout that they were put with, or another layout another name"
            )

    def check_keys(self, space: KeySpace, keys: Sequence[BlockKey]) -> None:
        """As `check`, for these keys. Raises PoolError."""
        if not set(map(len, keys)) <= _KEY_LENGTHS:
            raise PoolError(f"a block key has {BLOCK_KEY_BYTES} bytes")
        self.check(space)

    def check_new(self, space: KeySpace) -> None:
        """Raises PoolError where this node takes no blocks of one more key space."""
        if space.id not in self._known and len(self._known) >= MAX_SPACES:
            raise PoolError(f"this node has blocks of {MAX_SPACES} key spaces already; remove those of some")

    def came(self, space: KeySpace, blocks: int = 1) -> None:
        if blocks:
            self._known.setdefault(space.id, space)
            self._blocks[space.id] += blocks

    def left(self, space: KeySpace, blocks: int = 1) -> None:
        self._blocks[space.id] -= blocks
        if not self._blocks[space.id]:
            del self._blocks[space.id], self._known[space.id]

    def fits(self, space: KeySpace) -> bool:
        """Whether no blocks are here that look different."""
        return self._known.get(space.id, space) == space

    def check_integrity(self, blocks: Iterable[KeySpace]) -> None:
        """`blocks`: the space of each. Raises AssertionError where they are not those that are known."""
        counted = Counter(space.id for space in blocks)
        assert counted == self._blocks, f"{counted} blocks by key space, counted as {self._blocks}"
        assert self._known.keys() == self._blocks.keys()
