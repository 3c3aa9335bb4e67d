"""Two processes that both say they are one node: the one that lives has the id (DESIGN §4, incarnations).

A node that restarts has another incarnation, and what it held before is gone: it takes its own place at once where the
last one cannot live any more, since it has got its socket or port, or where nothing has been heard of that one lately.
Else the last one's heartbeats decide. It lives: the other is refused. It does not: the other takes its place.
"""

from __future__ import annotations

from moonpool.core.events import Registered
from moonpool.core.fleet import Fleet, Part
from moonpool.core.vocabulary import Incarnation, PartId, PartKind, Peer

QUIET_SECONDS = 1.25
"""Two heartbeats, and some: who has said nothing for so long makes way."""
PROOF_SECONDS = 0.25
"""What comes this soon after the other's registration may have been under way when its sender died."""
TRIAL_SECONDS = 5.0
"""Silence is loss after so long: who speaks sooner was only slow, and has its place back."""
_EVERY_ADDRESS = ("0.0.0.0", "[::]", "::")


class Contests:
    def __init__(self) -> None:
        self._claims: dict[PartId, tuple[Registered, float]] = {}
        """Who wants the place of a node that may live, and since when."""
        self._ousted: dict[PartId, tuple[Peer, float]] = {}
        """Who has lost its place to another, and when."""

    def may_replace(self, known: Part, event: Registered, now: float) -> bool:
        """Whether this process may take the place of `known`, another process of its id; else its claim is kept."""
        if event.kind is PartKind.NODE and known.kind is PartKind.NODE and not event.private:
            is_gone = _took_over(known.registered, event) or now - known.heard_at >= QUIET_SECONDS
            if not is_gone:
                self._claims[known.id] = event, now
                return False
            self._ousted[known.id] = known.peer, now
        self._claims.pop(known.id, None)
        return True

    def refused_by(self, known: Part, now: float) -> Peer | None:
        """A heartbeat of `known` has come: who claimed its place, and does not get it."""
        claim = self._claims.get(known.id)
        if claim is None or now - claim[1] < PROOF_SECONDS:
            return None
        del self._claims[known.id]
        return claim[0].peer

    def returning(self, id_: PartId, incarnation: Incarnation, now: float) -> Peer | None:
        """A heartbeat has come of a process that is not in the fleet: the same, if its place was taken too soon."""
        peer, at = self._ousted.get(id_, (None, 0.0))
        if peer is None or peer.incarnation != incarnation or not PROOF_SECONDS <= now - at < TRIAL_SECONDS:
            return None
        del self._ousted[id_]
        return peer

    def withdraw(self, id_: PartId, incarnation: Incarnation) -> None:
        """This process is gone."""
        claim = self._claims.get(id_)
        if claim is not None and claim[0].peer.incarnation == incarnation:
            del self._claims[id_]

    def ripe(self, fleet: Fleet, now: float) -> list[Registered]:
        """The claims whose time has come: to places that are free, or whose holder has been quiet for long."""
        self._ousted = {id_: (peer, at) for id_, (peer, at) in self._ousted.items() if now - at < TRIAL_SECONDS}
        ripe = [
            event
            for id_, (event, _) in self._claims.items()
            if (known := fleet.parts.get(id_)) is None or now - known.heard_at >= QUIET_SECONDS
        ]
        for event in ripe:
            del self._claims[event.peer.id]
        return ripe

    def next_at(self, fleet: Fleet) -> float | None:
        """When to look for `ripe` ones next."""
        heard = [known.heard_at for id_ in self._claims if (known := fleet.parts.get(id_)) is not None]
        return min(heard) + QUIET_SECONDS if heard else None


def _took_over(before: Registered, now: Registered) -> bool:
    """Whether it has got what only one process can have: then the one before is dead."""
    hosts = [event.data_address.rpartition(":")[0] for event in (before, now)]
    if not hosts[0] or hosts[0] != hosts[1] or hosts[0] in _EVERY_ADDRESS:
        return False
    has_socket = bool(now.socket_path) and now.socket_path == before.socket_path
    return has_socket or now.data_address == before.data_address
