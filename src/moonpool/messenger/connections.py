"""The connections of one process to all its peers: a cap, and who gives one up for whom."""

from __future__ import annotations

import threading
from typing import Protocol

from moonpool.messenger.sieve import Sieve


class Endpoint(Protocol):
    """A peer, as far as its connections go. Called with the lock held."""

    @property
    def address(self) -> str: ...

    @property
    def is_busy(self) -> bool:
        """Transfers run or wait."""
        ...

    def close_idle(self) -> int:
        """Close the connections that nothing runs on; their number."""
        ...

    def wake(self) -> None:
        """A connection may be opened now."""
        ...


class Connections:
    """Idle endpoints go by SIEVE when another needs a connection; busy ones are asked to give way.

    One lock for all that Messenger's threads share: what is done under it takes microseconds.
    """

    def __init__(self, most: int) -> None:
        self.lock = threading.RLock()
        self.count = 0
        """Open, or being opened."""
        self.evicted = 0
        """Endpoints whose idle connections were closed to make room."""
        self._most = most
        self._sieve: Sieve[str] = Sieve()
        self._endpoints: dict[str, Endpoint] = {}
        self._wanting: dict[Endpoint, None] = {}

    @property
    def is_wanted(self) -> bool:
        """Whether an endpoint waits for a connection that another has."""
        return bool(self._wanting)

    def use(self, address: str) -> None:
        """A transfer with this endpoint begins."""
        if address in self._sieve:
            self._sieve.touch(address)

    def open(self, endpoint: Endpoint, is_first: bool) -> bool:
        """The right to one more connection. Who gets none and has none is woken when its turn comes."""
        is_next = next(iter(self._wanting), endpoint) is endpoint
        if not is_next or (self.count >= self._most and not self._evict()):
            if is_first:
                self._wanting[endpoint] = None
            return False
        self._wanting.pop(endpoint, None)
        self.count += 1
        self._endpoints[endpoint.address] = endpoint
        if endpoint.address not in self._sieve:
            self._sieve.touch(endpoint.address)
        if self.count < self._most:
            self._wake_next()
        return True

    def close(self, endpoint: Endpoint, is_last: bool) -> None:
        """It has one connection less, or none now."""
        self.count -= 1
        if is_last:
            self._sieve.remove(endpoint.address)
            self._endpoints.pop(endpoint.address, None)
        self._wake_next()

    def give_up(self, endpoint: Endpoint) -> None:
        """It wants no connection any more."""
        if endpoint in self._wanting:
            del self._wanting[endpoint]
            self._wake_next()

    def _wake_next(self) -> None:
        if self._wanting:
            next(iter(self._wanting)).wake()

    def _evict(self) -> bool:
        victim = self._sieve.evict(lambda address: not self._endpoints[address].is_busy)
        if victim is None:
            return False
        endpoint = self._endpoints.pop(victim)
        self.evicted += 1
        self.count -= endpoint.close_idle()
        return True
