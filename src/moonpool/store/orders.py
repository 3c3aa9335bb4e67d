"""What the Conductor orders of a node besides rooms: copies, demotions, drops (docs/protocol.md, "Copies").

One order after another, behind whatever requests want: they have a deadline that somebody waits for, orders have not.
"""

from __future__ import annotations

import asyncio
import logging
import time

from moonpool.core.actions import Demote, DropReplica, Replicate
from moonpool.errors import PoolError
from moonpool.messenger.questions import YES, Marks, Remove, packed
from moonpool.store.desk import Desk
from moonpool.store.gather import Gatherer
from moonpool.store.shelf import Shelf

log = logging.getLogger(__name__)

MAX_WAITING = 256

Order = Replicate | Demote | DropReplica


class Orders:
    """On the node's loop."""

    def __init__(self, gatherer: Gatherer, desk: Desk, shelf: Shelf) -> None:
        self._gatherer = gatherer
        self._desk = desk
        self._shelf = shelf
        self._waiting: asyncio.Queue[tuple[Order, float]] = asyncio.Queue(MAX_WAITING)
        self._counts = dict.fromkeys(("replicated_blocks", "dropped_replicas", "orders_lost"), 0)

    def take(self, order: Order) -> None:
        try:
            self._waiting.put_nowait((order, time.monotonic()))
        except asyncio.QueueFull:
            self._counts["orders_lost"] += 1
            log.warning("%s of %d blocks lost: %d orders wait", type(order).__name__, len(order.keys), MAX_WAITING)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            order, since = await self._waiting.get()
            try:
                match order:
                    case Replicate():
                        await self._replicate(order, since)
                    case Demote(space=space, keys=keys):
                        self._shelf.demote(space.id, keys)
                    case DropReplica():
                        await self._drop(order)
            except PoolError as e:
                log.warning("%s of %d blocks refused: %s", type(order).__name__, len(order.keys), e)
            except Exception:
                # The others wait behind it.
                log.exception("%s of %d blocks failed", type(order).__name__, len(order.keys))

    def counters(self) -> dict[str, float]:
        """Since the start; `orders_waiting` now."""
        return {"orders_waiting": float(self._waiting.qsize())} | {n: float(v) for n, v in self._counts.items()}

    async def _replicate(self, order: Replicate, since: float) -> None:
        copied = await self._gatherer.copy(order.source, order.space, order.keys, since + order.time_left)
        self._counts["replicated_blocks"] += copied
        log.info("%d of %d blocks copied from %s", copied, len(order.keys), order.source.id)

    async def _drop(self, order: DropReplica) -> None:
        reply = await self._desk.answer(Remove(order.space.id, packed(order.keys), here=True))
        gone = reply.marks.count(YES) if isinstance(reply, Marks) else 0
        self._counts["dropped_replicas"] += gone
        log.info("%d of %d blocks dropped", gone, len(order.keys))
