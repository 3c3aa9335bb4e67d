"""What stages of a pipeline have in common: giving hidden states to the next one, and seeing that one is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from moonpool.core.vocabulary import Incarnation, PartId, Peer
from moonpool.engine.engine import Bytes
from moonpool.errors import TransferError
from moonpool.live.worker import in_thread
from moonpool.messenger.intake import SLOTS, Outlet
from moonpool.messenger.tcp import TcpMessenger
from moonpool.wire.link import Link
from moonpool.wire.membership import Absences, Membership
from moonpool.wire.messages import IntakeAddress, PassOn

LOOK_SECONDS = 0.1
SLOT_SECONDS = 120.0
"""The most that a stage may take for a step before the one behind it thinks it stuck."""


class Neighbours:
    """Peers that this process depends on, in the fleet as last heard."""

    def __init__(self, membership: Membership, peers: Sequence[Peer]) -> None:
        self._membership = membership
        self._peers = tuple(peers)
        self._seen_by: dict[Peer, Incarnation] = {}
        """The Conductor that had it in its fleet."""
        self._absences = Absences()

    async def lost(self) -> Peer:
        """Returns the first one that has left, or is there with another incarnation.

        A Conductor that has had it says so at once; with a new one it has some seconds to register.
        """
        loop = asyncio.get_running_loop()
        while True:
            gone = self._gone(loop.time())
            if gone is not None:
                return gone
            await asyncio.sleep(LOOK_SECONDS)

    def _gone(self, now: float) -> Peer | None:
        there = self._membership.there()
        successors = {peer.id for peer in there}
        conductor = self._membership.conductor.incarnation
        absent: set[Peer] = set()
        for peer in self._peers:
            if peer in there:
                self._seen_by[peer] = conductor
            elif peer.id in successors or (self._membership.is_answered and self._seen_by.get(peer) == conductor):
                return peer
            else:
                absent.add(peer)
        return next(iter(self._absences.over(absent, now)), None)


class Onward:
    """To the next stage: what this one has made of each step, in the order of the steps."""

    def __init__(
        self, link: Link, group: Incarnation, to: Peer, intake: IntakeAddress, here: PartId, messenger: TcpMessenger
    ) -> None:
        """`here`: the node on this host. Raises TransferError where the next stage cannot be reached."""
        self._link = link
        self._to = to
        self._outlet = Outlet(group, intake, here, messenger)
        self._free = asyncio.Semaphore(SLOTS)

    def taken(self, serial: int) -> None:
        self._free.release()

    async def carry(self, step: PassOn, hidden: Bytes | None) -> None:
        """Returns when it is there. Raises TransferError where that is not in time."""
        try:
            async with asyncio.timeout(SLOT_SECONDS):
                await self._free.acquire()
        except TimeoutError:
            raise TransferError(f"{self._to.id} has taken no step for {SLOT_SECONDS:g} s") from None
        if hidden is not None:
            await in_thread(self._outlet.put, step.serial, hidden, SLOT_SECONDS)
        self._link.post(self._to, step)
