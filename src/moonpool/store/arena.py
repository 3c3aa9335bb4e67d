"""The node's DRAM: one memfd, allocated at the start, mapped by the node and by its clients."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
from pathlib import Path

import numpy as np

from moonpool.errors import ConfigError
from moonpool.messenger.transfer import Bytes
from moonpool.store.board import Board
from moonpool.store.extents import PAGE_BYTES, Extents

_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")
_SHARED_HUGE = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_MADV_POPULATE_WRITE = 23
"""Of <linux/mman.h>, which Python does not name."""


class Arena:
    """Shared memory without a name: it is gone with the last process that maps it, however that process ends.

    In huge pages where the machine has any to give: those set aside for it (vm.nr_hugepages) if they suffice, else
    transparent ones if /sys/kernel/mm/transparent_hugepage/shmem_enabled lets shared memory have them.
    """

    def __init__(self, nbytes: int) -> None:
        """Raises ConfigError where the machine has not got that much memory to spare."""
        self.pages = "4 KiB pages"
        """What it is made of, fit for the log."""
        self.huge_bytes = 0
        """In huge pages; of transparent ones what the kernel had at the start."""
        if nbytes < PAGE_BYTES:
            raise ConfigError(f"an arena of {nbytes} bytes is too small: at least {PAGE_BYTES} (--dram-per-node)")
        if not self._take_huge(nbytes):
            self._take(nbytes)
        self.board = Board(self.size)

    def _take_huge(self, nbytes: int) -> bool:
        """From the pages that were set aside for such use. False where they do not suffice."""
        meminfo = _meminfo()
        page, free = meminfo.get("Hugepagesize", 0), meminfo.get("HugePages_Free", 0) - meminfo.get("HugePages_Rsvd", 0)
        if not page or nbytes < page or nbytes // page > free:
            return False
        size = nbytes // page * page
        try:
            self._map(size, os.MFD_HUGETLB)
        except OSError:
            # Somebody else was faster, or this process may not have them.
            return False
        self.pages, self.huge_bytes = f"huge pages of {page >> 10} KiB", size
        return True

    def _take(self, nbytes: int) -> None:
        size = nbytes // PAGE_BYTES * PAGE_BYTES
        available = available_memory()
        if size > available:
            raise ConfigError(
                f"an arena of {size / 2**20:.0f} MiB does not fit: {available / 2**20:.0f} MiB of memory are free; "
                "give the node less (--dram-per-node) or stop other programs"
            )
        try:
            self._map(size, 0)
        except OSError as e:
            raise ConfigError(
                f"no shared memory for an arena of {size / 2**20:.0f} MiB: {e.strerror} (--dram-per-node)"
            ) from e
        if may_be_huge():
            self.huge_bytes = _huge_bytes(os.fstat(self.fd).st_ino)
            self.pages = f"transparent huge pages ({self.huge_bytes >> 20} of {size >> 20} MiB)"

    def _map(self, size: int, flags: int) -> None:
        self.fd = os.memfd_create("moonpool-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
        try:
            os.ftruncate(self.fd, size)
            mapped = _mapped(self.fd, size)
            # Transparent huge pages come only where a mapping that asks for them is written to.
            if not (may_be_huge() and _populate(mapped)):
                os.posix_fallocate(self.fd, 0, size)
            # No client can shrink it under the others: a read beyond the end would kill them.
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        except OSError:
            os.close(self.fd)
            raise
        self.memory = np.frombuffer(mapped, np.uint8)
        self.extents = Extents(size)

    @property
    def size(self) -> int:
        return self.extents.capacity

    def slice(self, offset: int, nbytes: int) -> Bytes:
        return self.memory[offset : offset + nbytes]

    def close(self) -> None:
        """Let go of the memory; it is freed when the last view of it is gone, here and in the clients."""
        os.close(self.fd)
        self.board.close()
        self.memory = np.empty(0, np.uint8)


def map_arena(fd: int, size: int, writable: bool = True) -> Bytes:
    """All of the arena as bytes; unmapped when the last view is collected."""
    return np.frombuffer(_mapped(fd, size, writable), np.uint8)


def _mapped(fd: int, size: int, writable: bool = True) -> mmap.mmap:
    mapped = mmap.mmap(fd, size, prot=mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0))
    with contextlib.suppress(OSError):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return mapped


def _populate(mapped: mmap.mmap) -> bool:
    """Have all pages now, rather than a bus error later. False where the kernel cannot (before 5.14)."""
    try:
        mapped.madvise(_MADV_POPULATE_WRITE)
    except OSError as e:
        if e.errno == errno.EINVAL:
            return False
        raise
    return True


def may_be_huge() -> bool:
    """Whether shared memory that asks for transparent huge pages may get them."""
    try:
        words = _SHARED_HUGE.read_text().split()
    except OSError:
        return False
    return any(f"[{word}]" in words for word in ("always", "within_size", "advise", "force"))


def _huge_bytes(inode: int) -> int:
    """Of a file that this process maps: so much of it lies in transparent huge pages."""
    is_ours, found = False, 0
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/smaps").read_text().splitlines():
            words = line.split()
            if "-" in words[0] and len(words) > 4:
                is_ours = words[4] == str(inode)
            elif is_ours and words[0] == "ShmemPmdMapped:":
                found += int(words[1]) << 10
    return found


def _meminfo() -> dict[str, int]:
    """Sizes in bytes, counts as they are."""
    found = {}
    for line in _MEMINFO.read_text().splitlines():
        name, _, rest = line.partition(":")
        number, *unit = rest.split()
        found[name] = int(number) << 10 if unit else int(number)
    return found


def available_memory() -> int:
    """Bytes that can be taken without swapping, by the kernel's estimate and this process's control group."""
    available = _meminfo().get("MemAvailable", 1 << 62)
    with contextlib.suppress(OSError, ValueError):
        limit = int((_CGROUP / "memory.max").read_text())
        available = min(available, limit - int((_CGROUP / "memory.current").read_text()))
    return available
