"""Who makes way for a request of a sooner rank: queued work that has not begun, and batch work wherever it is.

Queued work is refused, and told so; batch work is placed again, with all that it has produced.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from moonpool.core.admission import Refusal, clamp_retry
from moonpool.core.classes import BATCH, is_batch, kept
from moonpool.core.endings import Endings
from moonpool.core.fleet import DecodeLoad, Fleet, Share
from moonpool.core.options import booked_pages
from moonpool.core.requests import Phase, Request, Requests
from moonpool.core.settings import ConductorConfig, of_class
from moonpool.core.vocabulary import RejectReason, RequestId


class Displacing:
    def __init__(self, config: ConductorConfig, fleet: Fleet, requests: Requests, endings: Endings) -> None:
        self._config = config
        self._fleet = fleet
        self._requests = requests
        self._endings = endings

    def make_room(self, request: Request, now: float) -> bool:
        """On the decode instance where the fewest have to go. False: nowhere is it enough, and nobody went."""
        if self._requests.newest_behind(request.priority.rank) is None:
            return False
        fewest: list[Request] | None = None
        for load in self._fleet.decode_for(request.arrived.model):
            found = self._enough(load, request)
            if found and (fewest is None or len(found) < len(fewest)):
                fewest = found
        for victim in fewest or ():
            self.displace(victim, request, now)
        return fewest is not None

    def make_way(self, load: DecodeLoad, request: Request, now: float) -> None:
        """Batch work that has no room any more, now that `request` has a place there, the newest first."""
        while load.is_over and load.taken(BATCH.rank):
            newest = next((id_ for id_, share in reversed(load.assigned.items()) if share.rank == BATCH.rank), None)
            victim = None if newest is None else self._requests.get(newest)
            if victim is None:
                return
            self.displace(victim, request, now)

    def clear_batch(self, load: DecodeLoad, request: Request, now: float) -> bool:
        """All of it. False: there is none."""
        found = [id_ for id_, share in load.assigned.items() if share.rank == BATCH.rank]
        victims = [victim for id_ in found if (victim := self._requests.get(id_)) is not None]
        for victim in victims:
            self.displace(victim, request, now)
        return bool(victims)

    def clear_queued(
        self, load: DecodeLoad, request: Request, fits: Callable[[Collection[RequestId]], bool], now: float
    ) -> bool:
        """Queued work of later ranks that is to be decoded there, as much as it takes for `request` to fit.

        `fits`: whether it does without these. False: it never does, and nobody went.
        """
        gone: dict[RequestId, Request] = {}
        for victim, _ in self._behind(load, request):
            gone[victim.id] = victim
            if fits(gone):
                for each in gone.values():
                    self.displace(each, request, now)
                return True
        return False

    def displace(self, victim: Request, request: Request, now: float) -> None:
        of_class(self._endings.decisions, victim.priority.name).displaced += 1
        whose = f"a request of class {request.priority.name}"
        if is_batch(victim.priority) and victim.placement is not None:
            self._endings.fail(victim, "displaced", f"it made way for {whose}", now)
            return
        placed = victim.placement
        load = self._fleet.prefill.get(placed.choice.prefill.id) if placed is not None else None
        wait = load.seconds(now) if load is not None else now - victim.first_arrived_at
        message = f"it was queued in class {victim.priority.name} and made way for {whose}; retry later"
        self._endings.reject(victim, Refusal(RejectReason.DISPLACED, message, clamp_retry(wait)), now)

    def _enough(self, load: DecodeLoad, request: Request) -> list[Request] | None:
        """So many that it has room, the last rank and the newest first; None where all are not enough."""
        capacity, free = load.part.capacity, 1.0 - kept(request.sooner, load.taken)
        pages = load.committed_pages + booked_pages(request, load.space, self._config.output_share)
        pages -= int(capacity.pages * free)
        slots = 0
        if capacity.slots:
            slots = load.batch + 1 - int(capacity.slots * (1 + self._config.batch_ahead) * free)
        found: list[Request] = []
        for victim, share in self._behind(load, request):
            if pages <= 0 and slots <= 0:
                break
            found.append(victim)
            pages -= share.pages
            slots -= 1
        return found if pages <= 0 and slots <= 0 else None

    def _behind(self, load: DecodeLoad, request: Request) -> list[tuple[Request, Share]]:
        """Those of later ranks that have not begun, as far as that is known here: the first of a queue probably has, in
        order of arrival or of rank."""
        first = {each for p in self._fleet.prefill.values() for each in (next(iter(p.queue), None), p.head)}
        found = []
        for id_, share in reversed(load.assigned.items()):
            victim = self._requests.get(id_) if share.rank > request.priority.rank else None
            if victim is not None and victim.phase in (Phase.ROOM, Phase.PREFILL) and id_ not in first:
                found.append((victim, share))
        return sorted(found, key=lambda pair: -pair[1].rank)
