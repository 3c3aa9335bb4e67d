"""The run directory of a cluster: short, private, and cleaned up after the dead.

`<base>/<random>/` holds sockets, the children's configuration and a `lock` file. The supervisor locks it with flock and
its children inherit the descriptor, so the lock is free exactly when the last of them is gone, however they went. A
directory whose lock is free is stale, whatever its name or age; creating and cleaning are serialised by a lock on the
base.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from moonpool.errors import ConfigError

log = logging.getLogger(__name__)

SOCKET_PATH_BYTES = 107
"""AF_UNIX's limit of 108 less the closing NUL."""
LONGEST_NAME_BYTES = 72
"""Room for a part's name and a suffix behind the directory."""
LOCK_SECONDS = 10.0


class RunDirectory:
    """An own, locked directory. `remove` ends it; a process that dies without doing so leaves a stale one."""

    def __init__(self, path: Path, lock_fd: int) -> None:
        self.path = path
        self.lock_fd = lock_fd
        """Inheritable: the directory counts as alive while any process holds it."""

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.close(self.lock_fd)


def create_run_directory(base: Path | None = None) -> RunDirectory:
    """A fresh directory below `base` (default: the user's own), after removing what dead clusters left there."""
    base = default_base() if base is None else base
    _make_private(base)
    with _locked(base / ".lock"):
        for leftover in stale_directories(base):
            log.info("removing what a dead cluster left: %s", leftover)
            shutil.rmtree(leftover, ignore_errors=True)
        path = base / secrets.token_hex(4)
        try:
            path.mkdir(mode=0o700)
            lock_fd = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as e:
            raise ConfigError(f"cannot write to the run directory {base}: {e.strerror}") from None
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return RunDirectory(path, lock_fd)


def stale_directories(base: Path) -> list[Path]:
    """Run directories whose processes are all gone."""
    if not base.is_dir():
        return []
    return sorted(
        path for path in base.iterdir() if path.is_dir() and not path.is_symlink() and _is_free(path / "lock")
    )


def default_base() -> Path:
    """XDG_RUNTIME_DIR/moonpool where that is usable and short, else /tmp/moonpool-<uid>."""
    given = os.environ.get("XDG_RUNTIME_DIR")
    if given:
        runtime = Path(given)
        fits = len(os.fsencode(runtime / "moonpool" / "01234567")) + LONGEST_NAME_BYTES <= SOCKET_PATH_BYTES
        if fits and runtime.is_dir() and runtime.stat().st_uid == os.getuid() and os.access(runtime, os.W_OK | os.X_OK):
            return runtime / "moonpool"
    return Path(f"/tmp/moonpool-{os.getuid()}")


def _make_private(base: Path) -> None:
    """`/tmp` is everyone's: a directory that is another's, or open to others, is refused rather than used."""
    if len(os.fsencode(base)) + 9 + LONGEST_NAME_BYTES > SOCKET_PATH_BYTES:
        raise ConfigError(f"the run directory {base} is too long: socket paths end at {SOCKET_PATH_BYTES} bytes")
    try:
        with contextlib.suppress(FileExistsError):
            base.mkdir(mode=0o700)
        found = base.lstat()
    except OSError as e:
        raise ConfigError(f"cannot make the run directory {base}: {e.strerror}") from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(
            f"{base} is not a directory of this user alone (mode 0700): "
            "remove it, or set XDG_RUNTIME_DIR to a private one"
        )


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Others hold it for milliseconds, while they clean and create."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + LOCK_SECONDS
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ConfigError(f"another process has held {path} for {LOCK_SECONDS:g} s") from None
                time.sleep(0.01)
        yield
    finally:
        os.close(fd)


def _is_free(lock: Path) -> bool:
    """Without a lock file it was being made or removed when its process died: creation holds the base's lock."""
    try:
        fd = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True
