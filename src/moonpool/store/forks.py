"""Clients and fork(): the child has the same sockets, and what both read from them would be each other's answers."""

from __future__ import annotations

import os
import weakref
from typing import Protocol

from moonpool.errors import PoolError


class Forgetting(Protocol):
    def forget(self) -> None:
        """Close the descriptors, without a word to the node: they are another process's, which goes on using them."""
        ...


_all: weakref.WeakSet[Forgetting] = weakref.WeakSet()


class Maker:
    """The process that made a client."""

    def __init__(self) -> None:
        self._process = os.getpid()

    @property
    def is_other(self) -> bool:
        return os.getpid() != self._process

    def check(self) -> None:
        """Raises PoolError in any process but that."""
        if os.getpid() != self._process:
            raise PoolError(f"this client was made in another process ({self._process}): connect again after a fork")


def forget_in_children(client: Forgetting) -> None:
    """A child would else keep the connections, and all that is leased by them, beyond its parent's death."""
    _all.add(client)


def _forget() -> None:
    for client in list(_all):
        client.forget()
    _all.clear()


os.register_at_fork(after_in_child=_forget)
