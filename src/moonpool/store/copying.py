"""Copies between a program's memory and the arena, shared by several threads.

One thread moves about half of what the memory gives; and numpy lets go of the interpreter while it copies.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from moonpool.messenger.transfer import Bytes
from moonpool.store.past_cache import Copy, copy_past_cache

Work = Callable[[], None]
"""One piece of a copy. Pieces do not depend on each other."""

PIECE_BYTES = 128 << 10
"""The least that is worth another thread's while: some ten microseconds."""
MOST_PIECE_BYTES = 1 << 20
ALONE_BYTES = 4 << 20
"""Less than this is done before a thread that sleeps is awake."""

SMALL_BYTES = 512 << 10
_ZERO = np.uint8(0)


def copy(target: Bytes, source: Bytes) -> None:
    """Between arrays of one size.

    Up to some hundred KiB the C library copies with an instruction of the processor's that some take four times as
    long for where the two do not begin at the same place in a cache line; and a large numpy array begins 16 bytes into
    a page, a block with it. numpy's own loops do not mind.
    """
    if source.nbytes < SMALL_BYTES:
        np.bitwise_or(source, _ZERO, out=target)
    else:
        np.copyto(target, source)


def copier(nbytes: int) -> Copy:
    """What copies the pieces of so many bytes best: what stays in no cache anyway goes past it."""
    return (copy_past_cache() if nbytes >= ALONE_BYTES else None) or copy


def piece_bytes(nbytes: int) -> int:
    """How finely a copy of so many bytes is best cut."""
    return nbytes if nbytes < ALONE_BYTES else min(max(PIECE_BYTES, nbytes // 16), MOST_PIECE_BYTES)


class Crew:
    """Threads that help whoever calls `run`; they come with the first work. Thread-safe."""

    def __init__(self, helpers: int | None = None) -> None:
        """By default as many as there are other processors, at most one: it is the machine's memory that is shared."""
        self._most = min(len(os.sched_getaffinity(0)) - 1, 1) if helpers is None else helpers
        lock = threading.Lock()
        self._wanted = threading.Condition(lock)
        self._done = threading.Condition(lock)
        self._jobs: deque[_Job] = deque()
        self._threads: list[threading.Thread] = []
        self._is_closed = False

    def run(self, work: Sequence[Work], nbytes: int = ALONE_BYTES) -> None:
        """Do all of it, in any order; it is over when this returns. Raises the first error, after the rest is over.

        `nbytes`: how much it moves.
        """
        if len(work) < 2 or not self._most or nbytes < ALONE_BYTES:
            for piece in work:
                piece()
            return
        job = _Job(work)
        with self._wanted:
            self._hire()
            self._jobs.append(job)
            self._wanted.notify()
        job.carry_on()
        with self._done:
            if job in self._jobs:
                self._jobs.remove(job)
            # Nothing is left to be taken up; a helper may still be at its last piece.
            self._done.wait_for(lambda: not job.helpers)
        if job.error is not None:
            raise job.error

    def close(self) -> None:
        """The threads end when their piece is done; `run` does everything by itself from now on."""
        with self._wanted:
            self._is_closed = True
            self._wanted.notify_all()

    def _hire(self) -> None:
        if len(self._threads) < self._most and not self._is_closed:
            thread = threading.Thread(target=self._help, name="copying", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _help(self) -> None:
        while True:
            with self._wanted:
                self._wanted.wait_for(lambda: self._jobs or self._is_closed)
                if self._is_closed:
                    return
                job = self._jobs[0]
                job.helpers += 1
            job.carry_on()
            with self._done:
                job.helpers -= 1
                if job in self._jobs:
                    self._jobs.remove(job)
                self._done.notify_all()


class _Job:
    def __init__(self, work: Sequence[Work]) -> None:
        self._left = deque(work)
        self.helpers = 0
        """Threads that may still be at a piece of it. The crew's lock covers it."""
        self.error: BaseException | None = None

    def carry_on(self) -> None:
        """One piece after another until none is left."""
        while True:
            try:
                piece = self._left.popleft()
            except IndexError:
                return
            try:
                piece()
            except BaseException as e:
                self.error = self.error or e
                self._left.clear()
