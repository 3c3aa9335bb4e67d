"""Anything else that goes over a connection: a question and its answer, say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from moonpool.messenger.channel import Channel
from moonpool.messenger.waiting import Way

T = TypeVar("T")


class Calling(Generic[T]):
    """Has a connection to itself while it runs. A `waiting.Work`."""

    way = Way.CALL

    def __init__(self, work: Callable[[Channel], T], nbytes: int) -> None:
        """`work` must be repeatable: it is done again where its connection broke."""
        self.nbytes = nbytes
        self._work = work
        self._results: list[T] = []

    def send(self, channel: Channel) -> None:
        pass

    def receive(self, channel: Channel) -> None:
        self._results.append(self._work(channel))

    def result(self) -> T:
        return self._results[-1]

    def rest(self) -> Sequence[Calling[T]]:
        return (self,)

    def is_needed(self) -> bool:
        return True
