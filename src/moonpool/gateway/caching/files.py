"""Where cached contexts survive the gateway: a file each, in a directory of this gateway alone.

They hold the prefixes themselves, which nothing else could compute again: directory and files are this user's (0700,
0600). A file is written beside its place and moved there, so it is either old or new.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from pathlib import Path

import msgspec

from moonpool.errors import ConfigError
from moonpool.gateway.caching.context import ID, Context

log = logging.getLogger(__name__)

SUFFIX = ".json"
UNFINISHED = ".new"


class Files:
    """None of its methods is for the event loop: they wait for the disk."""

    def __init__(self, directory: str | None) -> None:
        """`directory`: made with the first file; None: nothing is kept."""
        self._directory = None if directory is None else Path(directory)
        self._lock: int | None = None

    def load(self) -> list[Context]:
        """All that are there, the oldest first. Raises ConfigError where the directory is not to be had."""
        directory = self._directory
        if directory is None or not directory.exists():
            return []
        try:
            self._take(directory)
            for unfinished in directory.glob(f"*{UNFINISHED}"):
                unfinished.unlink()
            found = [context for file in directory.glob(f"*{SUFFIX}") if (context := _read(file)) is not None]
        except OSError as e:
            raise _unusable(directory, e) from None
        return sorted(found, key=lambda context: (context.created, context.id))

    def write(self, context: Context) -> None:
        """It is on the disk when this returns. Raises OSError, ConfigError."""
        directory = self._directory
        if directory is None:
            return
        self._take(directory)
        file, new = directory / (context.id + SUFFIX), directory / (context.id + UNFINISHED)
        data = msgspec.json.encode(context)
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as out:
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
        new.rename(file)
        self._sync(directory)

    def remove(self, context: Context) -> None:
        """Raises OSError."""
        if self._directory is not None:
            (self._directory / (context.id + SUFFIX)).unlink(missing_ok=True)
            if self._directory.exists():
                self._sync(self._directory)

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _take(self, directory: Path) -> None:
        """Two gateways would each undo what the other does."""
        if self._lock is not None:
            return
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise ConfigError(
                f"another gateway keeps its cached contexts in {directory}: give this one a --caching-dir of its own"
            ) from None
        except BaseException:
            os.close(lock)
            raise
        self._lock = lock

    def _sync(self, directory: Path) -> None:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _read(file: Path) -> Context | None:
    """None for what is none: it is left where it is."""
    with contextlib.suppress(msgspec.MsgspecError, OSError):
        context = msgspec.json.decode(file.read_bytes(), type=Context)
        if context.id == file.name.removesuffix(SUFFIX) and ID.fullmatch(context.id) and len(context.tokens) % 4 == 0:
            return context
    log.error("%s is no cached context of this version, or damaged: passed over; remove it", file)
    return None


def _unusable(directory: Path, error: OSError) -> ConfigError:
    why = error.strerror or error
    return ConfigError(f"--caching-dir {directory}: {why}; give another, or `off`")
