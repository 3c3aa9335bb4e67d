"""Where an SSD tier lies: a directory that is this process's alone, and room for a slab on its disk.

A start that is refused leaves no trace: what was made for it is removed, what was made longer is as long as before.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from moonpool.errors import ConfigError

RESERVED_BYTES = 1 << 30
RESERVED_SHARE = 20
"""A slab leaves so much of its disk free, or one part in so many if that is less: for indexes, and for all others."""
_SECTOR_BYTES = 512
"""What `st_blocks` counts, whatever the filesystem."""


class Place:
    """A directory of the SSD tier, this process's alone until `release`. What lies in it is nobody else's to read."""

    def __init__(self, path: Path) -> None:
        """Made where it is not there. Raises OSError; ConfigError where another process has it."""
        self.path = path
        self._made: list[Path] = []
        self._fd = -1
        try:
            self._make_directories()
            self._lock(path / "lock")
        except BaseException:
            self.abandon()
            raise

    def release(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def abandon(self) -> None:
        """Release it, and remove what was made for it and is empty."""
        for made in reversed(self._made):
            with contextlib.suppress(OSError):
                made.rmdir() if made.is_dir() else made.unlink()
        self._made.clear()
        self.release()

    def _make_directories(self) -> None:
        lacking = [self.path]
        while not lacking[-1].parent.exists():
            lacking.append(lacking[-1].parent)
        for directory in reversed(lacking):
            with contextlib.suppress(FileExistsError):
                directory.mkdir(0o700 if directory == self.path else 0o777)
                self._made.append(directory)

    def _lock(self, path: Path) -> None:
        is_new = not path.exists()
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Another one may have abandoned the place between the two calls, and its lock file is no longer there.
            is_ours = os.path.samestat(os.fstat(self._fd), path.stat())
        except (BlockingIOError, FileNotFoundError):
            is_ours = False
        if not is_ours:
            raise ConfigError(f"another node uses {self.path}: stop it, or give this one another --ssd-dir")
        if is_new:
            self._made.append(path)


def check_places(directories: Sequence[Path], nbytes: int) -> None:
    """Whether each directory can be had, with room for a slab of `nbytes` each, all at once. Leaves nothing behind.

    Raises ConfigError.
    """
    needs: dict[int, int] = {}
    for directory in directories:
        try:
            disk = _nearest(directory).stat().st_dev
            needs[disk] = needs.get(disk, 0) + lacking_bytes(directory / "slab", nbytes)
            spare = spare_bytes(directory)
        except OSError as e:
            raise refusal(directory, e) from None
        if needs[disk] and spare is not None and needs[disk] > spare:
            raise ConfigError(
                f"not enough disk for the SSD tier: {amount(needs[disk])} more needed in {directory.parent}, "
                f"{amount(spare)} can be had: choose a smaller --ssd-per-node or another --ssd-dir"
            )
    places: list[Place] = []
    try:
        for directory in directories:
            try:
                places.append(Place(directory))
                _check_files(directory)
            except OSError as e:
                raise refusal(directory, e) from None
    finally:
        for place in reversed(places):
            place.abandon()


def lacking_bytes(slab: Path, nbytes: int) -> int:
    """What a slab of `nbytes` still takes from its disk: nothing where the file is as long already."""
    try:
        now = slab.stat()
    except (FileNotFoundError, NotADirectoryError):
        return nbytes
    return 0 if now.st_size >= nbytes else nbytes - min(nbytes, now.st_blocks * _SECTOR_BYTES)


def spare_bytes(directory: Path) -> int | None:
    """What slabs may take where `directory` is or would be; None where the filesystem does not say. Raises OSError."""
    disk = os.statvfs(_nearest(directory))
    if not disk.f_blocks:
        return None
    return max(0, disk.f_bavail * disk.f_frsize - min(RESERVED_BYTES, disk.f_blocks * disk.f_frsize // RESERVED_SHARE))


def remember(path: Path) -> Callable[[], None]:
    """What makes a file again as long as it is now, or not there, if it has grown. Raises OSError."""
    try:
        before = path.stat().st_size
    except FileNotFoundError:
        before = None

    def put_back() -> None:
        with contextlib.suppress(OSError):
            if before is None:
                path.unlink()
            elif path.stat().st_size > before:
                os.truncate(path, before)

    return put_back


def refusal(directory: Path, error: OSError) -> ConfigError:
    return ConfigError(f"SSD directory {directory}: {error.strerror or error}; choose another --ssd-dir")


def amount(nbytes: int) -> str:
    for bits, unit in ((40, "TiB"), (30, "GiB")):
        if nbytes >= 1 << bits:
            return f"{nbytes / 2**bits:.1f} {unit}"
    return f"{nbytes / 2**20:.1f} MiB"


def _nearest(directory: Path) -> Path:
    """It, or the nearest parent that exists."""
    while not directory.exists():
        directory = directory.parent
    return directory


def _check_files(directory: Path) -> None:
    for name in ("slab", "index"):
        with contextlib.suppress(FileNotFoundError):
            os.close(os.open(directory / name, os.O_RDWR | os.O_CLOEXEC))
