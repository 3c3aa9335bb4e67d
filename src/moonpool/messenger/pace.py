"""How long a peer may stand still in the middle of what it sends."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from moonpool.errors import TransferError

STALL_SECONDS = 10.0
"""The most that a peer may stand still while what it sends holds a part of the arena, whatever time the transfer has.
(One that takes nothing for as long has no connection any more: `channel`.)"""
SLOWEST_BYTES = 1 << 20
"""A second: who is slower counts as standing still."""


@contextlib.contextmanager
def moving(nbytes: int, until: float, stalls: int = 1) -> Iterator[float]:
    """Until when so many bytes are to be through. Raises TransferError where it is not the deadline that ends them.

    `stalls`: times that the peer itself may have to wait for as long.
    """
    seconds = stalls * (STALL_SECONDS + nbytes / SLOWEST_BYTES)
    limit = min(until, time.monotonic() + seconds)
    try:
        yield limit
    except TimeoutError:
        if limit == until:
            raise
        raise TransferError(
            f"{nbytes} bytes did not get through within {seconds:.3g} s: the peer stands still"
        ) from None
