"""When each request of a replay is due: as in the trace, or by a rate, or after the answer that it goes on from."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable, Iterator

import numpy as np
from msgspec import Struct

from moonpool.trace.request import TraceRequest

MOST_SESSIONS = 1 << 17
"""That may still go on; the longest silent are forgotten first."""
MOST_BLOCKS = 1 << 21
"""Ids that are known to have come before."""


class Pace(Struct, frozen=True):
    rate: float | None = None
    """Poisson arrivals, so many a second; None: the trace's own."""
    sessions: bool = False
    """A turn of a conversation waits for the answer to the one before it."""
    think: float = 0.0
    """Mean seconds from that answer's end, drawn exponentially."""


class Turn:
    """One request of a replay."""

    def __init__(self, number: int, due: float, request: TraceRequest, after: Turn | None, think: float) -> None:
        self.number = number
        self.due = due
        """Seconds from the beginning, not before this."""
        self.request = request
        self.after = after
        self.think = think
        self.is_over = asyncio.Event()
        self.ended = 0.0
        """Of the event loop's clock, once it is over."""

    def end(self, now: float) -> None:
        self.ended = now
        self.after = None
        self.is_over.set()


def turns(requests: Iterable[TraceRequest], pace: Pace, block_tokens: int, seed: int) -> Iterator[Turn]:
    """In order of `due`. `seed`: of arrivals by rate and of think times."""
    rng = np.random.default_rng([seed, 0x7475726E])
    sessions, due = _Sessions(block_tokens), 0.0
    for number, request in enumerate(requests):
        due = request.arrival if pace.rate is None else due + float(rng.exponential(1 / pace.rate))
        if not pace.sessions:
            yield Turn(number, due, request, None, 0.0)
            continue
        after = sessions.before(request)
        think = float(rng.exponential(pace.think)) if after is not None and pace.think else 0.0
        turn = Turn(number, due, request, after, think)
        sessions.add(turn)
        yield turn


class _Sessions:
    """A prompt is the next turn of another if it begins with all of that and has more, and if that brought something
    new itself: prompts that only share a preamble or a document are no conversation."""

    def __init__(self, block_tokens: int) -> None:
        self._block = block_tokens
        self._last: OrderedDict[int, Turn] = OrderedDict()
        """By the last whole block of the latest turn."""
        self._seen: OrderedDict[int, None] = OrderedDict()

    def before(self, request: TraceRequest) -> Turn | None:
        whole = request.blocks[: request.input_tokens // self._block]
        for id_ in reversed(whole[:-1]):
            if (found := self._last.get(id_)) is not None:
                return found
        return None

    def add(self, turn: Turn) -> None:
        whole = turn.request.blocks[: turn.request.input_tokens // self._block]
        if whole and whole[-1] not in self._seen:
            self._last[whole[-1]] = turn
            if len(self._last) > MOST_SESSIONS:
                self._last.popitem(last=False)
        for id_ in whole:
            self._seen[id_] = None
        while len(self._seen) > MOST_BLOCKS:
            self._seen.popitem(last=False)
