"""Who holds a part of the arena for longer than its time. Pure: the caller brings the clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from moonpool.store.rooms import ClientId


class Kind(Enum):
    LEASE = "lease"
    CACHING_ROOM = "caching room"
    HAND_OVER_ROOM = "hand-over room"


@dataclass(frozen=True, slots=True)
class Holding:
    """One lease or room, and the local clients that may read or write it."""

    kind: Kind
    id: int
    clients: tuple[ClientId, ...]
    expires: float | None = None
    """Of a hand-over room, in the caller's clock: its request is over then."""


@dataclass(slots=True)
class Overdue:
    """Ages are counted from the first look that saw a holding, so they are never overestimated.

    - A hand-over room is overdue `grace` seconds after its request's deadline: its clients have been told by then.
    - A lease is overdue after `lease_seconds`: a worker holds one for as long as a copy takes.
    - A caching room lasts as long as a prompt's computation, for which there is no bound; so it is overdue only where
      its client has said nothing at all for `lease_seconds`.
    """

    lease_seconds: float
    grace: float
    _seen: dict[tuple[Kind, int], float] = field(default_factory=dict)

    def look(self, holdings: Sequence[Holding], heard: Mapping[ClientId, float], now: float) -> dict[ClientId, str]:
        """The clients to be ended, each with what it has held too long. `heard`: when each client said something."""
        self._seen = {(h.kind, h.id): self._seen.get((h.kind, h.id), now) for h in holdings}
        late: dict[ClientId, str] = {}
        for holding in holdings:
            for client in holding.clients:
                if client in heard and client not in late and self._is_late(holding, heard[client], now):
                    late[client] = f"{holding.kind.value} {holding.id}"
        return late

    def _is_late(self, holding: Holding, heard: float, now: float) -> bool:
        age = now - self._seen[holding.kind, holding.id]
        match holding.kind:
            case Kind.HAND_OVER_ROOM:
                return holding.expires is not None and now > holding.expires + self.grace
            case Kind.LEASE:
                return age > self.lease_seconds
            case Kind.CACHING_ROOM:
                return age > self.lease_seconds and now - heard > self.lease_seconds
