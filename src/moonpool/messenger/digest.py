"""Checksums of runs whose bytes come in pieces of any length, and of whole copies."""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from moonpool.messenger.questions import pack_sums


def copy_mark(checksums: Sequence[int]) -> int:
    """Of the checksums of all runs of a block: equal marks mean the same copy, so that parts of it belong together."""
    return xxhash.xxh3_64_intdigest(pack_sums(checksums))


class RunDigests:
    """xxh3-64 of one run after another, each of `run_bytes`.

    Feed a piece while it is still in the processor's cache.
    """

    def __init__(self, run_bytes: int) -> None:
        self._run_bytes = run_bytes
        self._open: xxhash.xxh3_64 | None = None
        self._left = run_bytes
        """Bytes until the run that is open ends."""
        self.checksums: list[int] = []
        """Of the runs that are complete."""

    def feed(self, piece: memoryview) -> None:
        run_bytes, sums = self._run_bytes, self.checksums
        if self._open is None and len(piece) == run_bytes:
            sums.append(xxhash.xxh3_64_intdigest(piece))
            return
        at, end = 0, len(piece)
        if self._open is not None:
            at = min(self._left, end)
            self._open.update(piece[:at])
            self._left -= at
            if self._left:
                return
            sums.append(self._open.intdigest())
            self._open, self._left = None, run_bytes
        while end - at >= run_bytes:
            sums.append(xxhash.xxh3_64_intdigest(piece[at : at + run_bytes]))
            at += run_bytes
        if at < end:
            self._open = xxhash.xxh3_64(piece[at:])
            self._left = run_bytes - (end - at)
