"""How attempts and requests end: what they hold is given back, who works on them is told, the gateway learns why."""

from __future__ import annotations

from moonpool.core import actions as act
from moonpool.core.admission import Refusal
from moonpool.core.booking import unbook, unbook_room
from moonpool.core.events import RequestArrived
from moonpool.core.fleet import Fleet, Part
from moonpool.core.requests import AT_WORKERS, Phase, Placement, Request, Requests
from moonpool.core.settings import ConductorConfig, Decisions, count, of_class
from moonpool.core.vocabulary import PartId, PartKind, RejectReason

GRACE_SECONDS = 5.0
"""Past a running request's deadline, in which its gateway should have cancelled it."""
_FIRST_BACKOFF_SECONDS = 0.1
_MOST_BACKOFF_SECONDS = 5.0
DEADLINE = Refusal(RejectReason.DEADLINE, "the request's deadline has passed; allow more time")


class Endings:
    def __init__(self, config: ConductorConfig, fleet: Fleet, requests: Requests, out: list[act.Action]) -> None:
        self.decisions = Decisions()
        self.may_serve = False
        """Something may have come free for those that are held."""
        self._config = config
        self._fleet = fleet
        self._requests = requests
        self._out = out

    def finish(self, request: Request, placed: Placement, pages: int, now: float) -> None:
        """`pages`: how many it held in the end."""
        if request.phase is not Phase.DECODING:
            self.release(request, placed)
        self.freed(request, placed)
        unbook(request, placed, self._fleet, now, pages)
        self.decisions.finished += 1
        of_class(self.decisions, request.priority.name).finished += 1
        self._requests.end(request)

    def cancel(self, request: Request, now: float) -> None:
        self.leave(request, now)
        self.decisions.cancelled += 1
        self._requests.end(request)

    def reject(self, request: Request, refusal: Refusal, now: float) -> None:
        self.leave(request, now)
        self.send_reject(request.arrived, refusal)
        self._requests.end(request)

    def refuse_late(self, request: Request, placed: Placement, refusal: Refusal, now: float) -> None:
        """By its decode instance: what was prefilled for it is wasted."""
        self.decisions.late_refusals += 1
        cached = placed.choice.hit_blocks * placed.space.block_tokens
        self.decisions.late_refused_tokens += request.arrived.prompt_tokens - cached
        self.leave(request, now, reporter=placed.choice.decode.id)
        self.send_reject(request.arrived, refusal)
        self._requests.end(request)

    def send_reject(self, event: RequestArrived, refusal: Refusal) -> None:
        count(self.decisions.rejected, refusal.reason.value)
        of_class(self.decisions, self._requests.classes.of(event.priority).name).rejected += 1
        reason, message, after = refusal.reason, refusal.message, refusal.retry_after
        self._out.append(act.Reject(event.request, event.attempt, event.gateway, reason, message, after))

    def fail(self, request: Request, cause: str, reason: str, now: float, reporter: PartId | None = None) -> None:
        """The attempt is over; the gateway is asked for the next, as long as deadline and attempts allow.

        `cause` is a key of `Decisions.resubmitted`; who is preempted or displaced has not failed.
        """
        self.leave(request, now, reporter)
        failed = cause not in ("preempted", "displaced")
        request.failures += failed
        limit = self._config.max_failed_attempts
        if request.failures >= limit:
            message = f"{request.failures} attempts failed, the limit is {limit}; the last: {reason}"
            self.reject(request, Refusal(RejectReason.ATTEMPTS, message, _MOST_BACKOFF_SECONDS), now)
            return
        if now >= request.deadline:
            self.reject(request, DEADLINE, now)
            return
        if failed and request.failures > 1:
            backoff = _FIRST_BACKOFF_SECONDS * 2.0 ** (request.failures - 1)
            request.not_before = now + min(backoff, _MOST_BACKOFF_SECONDS)
        count(self.decisions.resubmitted, cause)
        self._requests.move(request, Phase.RESUBMITTED)
        self._out.append(act.Resubmit(request.id, request.attempt, request.arrived.gateway, reason))

    def part_lost(self, part: Part, now: float) -> None:
        """Ends every attempt that needed it. If the part is still in the fleet it is told as well."""
        self.may_serve = True
        for request in self._requests.all():
            placed = request.placement
            if part.kind is PartKind.GATEWAY:
                if request.arrived.gateway.incarnation == part.peer.incarnation:
                    self.cancel(request, now)
            elif placed is not None and _needs(request, placed, part):
                if request.phase is Phase.ROOM:
                    self.release(request, placed)
                    self.unplace(request, placed, now)
                else:
                    self.fail(request, "lost", f"{part.id} is gone", now)

    def unplace(self, request: Request, placed: Placement, now: float) -> None:
        """Back to held, in the same attempt: no worker knows of it yet."""
        unbook(request, placed, self._fleet, now)
        request.placement = None
        self._requests.move(request, Phase.HELD)

    def leave(self, request: Request, now: float, reporter: PartId | None = None) -> None:
        """Gives back whatever the attempt holds and tells all who work on it, but the reporter."""
        placed = request.placement
        if placed is None:
            return
        if request.phase is not Phase.DECODING:
            self.release(request, placed)
        workers: list[PartId] = []
        if request.phase in (Phase.PREFILL, Phase.MOVING):
            workers.append(placed.choice.prefill.id)
        if request.phase in AT_WORKERS:
            workers.append(placed.choice.decode.id)
        for id_ in dict.fromkeys(workers):
            part = self._fleet.parts.get(id_)
            if part is not None and id_ != reporter:
                self._out.append(act.Cancel(request.id, request.attempt, part.peer))
        self.freed(request, placed)
        unbook(request, placed, self._fleet, now)
        request.placement = None

    def release(self, request: Request, placed: Placement) -> None:
        node = self._fleet.nodes.get(placed.choice.decode.node)
        if node is not None:
            self._out.append(act.ReleaseRoom(node.peer, request.id, request.attempt))

    def freed(self, request: Request, placed: Placement) -> None:
        """Its room is closed, or about to be: the node may be asked for rooms again."""
        node = unbook_room(request, placed, self._fleet)
        if node is not None:
            node.ceiling = None
        self.may_serve = True


def _needs(request: Request, placed: Placement, part: Part) -> bool:
    choice = placed.choice
    if part.id in (choice.decode.id, choice.decode.node):
        return True
    return request.phase is not Phase.DECODING and part.id in (choice.prefill.id, choice.prefill.node)
