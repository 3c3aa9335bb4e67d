"""A peer on this very host: what is right for a network is not for it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
from pathlib import Path

_CONGESTION = b"reno"
"""Always there, and allowed to everybody. What paces its packets (bbr) halves the rate of a large transfer over
loopback, where no link is to be shared."""
_LOAD = Path("/proc/loadavg")
_current_processor = ctypes.PyDLL(None).sched_getcpu


class Neighbour:
    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _CONGESTION)

    @classmethod
    def of(cls, sock: socket.socket) -> Neighbour | None:
        """None where the peer is on another host, or gone already."""
        try:
            is_near = sock.getsockname()[0] == sock.getpeername()[0]
        except OSError:
            return None
        return cls(sock) if is_near else None

    def step_aside(self) -> None:
        """Leave the processor that the peer last sent from, if this thread is on it too.

        The kernel wakes a receiver where the sender runs, and leaves it there while the machine is busy: then each runs
        only while the other waits, at half the rate. Whoever has stepped aside is left where it is, as a rule.
        Where no processor is idle it stays: behind somebody who computes it would wait for milliseconds.
        """
        processor = _current_processor()
        with contextlib.suppress(OSError):
            if self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_INCOMING_CPU) == processor:
                allowed = os.sched_getaffinity(0)
                if len(allowed) > 1 and _is_some_idle():
                    os.sched_setaffinity(0, allowed - {processor})
                    os.sched_setaffinity(0, allowed)


def _is_some_idle() -> bool:
    """Some processor of this machine runs nothing now."""
    running, _, _ = _LOAD.read_text().split()[3].partition("/")
    # This thread is one of those that run; the peer, which shares its processor, may be another.
    return int(running) <= (os.cpu_count() or 1)
