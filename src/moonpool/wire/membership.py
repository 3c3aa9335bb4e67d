"""How a part joins the cluster and stays in it: registration, heartbeats, counters (docs/protocol.md)."""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import time
from collections.abc import Callable

from moonpool.core.actions import FleetChanged, IdTaken, RegisterAgain
from moonpool.core.events import Registered, Reported
from moonpool.core.vocabulary import Incarnation, PartId, Peer
from moonpool.errors import ConfigError, PeerUnavailableError
from moonpool.wire.link import Link
from moonpool.wire.messages import Counters, Envelope

log = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 0.5
COUNTERS_EVERY = 2
"""Heartbeats between two `Counters`."""
ANSWER_SECONDS = 5.0
ABSENCE_SECONDS = 5.0
JOIN_SECONDS = 60.0


class Absences:
    """Who has been away for ABSENCE_SECONDS: shorter, and it may only be registering with a new Conductor."""

    def __init__(self) -> None:
        self._since: dict[Peer, float] = {}

    def over(self, absent: set[Peer], now: float) -> list[Peer]:
        """Those of `absent` that have been in every call for so long."""
        self._since = {peer: self._since.get(peer, now) for peer in absent}
        return [peer for peer, since in self._since.items() if now - since >= ABSENCE_SECONDS]


class Books:
    """Counts, while a part is at rest, how often its books did not balance (never, one hopes)."""

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check
        self.failures = 0

    def audit(self) -> int:
        """Check now. Returns the failures so far."""
        try:
            self._check()
        except AssertionError:
            self.failures += 1
            log.exception("the books of this process do not balance")
        return self.failures


class Membership:
    """One part's place in the cluster.

    The owner runs `join`, then `run` beside its own receive loop, and gives every envelope to `heard`.
    `conductor` is the Conductor's latest incarnation; a new one is registered with at once.
    """

    def __init__(
        self,
        link: Link,
        conductor_address: str,
        describe: Callable[[], Registered],
        report: Callable[[], Reported],
        counters: Callable[[], dict[str, float]],
    ) -> None:
        self._link = link
        self._describe = describe
        self._report = report
        self._counters = counters
        self._answered = asyncio.Event()
        self._taken_by = Incarnation("")
        self._ousted: asyncio.Future[Peer] | None = None
        """Of who ends when another process has its id."""
        self._registered_again = -math.inf
        """When it was last asked for, and done."""
        self.conductor = Peer(PartId("conductor"), Incarnation(""), conductor_address)
        self.fleet: FleetChanged | None = None
        self.on_joined: Callable[[], None] | None = None
        """Called after each registration that the Conductor answered: nodes announce blocks, workers what has ended."""

    async def join(self, timeout: float = JOIN_SECONDS) -> None:
        """Register and wait for the answer. Raises ConfigError when none comes."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        is_said = False
        while not self._answered.is_set() and loop.time() < deadline:
            try:
                await self._link.send(self._whoever_conducts, self._describe())
                # Not `wait_for`: on Python 3.11 it swallows a cancellation that comes together with the answer.
                async with asyncio.timeout(min(ANSWER_SECONDS, max(0.1, deadline - loop.time()))):
                    await self._answered.wait()
            except (PeerUnavailableError, TimeoutError):
                if not is_said:
                    is_said = True
                    why = await _unknown_host(self.conductor.address)
                    log.warning(
                        "no Conductor answers at %s yet: %s",
                        self.conductor.address,
                        why or "is it running there, with the same cluster token?",
                    )
        if not self._answered.is_set():
            why = await _unknown_host(self.conductor.address)
            raise ConfigError(
                f"no Conductor answered at {self.conductor.address} within {timeout:g} s: "
                f"{why or 'it is not running there, or its cluster token is another one'}"
            )

    async def run(self) -> None:
        """Heartbeats until cancelled."""
        beat = 0
        while True:
            self._link.post(self._whoever_conducts, self._report())
            if beat % COUNTERS_EVERY == 0:
                me = self._link.me
                self._link.post(self._whoever_conducts, Counters(me.id, me.incarnation, self._counters()))
            beat += 1
            await asyncio.sleep(HEARTBEAT_SECONDS)

    def heard(self, envelope: Envelope) -> bool:
        """True if the message was for the membership itself."""
        match envelope.body:
            case FleetChanged():
                self.fleet = envelope.body
                is_new = envelope.sender.incarnation != self.conductor.incarnation
                if is_new:
                    known_before = bool(self.conductor.incarnation)
                    self.conductor = Peer(envelope.sender.id, envelope.sender.incarnation, self.conductor.address)
                    if known_before:
                        log.info("the Conductor has a new incarnation")
                if is_new or not self._answered.is_set():
                    self._answered.set()
                    if self.on_joined is not None:
                        self.on_joined()
                return True
            case RegisterAgain():
                self._begin_anew(envelope.sender)
                return True
            case IdTaken(to=to, by=by):
                if to.incarnation == self._link.me.incarnation:  # else the one at this address before
                    self._id_is_taken(by)
                return True
            case _:
                return False

    async def ousted(self) -> None:
        """Raises ConfigError as soon as another process has this one's id: the cluster does not know this one then."""
        self._ousted = asyncio.get_running_loop().create_future()
        by = await self._ousted
        raise ConfigError(
            f"another process, at {by.address}, is {self._link.me.id} in this cluster: give this one an --id of its "
            "own, or end the other first"
        )

    def _id_is_taken(self, by: Peer) -> None:
        """Said once for each process that takes it."""
        if self._ousted is not None:
            if not self._ousted.done():
                self._ousted.set_result(by)
        elif by.incarnation != self._taken_by:
            self._taken_by = by.incarnation
            log.error(
                "another process, at %s, has joined as %s: the cluster knows this one no more, and gives it nothing to "
                "do; end one of them, and start it again with an --id of its own",
                by.address,
                self._link.me.id,
            )

    def _begin_anew(self, conductor: Peer) -> None:
        """A new Conductor says so to each message that waited for it: one answer to all of them will do."""
        now, is_known = time.monotonic(), conductor.incarnation == self.conductor.incarnation
        if is_known and now < self._registered_again + HEARTBEAT_SECONDS:
            return
        log.info("the Conductor does not know this part: registering again")
        self.conductor = Peer(conductor.id, conductor.incarnation, self.conductor.address)
        self._registered_again = now
        self._answered.clear()
        self.register_again()

    @property
    def is_answered(self) -> bool:
        """Whether `fleet` comes from the Conductor that `conductor` names."""
        return self._answered.is_set()

    def there(self) -> set[Peer]:
        """All parts of the fleet, as last heard."""
        return set() if self.fleet is None else {part.peer for part in self.fleet.parts}

    def register_again(self) -> None:
        """Tell the Conductor what this part is now (its description has changed, or was asked for)."""
        self._link.post(self._whoever_conducts, self._describe())

    @property
    def _whoever_conducts(self) -> Peer:
        """Heartbeats must reach a restarted Conductor too: it answers with `RegisterAgain`."""
        return Peer(self.conductor.id, Incarnation(""), self.conductor.address)


async def _unknown_host(address: str) -> str:
    """Why nobody can be there; empty where the address names a host."""
    host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            await asyncio.get_running_loop().getaddrinfo(host, None)
    except socket.gaierror as e:
        return f"the host {host} is not known here ({e.strerror})"
    except TimeoutError:
        return f"the host {host} is not found: no name server answers"
    return ""
