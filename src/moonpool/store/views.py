"""What a client holds of its node's arena, as views, until it closes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Self

from moonpool.core.vocabulary import KeySpace
from moonpool.messenger.transfer import TAIL, Bytes


class _Held:
    """Something to be closed once."""

    def __init__(self, close: Callable[[], None]) -> None:
        self._close: Callable[[], None] | None = close

    def close(self) -> None:
        """The views must not be used any more. Closing twice, or after the node is gone, does nothing."""
        close, self._close = self._close, None
        if close is not None:
            close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Lease(_Held):
    """Leading blocks that are readable and stay where they are until `close` (or `release`, the same)."""

    def __init__(
        self, close: Callable[[], None], views: Sequence[Bytes], offsets: Sequence[int], marks: Sequence[int] = ()
    ) -> None:
        super().__init__(close)
        self.views = views
        """Read-only, `space.block_bytes` each."""
        self.offsets = offsets
        """Of the blocks in the arena."""
        self.marks = marks
        """Where they were asked for: of each block which copy it is (`digest.copy_mark`)."""

    @property
    def count(self) -> int:
        return len(self.views)

    def release(self) -> None:
        self.close()


class Found(_Held):
    """Blocks by key, wherever they stood in the list; they stay where they are until `close`."""

    def __init__(self, close: Callable[[], None], views: Sequence[Bytes | None]) -> None:
        super().__init__(close)
        self.views = views
        """Read-only, `space.block_bytes` each; None for a miss."""


class Room(_Held):
    """Space to write blocks into. A block is its readers' once all its runs are given to `NodeClient.complete`."""

    def __init__(
        self, close: Callable[[], None], number: int, space: KeySpace, views: Sequence[Bytes | None], tail: Bytes | None
    ) -> None:
        super().__init__(close)
        self.id = number
        self.space = space
        self.tail = tail
        """`space.runs` runs of `space.tail_run_bytes(tail_tokens)` bytes; None without a tail or room for it."""
        self.ended = False
        """The node has given the room up (the request is over): writing on is for nothing, but does no harm."""
        self._views = views

    def __len__(self) -> int:
        """Number of whole blocks, with and without a view."""
        return len(self._views)

    def view(self, index: int) -> Bytes | None:
        """A whole block to write; None where it was readable already or there is no room. TAIL: the tail."""
        return self.tail if index == TAIL else self._views[index]

    def run(self, index: int, run: int) -> Bytes | None:
        """One run of a block (or TAIL) to write; None where `view` is None."""
        view = self.view(index)
        if view is None:
            return None
        run_bytes = view.nbytes // self.space.runs
        return view[run * run_bytes : (run + 1) * run_bytes]


class Stream(_Held):
    """Leading blocks of a prompt while they come, layer after layer (PAPER §3), readable as far as they are there."""

    def __init__(
        self,
        close: Callable[[], None],
        number: int,
        views: Sequence[Bytes],
        runs: int,
        whole: int,
        is_over: bool = False,
        marks: Sequence[int] = (),
    ) -> None:
        super().__init__(close)
        self.id = number
        self.views = views
        """Read-only, `space.block_bytes` each."""
        self.runs = runs
        """So many leading runs of all of them are there."""
        self.whole = whole
        """So many leading blocks are there, with all of their runs."""
        self.is_over = is_over
        """Nothing more will come."""
        self._marks = dict(zip(range(whole - len(marks), whole), marks, strict=True))
        self._on_change: Callable[[], None] = lambda: None

    def tell(self, on_change: Callable[[], None]) -> None:
        """Call this now, and whenever more is there, or nothing more will be; on a thread of the client."""
        self._on_change = on_change
        on_change()

    def marks(self, blocks: int) -> tuple[int, ...]:
        """Where they were asked for: of so many leading blocks, which are whole, which copy each is."""
        return tuple(self._marks[index] for index in range(blocks))

    def change(self, runs: int, whole: int, is_over: bool, marks: Sequence[int] = ()) -> None:
        """More has come. `marks`: of the last ones of the whole blocks."""
        self._marks.update(zip(range(whole - len(marks), whole), marks, strict=True))
        self.runs, self.whole, self.is_over = max(self.runs, runs), max(self.whole, whole), self.is_over or is_over
        self._on_change()


class RoomContents(_Held):
    """All the KV of a hand-over room: readable, and in place until `close`, which ends the room."""

    def __init__(
        self, close: Callable[[], None], number: int, space: KeySpace, blocks: Sequence[Bytes], tail: Bytes | None
    ) -> None:
        super().__init__(close)
        self.id = number
        self.space = space
        self.blocks = blocks
        """Read-only; every whole block of the prompt, `space.block_bytes` each."""
        self.tail = tail
        """Read-only; `space.runs` runs of the tail's valid tokens, or None without a tail."""
