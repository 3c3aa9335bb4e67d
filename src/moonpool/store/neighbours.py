"""The other nodes of the cluster, as a node sees them: which has which block, by the Conductor's directory."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from itertools import count

from moonpool.core.actions import FleetChanged, ReplicasOrdered
from moonpool.core.events import ReplicasWanted
from moonpool.core.replication import KEYS_A_QUESTION as KEYS_TO_COPY
from moonpool.core.vocabulary import BlockKey, KeySpace, KeySpaceId, NodePeer, Peer
from moonpool.errors import PoolError, TransferError
from moonpool.messenger.asking import ask
from moonpool.messenger.channel import Channel
from moonpool.messenger.questions import LEASED, NO, YES, Marks, Remove, packed
from moonpool.messenger.tcp import TcpMessenger
from moonpool.wire.link import Link
from moonpool.wire.messages import Locate, Located

log = logging.getLogger(__name__)

LOCATE_SECONDS = 1.0
SILENCE_SECONDS = 5.0
"""After an answer that did not come the Conductor is not asked for so long: everybody would wait for nothing."""
PASSING_SECONDS = 1.0
"""What a removal waits for a node that, as far as the directory knows, has nothing of it."""
KEYS_A_QUESTION = 2048
MAX_OUTSTANDING = 1024


class Neighbours:
    """On the node's loop; `is_alone` may be read from any thread."""

    def __init__(
        self,
        link: Link,
        messenger: TcpMessenger,
        fleet: Callable[[], FleetChanged | None],
        conductor: Callable[[], Peer],
    ) -> None:
        self._link = link
        self._messenger = messenger
        self._fleet = fleet
        self._conductor = conductor
        self._serials = count(1)
        self._asked: dict[int, asyncio.Future[Located]] = {}
        self._ordered: dict[int, asyncio.Future[ReplicasOrdered]] = {}
        self._silent_until = 0.0

    @property
    def is_alone(self) -> bool:
        """Nobody else is there who could have a block."""
        fleet, me = self._fleet(), self._link.me
        return fleet is None or all(node.id == me.id for node in fleet.nodes)

    def is_there(self, node: NodePeer) -> bool:
        """In the fleet, as far as this node has heard."""
        fleet = self._fleet()
        return fleet is None or any(node.id == n.id and node.incarnation == n.incarnation for n in fleet.nodes)

    def conductor_is_new(self) -> None:
        """It may be asked, whatever the last one was like."""
        self._silent_until = 0.0

    def heard(self, answer: Located | ReplicasOrdered) -> None:
        if isinstance(answer, Located):
            asked = self._asked.pop(answer.serial, None)
            if asked is not None and not asked.done():
                asked.set_result(answer)
            return
        ordered = self._ordered.pop(answer.serial, None)
        if ordered is not None and not ordered.done():
            ordered.set_result(answer)

    async def holders(self, space: KeySpaceId, keys: Sequence[BlockKey], seconds: float) -> list[tuple[NodePeer, ...]]:
        """Of each block the other nodes that have it; none where the Conductor does not answer in time."""
        me = self._link.me.id
        found = await self.known(space, keys, seconds)
        return [tuple(node for node in nodes if node.id != me) for nodes in found]

    async def known(self, space: KeySpaceId, keys: Sequence[BlockKey], seconds: float) -> list[tuple[NodePeer, ...]]:
        """As `holders`, with this node among them where the directory knows it to have the block."""
        found: list[tuple[NodePeer, ...]] = []
        until = time.monotonic() + seconds
        for start in range(0, len(keys), KEYS_A_QUESTION):
            found += await self._locate(space, keys[start : start + KEYS_A_QUESTION], until)
        return found

    async def remove(self, space: KeySpaceId, keys: Sequence[BlockKey], seconds: float) -> list[int]:
        """Remove these blocks from all other nodes; for each key YES, NO or why one of them refused.

        The directory is behind by what came a moment ago, so all are asked. Raises PoolError where one that has some of
        them, as far as the directory knows, is not reached; another one's copies are as lost as it is.
        """
        until = time.monotonic() + seconds
        found = await self.holders(space, keys, seconds)
        known = {node.id for nodes in found for node in nodes}
        fleet = self._fleet()
        others = {node.id: node for node in fleet.nodes if node.id != self._link.me.id} if fleet is not None else {}
        others |= {node.id: node for nodes in found for node in nodes}
        question = Remove(space, packed(keys), here=True)
        limits = [until if id_ in known else min(until, time.monotonic() + PASSING_SECONDS) for id_ in others]
        transfers = [
            asyncio.wrap_future(
                self._messenger.carry(node.data_address, _Removal(question, limit), limit - time.monotonic())
            )
            for node, limit in zip(others.values(), limits, strict=True)
        ]
        answers = await asyncio.gather(*transfers, return_exceptions=True)
        outcomes = [NO] * len(keys)
        for id_, marks in zip(others, answers, strict=True):
            if isinstance(marks, TransferError) and id_ not in known:
                log.warning("blocks are removed without asking %s: %s", id_, marks)
            elif isinstance(marks, TransferError):
                raise PoolError(f"not removed from {id_}: {marks}")
            elif isinstance(marks, BaseException):
                raise marks
            else:
                outcomes = [
                    max(mine, theirs) if mine in (NO, YES) else mine
                    for mine, theirs in zip(outcomes, marks, strict=True)
                ]
        return outcomes

    async def replicate(self, space: KeySpace, keys: Sequence[BlockKey], copies: int, seconds: float) -> list[int]:
        """Have each of these blocks on so many nodes; on how many it will be. PoolError without a Conductor."""
        until = time.monotonic() + seconds
        numbers: list[int] = []
        for start in range(0, len(keys), KEYS_TO_COPY):
            part = tuple(keys[start : start + KEYS_TO_COPY])
            serial = next(self._serials)
            waiting = self._ordered[serial] = asyncio.get_running_loop().create_future()
            self._link.post(self._conductor(), ReplicasWanted(self._link.me, serial, space, part, copies))
            try:
                async with asyncio.timeout(max(0.0, until - time.monotonic())):
                    numbers += (await waiting).copies
            except TimeoutError:
                raise PoolError(f"the Conductor, which orders copies, gave no answer within {seconds:.3g} s") from None
            finally:
                self._ordered.pop(serial, None)
        return numbers

    async def _locate(self, space: KeySpaceId, keys: Sequence[BlockKey], until: float) -> list[tuple[NodePeer, ...]]:
        now = time.monotonic()
        nothing: list[tuple[NodePeer, ...]] = [()] * len(keys)
        if self.is_alone or now < self._silent_until or len(self._asked) >= MAX_OUTSTANDING:
            return nothing
        serial = next(self._serials)
        waiting = self._asked[serial] = asyncio.get_running_loop().create_future()
        conductor = self._conductor()
        self._link.post(conductor, Locate(self._link.me, serial, space, packed(keys)))
        try:
            async with asyncio.timeout(min(LOCATE_SECONDS, max(0.0, until - now))):
                answer = await waiting
        except TimeoutError:
            if until - now >= LOCATE_SECONDS and conductor == self._conductor():
                self._silent_until = time.monotonic() + SILENCE_SECONDS
                log.warning("the Conductor says not where blocks are; for %g s only this node's count", SILENCE_SECONDS)
            return nothing
        finally:
            self._asked.pop(serial, None)
        holders: list[tuple[NodePeer, ...]] = answer.holders()
        if len(holders) != len(keys):
            log.warning("the Conductor named the holders of %d blocks, asked for %d", len(holders), len(keys))
            return nothing
        return holders


class _Removal:
    """One question to one node; it may be asked twice."""

    def __init__(self, question: Remove, until: float) -> None:
        self._question = question
        self._until = until

    def __call__(self, channel: Channel) -> bytes:
        reply = ask(channel, self._question, self._until)
        if not isinstance(reply, Marks) or len(reply.marks) * 16 != len(self._question.keys):
            raise TransferError(f"{type(reply).__name__} came as the answer to Remove")
        return bytes(mark if mark in (NO, YES) else max(mark, LEASED) for mark in reply.marks)
