"""Whether a secret is right: scrypt, off the event loop, once for each key; then a digest that takes a microsecond."""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from moonpool.gateway.keys.secret import is_hash_of

THREADS = max(1, min(4, (os.cpu_count() or 1) // 2))
MOST = 32
"""Hashes that are computed or wait for it."""
MOST_OF_ONE = 4
"""Of those, for one key: whoever tries secrets of one key keeps no other out."""
CHECK_SECONDS = 10.0
WEIGHT = 0.1


class BusyError(Exception):
    """`wait`: seconds after which it is worth asking again."""

    def __init__(self, wait: float) -> None:
        super().__init__(f"busy for {wait:g} s")
        self.wait = wait


class Checks:
    """To be used on one event loop."""

    def __init__(self) -> None:
        self._secret = os.urandom(32)
        self._pool = ThreadPoolExecutor(THREADS, "keys")
        self._running: dict[tuple[str, bytes], asyncio.Future[bool]] = {}
        """By hash and digest: who asks the same waits for the same."""
        self._seconds = 0.05
        """That a hash takes, averaged."""

    def digest(self, key: str) -> bytes:
        """What may be remembered of a key: of no use to anybody but this process."""
        return hashlib.blake2b(key.encode(), key=self._secret, digest_size=32).digest()

    async def is_right(self, hashed: str, key: str, digest: bytes) -> bool:
        """`digest` is the key's. Raises BusyError where too much is being computed."""
        which = hashed, digest
        running = self._running.get(which)
        if running is None:
            same = sum(other == hashed for other, _ in self._running)
            if len(self._running) >= MOST or same >= MOST_OF_ONE:
                raise BusyError(len(self._running) * self._seconds / THREADS)
            running = asyncio.get_running_loop().run_in_executor(self._pool, is_hash_of, hashed, key)
            self._running[which] = running
            running.add_done_callback(partial(self._ended, which, time.monotonic()))
        await asyncio.wait((running,), timeout=CHECK_SECONDS)
        if not running.done():
            raise BusyError(CHECK_SECONDS)
        return running.result()

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def check_integrity(self) -> None:
        assert len(self._running) <= MOST, f"{len(self._running)} keys are being checked, the limit is {MOST}"

    def _ended(self, which: tuple[str, bytes], began: float, done: asyncio.Future[bool]) -> None:
        del self._running[which]
        self._seconds += WEIGHT * (time.monotonic() - began - self._seconds)
