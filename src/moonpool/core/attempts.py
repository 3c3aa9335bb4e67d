"""A request's way from arrival to its end, over all its attempts (docs/protocol.md, "A request").

`Attempts` changes the tables of requests and loads and appends the orders to `out`; `Conductor` owns it,
feeds it, and calls `serve_held` after every event that may have freed something.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from moonpool.core import actions as act
from moonpool.core import events as ev
from moonpool.core.admission import Refusal
from moonpool.core.adoption import Adoption
from moonpool.core.booking import book, unbook_prefill
from moonpool.core.classes import Classes, is_batch
from moonpool.core.directory import Directory
from moonpool.core.displacing import Displacing
from moonpool.core.endings import DEADLINE, GRACE_SECONDS, Endings
from moonpool.core.fleet import Fleet
from moonpool.core.gate import Gate
from moonpool.core.options import Options, Wait, options_for, together
from moonpool.core.outlook import Outlook
from moonpool.core.pages import pages_for
from moonpool.core.placement import Choice, place
from moonpool.core.requests import AT_WORKERS, Phase, Placement, Request, Requests
from moonpool.core.settings import ConductorConfig, of_class
from moonpool.core.sweeper import Sweeper
from moonpool.core.vocabulary import PartId, PartKind, RejectReason, RequestId
from moonpool.core.why import Why

PREEMPTED = "pages ran out on the decode instance"

_Found = tuple[Request, Placement] | None
"""A request and what its current attempt was given."""


class Attempts:
    def __init__(
        self,
        config: ConductorConfig,
        seed: int,
        fleet: Fleet,
        directory: Directory,
        out: list[act.Action],
        explains: bool = True,
    ) -> None:
        self.requests = Requests(Classes(config.classes, config.slo))
        self.endings = Endings(config, fleet, self.requests, out)
        self._outlook = Outlook(fleet)
        self._gate = Gate(config, fleet, self._outlook)
        self._adoption = Adoption(config, fleet, self.requests, self._outlook, out)
        self.why = Why(explains)
        self.sweeper = Sweeper(fleet, directory, config.transfer_cost, self.endings.decisions, out)
        self._displacing = Displacing(config, fleet, self.requests, self.endings)
        self._config = config
        self._rng = np.random.Generator(np.random.PCG64(seed))
        self._fleet = fleet
        self._directory = directory
        self._out = out

    # Arrival and choice

    def arrived(self, event: ev.RequestArrived, now: float) -> None:
        request = self.requests.get(event.request)
        if request is not None:
            if event.attempt <= request.attempt:
                return
            self.endings.leave(request, now)
            self.requests.renew(request, event, now)
        elif self.requests.is_over(event.request, event.attempt):
            return
        else:
            self.endings.decisions.arrived += 1
            priority = self.requests.classes.of(event.priority)
            of_class(self.endings.decisions, priority.name).arrived += 1
            refusal = self._gate.at_arrival(event, self.requests, now)
            behind = self.requests.newest_behind(priority.rank) if refusal else None
            if refusal is not None and behind is None:
                self.requests.remember(event.request, event.attempt)
                self.endings.send_reject(event, refusal)
                return
            request = self.requests.add(event, now)
            if behind is not None:
                self._displacing.displace(behind, request, now)
        self._serve(request, now)

    def placed_before(self, event: ev.PlacedBefore, now: float) -> None:
        self.endings.decisions.adopted += self._adoption.placed_before(event, now)

    def serve_held(self, now: float) -> None:
        """All that are held, in order of their turns; one that waited long enough is not overtaken by its rank."""
        self.endings.may_serve = False
        if not self.requests.count(Phase.HELD):
            return
        closed: dict[str, int] = {}
        turned_away: dict[str, list[tuple[int, int, int, bool]]] = {}
        for request in self.requests.held():
            model, rank = request.arrived.model, request.priority.rank
            if model in closed and rank >= closed[model]:
                continue
            # Room only shrinks in this pass: who needs no less than one that found none finds none either.
            size = rank, request.arrived.prompt_tokens, request.total_tokens, request.preemptions > 0
            known = turned_away.setdefault(model, [])
            if not any(all(a >= b for a, b in zip(size, least, strict=True)) for least in known):
                if not self._try(request, now):
                    continue
                known.append(size)
            if self._keeps_turn(request, now):
                closed[model] = rank
                if self.requests.none_held_but(closed):
                    return

    def _serve(self, request: Request, now: float) -> None:
        model, tokens, must_wait = request.arrived.model, 0, False
        for earlier in self.requests.held():
            if (earlier.turn, earlier.serial) >= (request.turn, request.serial):
                break
            if earlier.arrived.model == model and earlier.priority.rank <= request.priority.rank:
                tokens += earlier.arrived.prompt_tokens
                must_wait = must_wait or self._keeps_turn(earlier, now)
        if not must_wait:
            self._try(request, now)
        elif (refusal := self._gate.behind(request, tokens, now)) is not None:
            self.endings.reject(request, refusal, now)
        else:
            self._hold(request, "others wait longer")

    def _keeps_turn(self, request: Request, now: float) -> bool:
        return now - request.held_since > self._config.hold_patience and request.not_before <= now

    def _try(self, request: Request, now: float, *, may_clear: bool = True) -> bool:
        """Whether it found no room and is held; else it reserves room, is over, or may not be tried yet.

        `may_clear`: queued work may be sent away for it.
        """
        if now >= request.deadline:
            self.endings.reject(request, DEADLINE, now)
            return False
        if request.not_before > now:
            self._hold(request, "it failed before and waits a moment")
            return False
        if is_batch(request.priority) and self.requests.held_before_batch:
            self._hold(request, "batch work waits until nothing else does")
            return False
        config = self._config
        room_now = not self._gate.judges_room(request)
        found = options_for(request, self._fleet, self._directory, config, now, room_now)
        if isinstance(found, Wait) and self._displacing.make_room(request, now):
            found = options_for(request, self._fleet, self._directory, config, now, room_now)
        answer: Refusal | Wait | None
        if isinstance(found, Options):
            choice = place(config.placement, found.view, found.wanted, self._rng, config.threshold)
            if self._fleet.coupled:
                choice = together(choice, found.view)
            answer = self._gate.at_placement(request, found, choice, now)
            self.why.weighed(request, found, choice, answer, now)
            if answer is not None and self._clear(choice, request, answer, now):
                # Batch work was in its way; now it is as if there had been none.
                return self._try(request, now)
            if may_clear and isinstance(answer, Refusal) and self._clear_queued(choice, request, answer, now):
                return self._try(request, now, may_clear=False)
            if answer is None and is_batch(request.priority) and not self._gate.is_idle(choice):
                answer = Wait("batch work waits until its decode instance has less to do")
            if answer is None:
                self._reserve(request, found, choice, now)
                self._displacing.make_way(self._fleet.decode[choice.decode.id], request, now)
                return False
        else:
            answer = found
        if isinstance(answer, Wait):
            self.why.waits(request, answer.reason, now)
            refusal = self._gate.while_held(request, now)
            if refusal is None:
                self._hold(request, answer.reason)
                return True
            answer = refusal
        self.endings.reject(request, answer, now)
        return False

    def _clear(self, choice: Choice, request: Request, answer: Refusal | Wait, now: float) -> bool:
        """Whether batch work has left the decode instance that would be too busy."""
        if is_batch(request.priority) or (isinstance(answer, Refusal) and answer.reason is RejectReason.TTFT_SLO):
            return False
        return self._displacing.clear_batch(self._fleet.decode[choice.decode.id], request, now)

    def _clear_queued(self, choice: Choice, request: Request, answer: Refusal, now: float) -> bool:
        """Whether queued work of later ranks has left the decode instance that would be too busy."""
        if answer.reason is RejectReason.TTFT_SLO or self._config.admission != "forecast":
            return False
        load = self._fleet.decode[choice.decode.id]
        fits = partial(self._gate.fits_without, request, load, now=now)
        return self._displacing.clear_queued(load, request, fits, now)

    def _hold(self, request: Request, reason: str) -> None:
        if not request.hold_sent:
            request.hold_sent = True
            self.endings.decisions.held += 1
            self._out.append(act.Hold(request.id, request.attempt, request.arrived.gateway, reason))

    def expire(self, now: float) -> None:
        """Nothing is held past its deadline, nor a newcomer past its TTFT limit where admission looks at it."""
        for request in self.requests.all():
            grace = GRACE_SECONDS if request.phase in AT_WORKERS else 0.0
            if now >= request.deadline + grace:
                self.endings.reject(request, DEADLINE, now)
            elif request.phase is Phase.HELD and (refusal := self._gate.while_held(request, now)) is not None:
                self.endings.reject(request, refusal, now)

    # Room

    def _reserve(self, request: Request, options: Options, choice: Choice, now: float) -> None:
        placed = Placement(choice, options.space, options.keys, options.pages, options.room_bytes, now)
        request.placement = placed
        book(request, placed, self._fleet, now)
        self._outlook.placed(request, placed, request.limits.tbt, now)
        self.sweeper.placed(choice, options.space, options.keys, now)
        request.avoid = None
        if self._fleet.parts[choice.decode.id].kind is PartKind.COUPLED:
            # Its KV stays where it is computed: no room has to be there first.
            self._place(request, placed, (), now)
            return
        self.requests.move(request, Phase.ROOM)
        tail = request.arrived.prompt_tokens % options.space.block_tokens
        node = self._fleet.nodes[choice.decode.node].peer
        left = request.deadline - now
        order = act.ReserveRoom(
            node, request.id, request.attempt, request.arrived.gateway, options.space, options.keys, tail, left
        )
        self._out.append(order)

    def room_confirmed(self, event: ev.RoomConfirmed, now: float) -> None:
        if not self._fleet.is_node(event.node, event.incarnation):
            return
        found = self._placed(event.request, event.attempt)
        if found is None or found[1].choice.decode.node != event.node:
            node = self._fleet.nodes[event.node].peer
            self._out.append(act.ReleaseRoom(node, event.request, event.attempt))
        elif found[0].phase is Phase.ROOM:
            self._place(*found, event.lacking, now)

    def _place(self, request: Request, placed: Placement, lacking: tuple[int, ...], now: float) -> None:
        fleet, choice = self._fleet, placed.choice
        plan = choice.fetch if choice.fetch is not None and choice.fetch.source in fleet.nodes else None
        hit = choice.hit_blocks
        if plan is None and choice.fetch is not None:
            hit = choice.fetch.first
        ttft_left = self._gate.ttft_left(request, now)
        # One that was accepted before is not thrown away for a limit.
        tbt_limit = None if request.accepted or not self._gate.judges_room(request) else request.limits.tbt
        awaits = self._producer(choice)
        if awaits is None and choice.awaits is not None and plan is None:
            hit = min(hit, choice.prefill.resident_blocks)
        counted_on = [choice.prefill.node, choice.decode.node, *((plan.source,) if plan else ())]
        request.accepted = True
        self.requests.move(request, Phase.PREFILL)
        of_class(self.endings.decisions, request.priority.name).placed += 1
        self._count_placed(placed, hit, plan.count if plan else 0)
        self._out.append(
            act.Place(
                request=request.id,
                attempt=request.attempt,
                gateway=request.arrived.gateway,
                space=placed.space,
                prefill=fleet.parts[choice.prefill.id].peer,
                prefill_node=fleet.nodes[choice.prefill.node].peer,
                decode=fleet.parts[choice.decode.id].peer,
                decode_node=fleet.nodes[choice.decode.node].peer,
                hit_blocks=hit,
                fetch=act.Fetch(fleet.nodes[plan.source].peer, plan.first, plan.count) if plan else None,
                lacking=lacking,
                expected_ttft=now - request.first_arrived_at + choice.ttft_seconds,
                time_left=request.deadline - now,
                priority=request.priority.name,
                rank=request.priority.rank,
                ttft_left=ttft_left,
                compute_seconds=choice.prefill_seconds,
                tbt_limit=tbt_limit,
                awaits=awaits,
                index=self._directory.worst_health(counted_on),
            )
        )

    def _producer(self, choice: Choice) -> tuple[RequestId, int] | None:
        """The attempt that computes blocks for this one, if it is on its way there."""
        request = self.requests.get(choice.awaits) if choice.awaits is not None else None
        if request is None or request.phase is not Phase.PREFILL or request.placement is None:
            return None
        return (request.id, request.attempt) if request.placement.choice.prefill.id == choice.prefill.id else None

    def _count_placed(self, placed: Placement, hit: int, fetched: int) -> None:
        decisions = self.endings.decisions
        decisions.placed += 1
        decisions.prompt_blocks += len(placed.keys)
        decisions.hit_blocks += hit
        decisions.fetches += fetched > 0
        decisions.fetched_blocks += fetched

    def room_refused(self, event: ev.RoomRefused, now: float) -> None:
        found = self._placed(event.request, event.attempt)
        if found is None or not self._fleet.is_node(event.node, event.incarnation):
            return
        request, placed = found
        if request.phase is Phase.ROOM and placed.choice.decode.node == event.node:
            self.endings.decisions.room_refused += 1
            if event.is_lasting:
                request.too_small[event.node] = event.reason
            self._try_elsewhere(request, placed, now)

    def time_out_rooms(self, now: float) -> None:
        for request in self.requests.in_room():
            placed = request.placement
            if placed is None or now < placed.asked_at + self._config.room_timeout:
                break
            self.endings.decisions.room_timeouts += 1
            self.endings.release(request, placed)
            self._try_elsewhere(request, placed, now)

    def _try_elsewhere(self, request: Request, placed: Placement, now: float) -> None:
        """The node's ceiling keeps it from being asked again before something has come free there."""
        self._fleet.nodes[placed.choice.decode.node].refuse(placed.room_bytes, now)
        self.endings.unplace(request, placed, now)
        self._serve(request, now)

    # At the workers

    def prefill_done(self, event: ev.PrefillDone, now: float) -> None:
        found = self._at_prefill(event.request, event.attempt, event.instance)
        if found is None:
            return
        request, placed = found
        tokens = event.computed_tokens + event.cached_tokens
        self._fleet.prefill[event.instance].cost.observe(tokens, event.cached_tokens, event.compute_seconds)
        if request.phase is Phase.PREFILL:
            self._note_computed(request, now)
            unbook_prefill(request, placed, self._fleet, now, is_computed=True)
            self.requests.move(request, Phase.MOVING)
            self.endings.may_serve = True

    def prefill_failed(self, event: ev.PrefillFailed, now: float) -> None:
        self._if_unknown(event, event.reason)
        found = self._at_prefill(event.request, event.attempt, event.instance)
        if found is not None and found[0].phase is not Phase.DECODING:
            request = found[0]
            if event.late:
                self.endings.reject(request, self._gate.too_late(event, now), now)
                return
            if event.unservable:
                self.endings.reject(request, Refusal(RejectReason.UNSERVABLE, event.reason), now)
                return
            # The gateway may speak for a worker that it could not reach, so the worker is told as well.
            self.endings.fail(request, "prefill-failed", event.reason, now)
            request.avoid = event.instance

    def decode_joined(self, event: ev.DecodeJoined, now: float) -> None:
        """May overtake `PrefillDone`, which comes from another process."""
        found = self._at_decode(event.request, event.attempt, event.instance)
        if found is None or found[0].phase is Phase.DECODING:
            return
        request, placed = found
        self._note_computed(request, now)
        unbook_prefill(request, placed, self._fleet, now, is_computed=True)
        self._fleet.decode[event.instance].join(request.id)
        self._outlook.joined(request, placed, now)
        self.endings.freed(request, placed)
        request.joined_at = now
        self.requests.move(request, Phase.DECODING)

    def decode_refused(self, event: ev.DecodeRefused, now: float) -> None:
        self._if_unknown(event, event.reason)
        found = self._at_decode(event.request, event.attempt, event.instance)
        if found is None:
            return
        request, placed = found
        if event.limit:
            self.endings.refuse_late(request, placed, self._gate.late(request, placed, event.reason, now), now)
            return
        self.endings.fail(request, "decode-refused", event.reason, now, reporter=event.instance)
        request.avoid = event.instance

    def preempted(self, event: ev.Preempted, now: float) -> None:
        self._if_unknown(event, PREEMPTED)
        found = self._at_decode(event.request, event.attempt, event.instance)
        if found is not None:
            request = found[0]
            request.preemptions += 1
            self.endings.fail(request, "preempted", PREEMPTED, now, reporter=event.instance)

    def finished(self, event: ev.Finished, now: float) -> None:
        """By the decode instance, or by the prefill instance where the first token was the last."""
        if self._adoption.is_unknown(event):
            self._adoption.finished(event)
            return
        event_of = (event.request, event.attempt, event.instance)
        found = self._at_decode(*event_of) or self._at_prefill(*event_of)
        if found is None:
            return
        request, placed = found
        self._note_computed(request, now)
        gateway = request.arrived.gateway
        self._out.append(act.ExpectEnd(event.request, event.attempt, gateway))
        decoded = now - request.joined_at if request.phase is Phase.DECODING else None
        self._outlook.finished(request, placed, event.output_tokens, decoded)
        total = request.arrived.prompt_tokens - request.arrived.output_tokens + event.output_tokens
        self.endings.finish(request, placed, pages_for(total, placed.space.block_tokens), now)

    def cancelled(self, event: ev.RequestCancelled, now: float) -> None:
        request = self.requests.get(event.request)
        if request is not None:
            self.endings.cancel(request, now)

    def _if_unknown(self, event: ev.PrefillFailed | ev.DecodeRefused | ev.Preempted, reason: str) -> None:
        if self._adoption.is_unknown(event):
            self._adoption.failed(event, reason)

    def _note_computed(self, request: Request, now: float) -> None:
        """To be told before it leaves its phase, by whichever event comes first."""
        if request.phase is Phase.PREFILL and request.placement is not None:
            self._gate.computed(self.requests.waiting, now)
            self._outlook.computed(request.placement, request.limits.ttft, now)

    # Late copies and copies of other attempts find nothing here

    def _placed(self, id_: RequestId, attempt: int) -> _Found:
        request = self.requests.get(id_)
        if request is None or request.attempt != attempt or request.placement is None:
            return None
        return request, request.placement

    def _at_prefill(self, id_: RequestId, attempt: int, instance: PartId) -> _Found:
        """While decoding it may be a prefill instance that is gone from the fleet, which then has no say."""
        found = self._placed(id_, attempt)
        if found is None or found[0].phase not in AT_WORKERS or found[1].choice.prefill.id != instance:
            return None
        return found if instance in self._fleet.prefill else None

    def _at_decode(self, id_: RequestId, attempt: int, instance: PartId) -> _Found:
        found = self._placed(id_, attempt)
        if found is None or found[0].phase not in AT_WORKERS or found[1].choice.decode.id != instance:
            return None
        return found
