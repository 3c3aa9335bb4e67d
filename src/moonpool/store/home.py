"""A client's home node: what `api` needs of it, whether it is on the same host (`near`) or not (`far`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from moonpool.core.vocabulary import BlockKey, BlockMeta, KeySpace, PartId
from moonpool.messenger.questions import Question, Reply
from moonpool.messenger.transfer import Bytes

Layers = tuple[int, int]
"""(first, count)"""


class Wait:
    """How long a read may take, and whether it is also for blocks that somebody is writing now."""

    __slots__ = ("is_for_writers", "seconds")

    def __init__(self, seconds: float, is_for_writers: bool) -> None:
        self.seconds = seconds
        self.is_for_writers = is_for_writers


class Held:
    """Views of blocks, one a key, None for a miss; they last until `close`."""

    __slots__ = ("_close", "views")

    def __init__(self, views: Sequence[Bytes | None], close: Callable[[], None] | None = None) -> None:
        self.views = views
        self._close = close

    def close(self) -> None:
        """Raises PoolError where the views were the node's memory, and it may have used that for something else."""
        close, self._close = self._close, None
        if close is not None:
            close()


class Home(Protocol):
    """Thread-safe. Methods raise PoolError; keys are of the right length, buffers of the right size."""

    @property
    def node(self) -> PartId: ...

    @property
    def batch_bytes(self) -> int:
        """A put or read of more should come in parts."""
        ...

    @property
    def copies(self) -> bool:
        """What `get` gives are the client's own copies, so it may come in parts too."""
        ...

    def ask(self, question: Question) -> Reply:
        """Anything but `Refused`."""
        ...

    def put(
        self,
        space: KeySpace,
        keys: Sequence[BlockKey],
        sources: Sequence[Sequence[Bytes]],
        metas: Sequence[BlockMeta],
    ) -> list[bool]:
        """For each key, True: these bytes are the block now; False: it was there already."""
        ...

    def get(self, space: KeySpace, keys: Sequence[BlockKey], layers: Layers, wait: Wait) -> Held: ...

    def get_into(
        self,
        space: KeySpace,
        keys: Sequence[BlockKey],
        targets: Sequence[Sequence[Bytes]],
        layers: Layers,
        wait: Wait,
    ) -> list[bool]: ...

    def close(self) -> None: ...
