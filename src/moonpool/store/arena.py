"""The node's DRAM: one memfd, allocated at the start, mapped by the node and by its clients."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from pathlib import Path

import numpy as np

from moonpool.errors import ConfigError
from moonpool.messenger.transfer import Bytes
from moonpool.store.extents import PAGE_BYTES, Extents

_CGROUP = Path("/sys/fs/cgroup")


class Arena:
    """Shared memory without a name: it is gone with the last process that maps it, however that process ends."""

    def __init__(self, nbytes: int) -> None:
        """Raises ConfigError where the machine has not got that much memory to spare."""
        self.extents = Extents(nbytes)
        size = self.extents.capacity
        if not size:
            raise ConfigError(f"an arena of {nbytes} bytes is too small: at least {PAGE_BYTES} (--dram)")
        available = available_memory()
        if size > available:
            raise ConfigError(
                f"an arena of {size / 2**20:.0f} MiB does not fit: {available / 2**20:.0f} MiB of memory are free; "
                "give the node less (--dram) or stop other programs"
            )
        self.fd = os.memfd_create("moonpool-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, size)
            # No client can shrink it under the others: a read beyond the end would kill them.
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            os.posix_fallocate(self.fd, 0, size)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals)
            self.memory = map_arena(self.fd, size)
        except OSError as e:
            os.close(self.fd)
            raise ConfigError(f"no shared memory for an arena of {size / 2**20:.0f} MiB: {e.strerror} (--dram)") from e

    @property
    def size(self) -> int:
        return self.extents.capacity

    def slice(self, offset: int, nbytes: int) -> Bytes:
        return self.memory[offset : offset + nbytes]

    def close(self) -> None:
        """Let go of the memory; it is freed when the last view of it is gone, here and in the clients."""
        os.close(self.fd)
        self.memory = np.empty(0, np.uint8)


def map_arena(fd: int, size: int) -> Bytes:
    """All of the arena as writable bytes; unmapped when the last view is collected."""
    return np.frombuffer(mmap.mmap(fd, size), np.uint8)


def available_memory() -> int:
    """Bytes that can be taken without swapping, by the kernel's estimate and this process's control group."""
    available = 1 << 62
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    with contextlib.suppress(OSError, ValueError):
        limit = int((_CGROUP / "memory.max").read_text())
        available = min(available, limit - int((_CGROUP / "memory.current").read_text()))
    return available
