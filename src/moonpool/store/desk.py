"""The node's front desk: what it answers to clients of the pool API, whichever way they ask (docs/protocol.md)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence

from moonpool.core.vocabulary import BlockKey, KeySpace, KeySpaceId
from moonpool.errors import PoolError
from moonpool.messenger.questions import (
    BUSY,
    LEASED,
    NO,
    PINNED,
    YES,
    CountHolders,
    DescribeBlocks,
    Described,
    Enter,
    Entered,
    Exists,
    Marks,
    Numbers,
    Pin,
    Question,
    Refused,
    Remove,
    Reply,
    Stock,
    TakeStock,
    Unpin,
    marks,
    unpacked,
)
from moonpool.store.catalogue import HERE, Place
from moonpool.store.gather import Gatherer
from moonpool.store.ledger import Ledger
from moonpool.store.loader import Hold
from moonpool.store.neighbours import Neighbours

ANSWER_SECONDS = 5.0
"""The most that a question about blocks elsewhere takes."""
BUSY_SECONDS = 1.0
"""How long a removal waits for the SSD to be through with a block."""
LEAVING_SECONDS = 0.5
"""And for a reader: one that is far away has its bytes a moment before its lease ends here."""
RETRY_SECONDS = 0.005
ROUND_SECONDS = 0.05
ROUNDS = 16
"""In which a removal asks the other nodes, at most: usually once, and once more where some had a copy."""
DIRECTORY_SECONDS = 0.05
FORGET_SECONDS = 0.5
"""How long a removal waits, at most, for the directory: what is put anew meanwhile stays there."""
REFUSED = (LEASED, PINNED, BUSY)


class Desk:
    """`ready`, `answer_now` may be called from any thread; the coroutines run on the node's loop."""

    def __init__(
        self,
        entered: Entered,
        ledger: Ledger,
        gatherer: Gatherer,
        neighbours: Neighbours,
        measure: Callable[[], dict[str, float]],
    ) -> None:
        self._entered = entered
        self._ledger = ledger
        self._gatherer = gatherer
        self._neighbours = neighbours
        self._measure = measure

    def is_ready(self, space: KeySpaceId, keys: Sequence[BlockKey], waits: bool) -> bool:
        """Nothing needs to be brought: all of it can be leased now, or is nowhere to be had."""
        places = set(self._ledger.catalogue.places(space, keys)) - {Place.DRAM}
        if not places:
            return True
        return self._neighbours.is_alone and Place.SSD not in places and not (waits and Place.FILLING in places)

    async def bring(self, space: KeySpace, keys: Sequence[BlockKey], seconds: float, waits: bool) -> Hold:
        """Get into DRAM what can be got in so many seconds: from an SSD, from another node, and, if `waits`, what
        somebody is writing now. It stays there until the hold is closed."""
        return await self._gatherer.bring(space, keys, seconds, waits)

    def answer_now(self, question: Question) -> Reply | None:
        """None where that takes more than a look into this node's books: then `answer` is needed."""
        try:
            match question:
                case Exists():
                    return self._exist_here(question)
                case Enter():
                    return self._entered
                case Unpin(space=space, keys=keys):
                    return marks(self._ledger.pins.unpin([(space, key) for key in unpacked(keys)]))
                case DescribeBlocks(space=space, keys=keys):
                    return Described(tuple(self._ledger.catalogue.describe(space, unpacked(keys))))
                case TakeStock():
                    return Stock(self._measure())
                case _:
                    return None
        except PoolError as e:
            return Refused(str(e))

    async def answer(self, question: Question) -> Reply:
        if (reply := self.answer_now(question)) is not None:
            return reply
        try:
            match question:
                case Exists(space=space, keys=keys):
                    holders = await self._neighbours.holders(space, unpacked(keys), ANSWER_SECONDS)
                    here = self._ledger.catalogue.places(space, unpacked(keys))
                    pairs = zip(here, holders, strict=True)
                    return marks(place in HERE or bool(others) for place, others in pairs)
                case CountHolders(space=space, keys=keys, copies=0):
                    return await self._count(space.id, unpacked(keys))
                case CountHolders(space=space, keys=keys, copies=copies):
                    return await self._replicate(space, unpacked(keys), copies)
                case Pin():
                    return await self._pin(question)
                case Remove():
                    return await self._remove(question)
                case _:
                    return Refused(f"{type(question).__name__} is no question for a node")
        except PoolError as e:
            return Refused(str(e))

    def _exist_here(self, question: Exists) -> Marks | None:
        here = [place in HERE for place in self._ledger.catalogue.places(question.space, unpacked(question.keys))]
        return marks(here) if all(here) or question.here or self._neighbours.is_alone else None

    async def _count(self, space: KeySpaceId, keys: Sequence[BlockKey]) -> Numbers:
        others = await self._neighbours.holders(space, keys, ANSWER_SECONDS)
        here = self._ledger.catalogue.places(space, keys)
        return Numbers(tuple((place in HERE) + len(nodes) for place, nodes in zip(here, others, strict=True)))

    async def _replicate(self, space: KeySpace, keys: Sequence[BlockKey], copies: int) -> Numbers:
        """What was put a moment ago may not be in the directory yet: that is waited for."""
        until = time.monotonic() + ANSWER_SECONDS
        while True:
            numbers = await self._neighbours.replicate(space, keys, copies, until - time.monotonic())
            here = self._ledger.catalogue.places(space.id, keys)
            is_behind = any(place in HERE and not number for place, number in zip(here, numbers, strict=True))
            if not is_behind or time.monotonic() >= until:
                return Numbers(tuple(numbers))
            await asyncio.sleep(DIRECTORY_SECONDS)

    async def _pin(self, question: Pin) -> Marks:
        space, keys = question.space, unpacked(question.keys)
        with await self.bring(space, keys, ANSWER_SECONDS, False):
            names = [(space.id, key) for key in keys]
            return marks(self._ledger.pins.pin(names, time.monotonic() + question.ttl))

    async def _remove(self, question: Remove) -> Marks:
        space, keys = question.space, unpacked(question.keys)
        catalogue, began = self._ledger.catalogue, time.monotonic()
        outcomes = catalogue.remove(space, keys)
        # Who drops a surplus copy waits for no reader: it was not read a moment ago by whoever asks.
        waits = {BUSY: BUSY_SECONDS} | ({} if question.here else {LEASED: LEAVING_SECONDS})
        while passing := _passing(outcomes, waits, time.monotonic() - began):
            await asyncio.sleep(RETRY_SECONDS)
            again = iter(catalogue.remove(space, [keys[at] for at in passing]))
            outcomes = [next(again) if at in passing else outcome for at, outcome in enumerate(outcomes)]
        if question.here:
            return marks(outcomes)
        if not self._neighbours.is_alone:
            await self._remove_elsewhere(space, keys, outcomes)
            await self._forgotten(space, [key for key, mark in zip(keys, outcomes, strict=True) if mark == YES])
        return marks(outcomes)

    async def _forgotten(self, space: KeySpaceId, keys: Sequence[BlockKey]) -> None:
        """Wait until the directory, which other nodes' clients ask, has heard that they are gone: some 20 ms."""
        until = time.monotonic() + FORGET_SECONDS
        while keys and (left := until - time.monotonic()) > 0:
            holders = await self._neighbours.known(space, keys, left)
            keys = [key for key, nodes in zip(keys, holders, strict=True) if nodes]
            if keys:
                await asyncio.sleep(RETRY_SECONDS)

    async def _remove_elsewhere(self, space: KeySpaceId, keys: Sequence[BlockKey], outcomes: list[int]) -> None:
        """From all other nodes, until none of them has it: one may get it from another that was not asked yet.

        `outcomes`: what has become of it here; then, of it in the pool.
        """
        until = time.monotonic() + ANSWER_SECONDS
        reader_until = time.monotonic() + LEAVING_SECONDS
        asked, removed = list(range(len(keys))), [outcome == YES for outcome in outcomes]
        for _ in range(ROUNDS):
            some = [keys[at] for at in asked]
            theirs = await self._neighbours.remove(space, some, max(0.0, until - time.monotonic()))
            # This node, too, may have got it meanwhile.
            mine = self._ledger.catalogue.remove(space, some)
            for at, here, there in zip(asked, mine, theirs, strict=True):
                removed[at] |= YES in (here, there)
                refusal = here if here in REFUSED else there
                outcomes[at] = refusal if refusal in REFUSED else YES if removed[at] else NO
            is_late = time.monotonic() >= reader_until
            asked = [
                at
                for at, here, there in zip(asked, mine, theirs, strict=True)
                if YES in (here, there) or (outcomes[at] in (LEASED, BUSY) and not is_late)
            ]
            if not asked:
                return
            if any(outcomes[at] in (LEASED, BUSY) for at in asked):
                await asyncio.sleep(ROUND_SECONDS)


def _passing(outcomes: Sequence[int], waits: Mapping[int, float], waited: float) -> dict[int, None]:
    """Those, by their place, whose refusal is waited for still. `waits`: for how long each kind is."""
    return {at: None for at, outcome in enumerate(outcomes) if waited < waits.get(outcome, 0.0)}
