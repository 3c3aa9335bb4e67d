"""A cached context, as it is kept."""

from __future__ import annotations

import re
import sys
from array import array
from collections.abc import Sequence

from msgspec import Struct

from moonpool.gateway.schema import Messages

ID = re.compile(r"cache-[0-9a-f]{24}")


class Context(Struct, frozen=True, kw_only=True):
    """One entry of the book, and one file. Times are seconds since the epoch."""

    id: str = ""
    owner: str
    model: str
    vocabulary: int
    """With `model`: what the token ids belong to."""
    name: str = ""
    metadata: dict[str, str] = {}
    salt: str = ""
    """Of the blocks' keys."""
    messages: Messages = ()
    """None: it was made of a prompt."""
    known: dict[int, tuple[int, ...]] = {}
    """Token ids of those messages, by index, that were answers of the model (`answers`)."""
    tokens: bytes
    """Ids of the whole prefix, as little-endian u32."""
    pinned_tokens: int = 0
    """Of its whole blocks."""
    nbytes: int = 0
    """That they take in the pool."""
    node: str = ""
    """Which has them pinned, as far as is known."""
    created: int = 0
    expires: float = 0.0

    def token_ids(self) -> tuple[int, ...]:
        ids = array("I", self.tokens)
        if sys.byteorder == "big":
            ids.byteswap()
        return tuple(ids)

    @property
    def count(self) -> int:
        return len(self.tokens) // 4


def packed_ids(ids: Sequence[int]) -> bytes:
    packed = array("I", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()
