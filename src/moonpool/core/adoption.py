"""Requests that an earlier Conductor placed (docs/protocol.md, "A dead Conductor").

Their gateways tell of them, and their workers go on reporting. What a report asks for is asked of every gateway as
long as it is not known whose request it is: those that know nothing of it ignore it, or say so.
"""

from __future__ import annotations

from moonpool.core import actions as act
from moonpool.core import events as ev
from moonpool.core.booking import book_decode, book_prefill, book_room
from moonpool.core.cost import PrefillCost
from moonpool.core.fleet import Fleet
from moonpool.core.options import booked_pages, room_bytes
from moonpool.core.outlook import Outlook
from moonpool.core.placement import Choice, DecodeOption, FetchPlan, PrefillOption
from moonpool.core.requests import Phase, Placement, Request, Requests
from moonpool.core.settings import ConductorConfig
from moonpool.core.vocabulary import NodePeer, PartKind, Peer


class Adoption:
    def __init__(
        self, config: ConductorConfig, fleet: Fleet, requests: Requests, outlook: Outlook, out: list[act.Action]
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._requests = requests
        self._outlook = outlook
        self._out = out

    def placed_before(self, event: ev.PlacedBefore, now: float) -> bool:
        """Books what the request takes of its parts, as if it had been placed here. False: it is not taken over."""
        arrived = event.arrived
        if self._requests.is_over(arrived.request, arrived.attempt):
            # Its worker said so before this gateway was there to hear it.
            self._out.append(act.ExpectEnd(arrived.request, arrived.attempt, arrived.gateway))
            return False
        if self._requests.get(arrived.request) is not None or not self._is_whole(event):
            return False
        request = self._requests.add(arrived, now)
        request.accepted = True
        placed = request.placement = self._placement(event, request, now)
        phase = _phase(event.tokens)
        book_decode(request, placed, self._fleet)
        self._outlook.placed(request, placed, event.place.tbt_limit, now)
        decode = self._fleet.decode[placed.choice.decode.id]
        if phase is Phase.DECODING:
            decode.join(request.id)
            self._outlook.joined(request, placed, now)
            request.joined_at = now
        else:
            book_room(request, placed, self._fleet)
        if phase is Phase.PREFILL:
            book_prefill(request, placed, self._fleet, now)
        self._requests.move(request, phase)
        # Until now its worker's report has shown it as the work of a stranger.
        decode.correct(decode.part.reported)
        return True

    def finished(self, event: ev.Finished) -> None:
        """Here nothing is known of it; its gateway may miss its last tokens all the same."""
        self._requests.remember(event.request, event.attempt)
        for gateway in self._gateways():
            self._out.append(act.ExpectEnd(event.request, event.attempt, gateway))

    def failed(self, event: ev.PrefillFailed | ev.DecodeRefused | ev.Preempted, reason: str) -> None:
        self._requests.remember(event.request, event.attempt)
        for gateway in self._gateways():
            self._out.append(act.Resubmit(event.request, event.attempt, gateway, reason))

    def is_unknown(self, event: ev.PrefillFailed | ev.DecodeRefused | ev.Preempted | ev.Finished) -> bool:
        known = self._requests.get(event.request) is not None
        return not known and not self._requests.is_over(event.request, event.attempt)

    def _gateways(self) -> list[Peer]:
        return [part.peer for part in self._fleet.parts.values() if part.kind is PartKind.GATEWAY]

    def _is_whole(self, event: ev.PlacedBefore) -> bool:
        """Whether everybody it still needs is there: the same processes, not others of their names."""
        place = event.place
        pairs = [(place.decode, place.decode_node)]
        if _phase(event.tokens) is not Phase.DECODING:
            pairs.append((place.prefill, place.prefill_node))
        there = all(
            self._fleet.find(worker.id, worker.incarnation) is not None and self._has_node(node)
            for worker, node in pairs
        )
        gateway = event.arrived.gateway
        return there and self._fleet.find(gateway.id, gateway.incarnation) is not None

    def _has_node(self, node: NodePeer) -> bool:
        return self._fleet.find(node.id, node.incarnation) is not None

    def _placement(self, event: ev.PlacedBefore, request: Request, now: float) -> Placement:
        place, tokens = event.place, event.arrived.prompt_tokens
        load = self._fleet.prefill.get(place.prefill.id)
        cost = PrefillCost(self._config.prefill_cost) if load is None else load.cost
        seconds = cost.seconds(tokens, min(place.hit_blocks * place.space.block_tokens, tokens))
        plan = None
        if place.fetch is not None and self._has_node(place.fetch.source):
            plan = FetchPlan(place.fetch.source.id, place.fetch.first, place.fetch.count)
        resident = place.hit_blocks if place.fetch is None else place.fetch.first
        choice = Choice(
            PrefillOption(place.prefill.id, place.prefill_node.id, 0.0, place.hit_blocks, cost, resident),
            DecodeOption(place.decode.id, place.decode_node.id, 0.0, 0),
            place.hit_blocks,
            plan,
            seconds,
            seconds,
        )
        pages = booked_pages(request, place.space, self._config.output_share)
        keys = request.keys_in(place.space) or ()
        return Placement(choice, place.space, keys, pages, room_bytes(place.space, tokens), now)


def _phase(tokens: int) -> Phase:
    """The first token of an attempt comes from prefill, the second from decode."""
    return Phase.PREFILL if tokens == 0 else Phase.MOVING if tokens == 1 else Phase.DECODING
