"""The slab: one preallocated file of blocks, read and written straight from and into the arena."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from moonpool.errors import ConfigError
from moonpool.messenger.transfer import Bytes
from moonpool.store.extents import PAGE_BYTES
from moonpool.store.places import amount, lacking_bytes, remember, spare_bytes

_MAX_BUFFERS = 1024
"""Of one system call (IOV_MAX)."""


class Slab:
    """Whole pages at page-aligned offsets only, from page-aligned memory: that is what O_DIRECT asks for.

    Blocking calls, from any thread; they raise OSError.
    """

    def __init__(self, path: Path, nbytes: int) -> None:
        """Creates or resizes the file; one that is as long already takes nothing from the disk.

        Raises ConfigError where the disk has not got so much space, or no such file; then the file is as it was.
        """
        self.path = path
        self.size = nbytes // PAGE_BYTES * PAGE_BYTES
        try:
            put_back = remember(path)
            _check_space(path, self.size)
            try:
                self._fd, self.is_direct = _open(path)
                try:
                    _resize(self._fd, self.size)
                except BaseException:
                    os.close(self._fd)
                    raise
            except BaseException:
                put_back()
                raise
        except OSError as e:
            raise ConfigError(
                f"no slab of {amount(self.size)} at {path}: {e.strerror}; "
                "choose a smaller --ssd-per-node or another --ssd-dir"
            ) from e

    def write(self, offset: int, buffers: Sequence[Bytes]) -> None:
        """The buffers one after another."""
        _transfer(os.pwritev, self._fd, offset, buffers)

    def read(self, offset: int, buffers: Sequence[Bytes]) -> None:
        _transfer(os.preadv, self._fd, offset, buffers)

    def close(self) -> None:
        """Only when no call runs any more."""
        os.close(self._fd)


def _check_space(path: Path, nbytes: int) -> None:
    """Before anything is written: a disk that is full for a moment already harms others."""
    lacking, spare = lacking_bytes(path, nbytes), spare_bytes(path.parent)
    if lacking and spare is not None and lacking > spare:
        raise OSError(errno.ENOSPC, f"{amount(lacking)} more needed, {amount(spare)} can be had")


def _resize(fd: int, nbytes: int) -> None:
    size = os.fstat(fd).st_size
    if size > nbytes:
        os.ftruncate(fd, nbytes)
    elif size < nbytes:
        os.posix_fallocate(fd, 0, nbytes)


def _open(path: Path) -> tuple[int, bool]:
    """The file past the page cache where its filesystem can do that (it may say so only when it is read)."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    try:
        fd = os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError as e:
        if e.errno != errno.EINVAL:
            raise
        return os.open(path, flags, 0o600), False
    try:
        with mmap.mmap(-1, PAGE_BYTES) as page:
            os.preadv(fd, [page], 0)
    except OSError as e:
        os.close(fd)
        if e.errno != errno.EINVAL:
            raise
        return os.open(path, flags, 0o600), False
    return fd, True


def _transfer(
    call: Callable[[int, Sequence[memoryview], int], int], fd: int, offset: int, buffers: Sequence[Bytes]
) -> None:
    left = [buffer.data for buffer in buffers]
    while left:
        moved = call(fd, left[:_MAX_BUFFERS], offset)
        if moved <= 0:
            raise OSError(errno.EIO, f"the slab ends at {offset}")
        offset += moved
        while left and moved >= left[0].nbytes:
            moved -= left.pop(0).nbytes
        if moved:
            left[0] = left[0][moved:]
