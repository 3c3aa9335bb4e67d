"""Ctrl-C, and `kill -INT`, end every command, however it was started."""

from __future__ import annotations

import signal


def heed_interrupts() -> None:
    """A shell without job control starts what it puts into the background with SIGINT ignored, which whatever that
    starts inherits. Scripts that end a server by it would wait for ever."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
