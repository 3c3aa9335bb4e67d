"""Which process is at the other end of a Unix socket, and whether the node may end it.

The process is held by a pidfd, so a signal never reaches another one that got the same number later. A node may kill
only what its own supervisor started: a child of the node's parent that holds the pipe by which the supervisor's
children notice its end, where the parent holds that pipe too. All three are facts of the kernel that a user's program
does not have by accident: one that happens to have the same parent (process 1 of a container adopts orphans) has not
got the pipe, and one that inherited the pipe from a worker has another parent.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import struct
from pathlib import Path

log = logging.getLogger(__name__)

_CREDENTIALS = struct.Struct("3i")
_PROC = Path("/proc")


def credentials(sock: socket.socket) -> tuple[int, int]:
    """Process and user at the other end, as they were when it connected."""
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, _ = _CREDENTIALS.unpack(data)
    return process, user


class Holder:
    """The process of one client. Close it."""

    def __init__(self, sock: socket.socket, life_fd: int | None) -> None:
        """`life_fd`: the pipe from this node's supervisor; None where nobody supervises it."""
        self.process, _ = credentials(sock)
        self.killed = False
        self._pidfd: int | None = None
        with contextlib.suppress(OSError):
            self._pidfd = os.pidfd_open(self.process)
        # The socket is still open at the other end, so its process lived when the pidfd was made: they are the same.
        if self._pidfd is not None and _hung_up(sock):
            self.close()
        self.is_supervised = (
            self._pidfd is not None
            and life_fd is not None
            and self.process != os.getpid()
            and _is_sibling(self.process, life_fd)
            and not self.is_dead
        )
        """The node's supervisor started it, so the node may kill it."""

    @property
    def is_dead(self) -> bool:
        """Proven, not guessed."""
        return self._pidfd is not None and bool(_poll(self._pidfd, select.POLLIN))

    def kill(self) -> None:
        """SIGKILL, at once and to this process alone. Only a supervised one."""
        assert self.is_supervised
        assert self._pidfd is not None
        self.killed = True
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def close(self) -> None:
        fd, self._pidfd = self._pidfd, None
        if fd is not None:
            os.close(fd)


def _hung_up(sock: socket.socket) -> bool:
    return bool(_poll(sock.fileno(), select.POLLRDHUP) & (select.POLLHUP | select.POLLRDHUP | select.POLLERR))


def _poll(fd: int, events: int) -> int:
    poll = select.poll()
    poll.register(fd, events)
    return sum(found for _, found in poll.poll(0))


def _is_sibling(process: int, life_fd: int) -> bool:
    """Where the kernel does not let us look, the answer is no."""
    parent = os.getppid()
    try:
        pipe = str((_PROC / "self" / "fd" / str(life_fd)).readlink())
        return (
            pipe.startswith("pipe:")
            and _parent(process) == parent
            and _has_open(process, pipe)
            and _has_open(parent, pipe)
        )
    except (OSError, ValueError) as e:
        log.debug("process %d counts as nobody's: %s", process, e)
        return False


def _parent(process: int) -> int:
    # The name, in parentheses, may hold anything; what follows its end does not.
    return int((_PROC / str(process) / "stat").read_text().rpartition(")")[2].split()[1])


def _has_open(process: int, pipe: str) -> bool:
    for link in (_PROC / str(process) / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if str(link.readlink()) == pipe:
                return True
    return False
