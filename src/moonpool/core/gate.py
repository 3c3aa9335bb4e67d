"""The admission checks, put to one request at one moment."""

from __future__ import annotations

from collections.abc import Callable, Collection

from msgspec import structs

from moonpool.core.admission import (
    MOST_RETRY_SECONDS,
    DecodeLoad,
    Margin,
    Prediction,
    Refusal,
    admit,
    check_queue,
    clamp_retry,
)
from moonpool.core.classes import kept
from moonpool.core.cost import Fit
from moonpool.core.events import PrefillFailed, RequestArrived
from moonpool.core.fleet import DecodeLoad as Ledger
from moonpool.core.fleet import Fleet
from moonpool.core.options import BATCH_SPARES, Options, Wait
from moonpool.core.outlook import Outlook
from moonpool.core.placement import Choice
from moonpool.core.requests import Placement, Request, Requests
from moonpool.core.settings import ConductorConfig
from moonpool.core.vocabulary import RejectReason, RequestId, Slo
from moonpool.core.worth import Worth

TRUSTED_OBSERVATIONS = 8
"""After so many a fitted cost is believed in full."""
PROBE_SECONDS = 60.0
"""A prefill instance that had nothing to do for so long gets a request whatever its cost model says, and whatever that
of its decode instance says, if this has nothing to do either."""
MOST_KEPT = 0.6
"""Of a decode instance, beside the margin that is learned."""
_LEAVING_WEIGHT = 0.02
"""Small: prompts that share a chunk leave together."""
_PRIOR_LEAVERS = 8
"""That many requests would have to leave the queue to say as much as the cost models do."""


class Gate:
    """A request that has been placed once is never refused here any more."""

    def __init__(self, config: ConductorConfig, fleet: Fleet, outlook: Outlook) -> None:
        self._config = config
        self._fleet = fleet
        self._outlook = outlook
        self._worth = Worth()
        self._last_left: float | None = None
        """When a prompt had been computed last, if the queue was long then."""
        self._leavers = 0.0
        self._leaving_seconds = 0.0
        """Between so many that left a long queue; old ones fade."""

    def computed(self, waiting: int, now: float) -> None:
        """A prompt has been computed, one of `waiting` requests; tells how fast a long queue goes down."""
        if self._last_left is not None:
            self._leavers += 1.0 - _LEAVING_WEIGHT * self._leavers
            self._leaving_seconds += now - self._last_left - _LEAVING_WEIGHT * self._leaving_seconds
        self._last_left = now if 2 * waiting > self._config.queue_bound else None

    def at_arrival(self, event: RequestArrived, requests: Requests, now: float) -> Refusal | None:
        bound = self._config.queue_bound
        if event.attempt > 1:
            return None
        sooner = requests.classes.sooner(requests.classes.of(event.priority))
        if sooner:
            bound = int(bound * (1.0 - kept(sooner, lambda rank: requests.queued(rank) / bound)))
        if requests.waiting < bound:
            return None
        return check_queue(requests.waiting, bound, self._backlog(event, requests, now))

    def _backlog(self, event: RequestArrived, requests: Requests, now: float) -> float:
        """Seconds until all that wait are computed: by the cost models, then more and more by how they have left.

        The models know a prompt by itself; short ones share a chunk, and a full decode pool holds them up.
        """
        loads = self._fleet.prefill_for(event.model)
        queued = sum([len(load.queue) for load in loads])
        backlog = sum([load.seconds(now) for load in loads])
        if loads:
            of_queued = sum([load.queued_seconds for load in loads])
            mean = of_queued / queued if queued else loads[0].cost.seconds(event.prompt_tokens, 0)
            backlog = (backlog + mean * max(requests.waiting - queued, 0)) / len(loads)
        share = self._leavers / (self._leavers + _PRIOR_LEAVERS)
        measured = requests.waiting * self._leaving_seconds / max(self._leavers, 1.0)
        return (1.0 - share) * backlog + share * measured

    def judges_room(self, request: Request) -> bool:
        """Whether room in the batch is a question of admission; else it must be there when a request is placed."""
        return self._config.admission != "none" and request.limits.tbt is not None

    def at_placement(self, request: Request, options: Options, choice: Choice, now: float) -> Refusal | Wait | None:
        """One that has been placed before is never refused, but may have to wait."""
        policy, slo = self._config.admission, request.limits
        if policy == "none" or (request.accepted and policy != "forecast"):
            return None
        waited = now - request.first_arrived_at
        # Who comes again has not waited yet.
        alone = choice.ttft_seconds - choice.prefill.queue_seconds
        predicted = Prediction(waited + choice.ttft_seconds, alone_seconds=alone)
        if policy == "forecast":
            dear = self._dear(request, options, choice, now)
            return dear or self._forecast(request, choice, predicted, slo, now)
        ledger, tokens = self._fleet.decode[choice.decode.id], request.arrived.prompt_tokens
        joins_at = now if policy == "early" else now + choice.ttft_seconds
        if slo.tbt is not None and policy != "baseline":
            if policy == "early":
                load = self._outlook.load_now(ledger, now, tokens, 1)
            else:
                ledgers = [self._fleet.decode[option.id] for option in options.view.decode]
                load = self._outlook.mean_load(ledgers, tokens, joins_at, now)
            predicted = structs.replace(predicted, decode=load)
        margin = Margin(decode=_kept(request, ledger))
        return admit(
            predicted, slo, lambda: self._outlook.fits_in(ledger, tokens, joins_at, slo.tbt, margin.decode, now), margin
        )

    def _dear(self, request: Request, options: Options, choice: Choice, now: float) -> Refusal | None:
        """In overload: its computing would cost more than it is worth beside what else is asked for (`worth.py`)."""
        limit, model, rank = request.limits.ttft, request.arrived.model, request.priority.rank
        if limit is None or request.accepted or not self._config.refuses_dear_first:
            return None
        worth, tokens, seconds = self._worth, request.arrived.prompt_tokens, choice.prefill_seconds
        if not request.uses:
            request.uses = worth.asked(model, rank, options.keys, tokens, seconds, now)
        if trust(self._fleet.prefill[choice.prefill.id].cost.fit) < 1.0:
            return None
        loads, price = self._fleet.prefill_for(model), seconds / request.uses
        limit *= 1.0 - self._outlook.margin.ttft
        if price <= worth.cutoff(model, rank, loads, limit, now):
            return None
        wait = worth.wait(price, model, rank, loads, limit, now)
        return Refusal(
            RejectReason.TTFT_SLO,
            f"its prompt takes {seconds:.2f} s to compute, and more is asked for than can be computed within "
            f"{request.limits.ttft:g} s: those that cost less for what they are worth go first; "
            "retry later, or add a prefill instance",
            clamp_retry(MOST_RETRY_SECONDS if wait is None else wait),
        )

    def late(self, request: Request, placed: Placement, reason: str, now: float) -> Refusal:
        """The decode instance does not take it after all."""
        ledger, slo = self._fleet.decode[placed.choice.decode.id], request.limits
        tokens = request.arrived.prompt_tokens
        fits_in = self._outlook.fits_in(ledger, tokens, now + placed.choice.prefill_seconds, slo.tbt, 0.0, now)
        return Refusal(
            RejectReason.TBT_SLO,
            f"{placed.choice.decode.id} refused it after its prefill: {reason}; "
            "retry later, or allow a longer time between tokens",
            clamp_retry(MOST_RETRY_SECONDS if fits_in is None else fits_in),
        )

    def behind(self, request: Request, tokens: int, now: float) -> Refusal | None:
        """It would wait behind prompts of so many tokens for room in the decode pool: will its turn come in time?"""
        slo, margin = request.limits, self._outlook.margin
        ledgers = self._fleet.decode_for(request.arrived.model)
        if (
            request.accepted
            or self._config.admission != "forecast"
            or slo.ttft is None
            or slo.tbt is None
            or not ledgers
        ):
            return None
        wait = tokens / max(sum([ledger.ahead.join_tokens(now) for ledger in ledgers]), 1.0)
        waited = now - request.first_arrived_at
        limit = slo.ttft * (1.0 - margin.ttft)
        if waited + wait <= limit:
            return None
        return Refusal(
            RejectReason.KV_ROOM,
            f"prompts of {tokens} tokens wait for a decode instance already, its turn would come too late for a first "
            f"token within {slo.ttft:g} s; retry later, or add a decode instance",
            clamp_retry(waited + wait - limit),
        )

    def is_idle(self, choice: Choice) -> bool:
        """Whether the instance would keep the strictest limit of any class with much to spare: for batch work."""
        limits = [slo.tbt for slo in (self._config.slo, *(c.slo for c in self._config.classes)) if slo.tbt is not None]
        return not limits or choice.decode.tbt_seconds <= (1.0 - BATCH_SPARES) * min(limits)

    def while_held(self, request: Request, now: float) -> Refusal | None:
        """One that cannot have its first token in time any more is told so at once."""
        if request.accepted or self._config.admission == "none":
            return None
        waited = now - request.first_arrived_at
        refusal = admit(Prediction(waited), request.limits, lambda: None)
        # For so long nothing came free for it.
        return None if refusal is None else structs.replace(refusal, retry_after=clamp_retry(waited))

    def ttft_left(self, request: Request, now: float) -> float | None:
        """Seconds in which its first token must come; None where nobody refuses it any more for being late."""
        limit = request.limits.ttft
        if request.accepted or limit is None or self._config.admission == "none":
            return None
        return request.first_arrived_at + limit - now

    def _forecast(
        self, request: Request, choice: Choice, predicted: Prediction, slo: Slo, now: float
    ) -> Refusal | Wait | None:
        """The chosen instances at the time at which this very request will be there."""
        outlook, margin = self._outlook, self._outlook.margin
        ledger, tokens = self._fleet.decode[choice.decode.id], request.arrived.prompt_tokens
        margin = Margin(margin.ttft, margin.decode + _kept(request, ledger))
        joins_at, late = now + choice.ttft_seconds, False
        tbt = ledger.ahead.strictest(slo.tbt)
        if tbt is not None:
            load = outlook.load_most(ledger, max(joins_at, ledger.ahead.last_coming), now, tokens)
            if load.over(tbt) > 1.0 - margin.decode:
                # The wait that its slowest tenth of intervals could hold is left for errors of the forecast.
                load = outlook.load_at(ledger, joins_at, now, tokens, 1)
                if ledger.ahead.last_coming > joins_at:
                    # Those that join after it must still find their place.
                    later = outlook.load_at(ledger, ledger.ahead.last_coming, now, tokens, 1)
                    load = max(load, later, key=_by_load(tbt))
            load = _trusted(load, ledger)
            predicted = structs.replace(predicted, decode=load)
            late = load.over(tbt) > 1.0 - margin.decode
        if late and ledger.ahead.batch and (request.accepted or slo.tbt is None):
            return Wait("its decode instance will be too busy when it joins")
        if request.accepted:
            return None
        prefill = self._fleet.prefill[choice.prefill.id]
        unsure = trust(prefill.cost.fit)
        if not prefill.queue and now - prefill.head_since > PROBE_SECONDS:
            # A gate that lets nothing through learns nothing, so an idle instance is tried now and then.
            unsure = 0.0
            if not ledger.batch:
                predicted, late = structs.replace(predicted, decode=DecodeLoad(0.0, predicted.decode.room)), False
        waited = now - request.first_arrived_at
        predicted = structs.replace(
            predicted,
            ttft_seconds=waited + unsure * choice.ttft_seconds,
            alone_seconds=unsure * predicted.alone_seconds,
        )

        def fits_in() -> float | None:
            return outlook.fits_in(ledger, tokens, joins_at, tbt, margin.decode, now)

        if late and (wait := fits_in()) is not None:
            limit = request.deadline - request.first_arrived_at if slo.ttft is None else slo.ttft * (1.0 - margin.ttft)
            if predicted.ttft_seconds + wait <= limit:
                return Wait(f"its decode instance will have room in {wait:g} s")
        return admit(predicted, Slo(slo.ttft, tbt if slo.tbt is not None else None), fits_in, margin)

    def fits_without(self, request: Request, ledger: Ledger, gone: Collection[RequestId], now: float) -> bool:
        """Whether the instance could take it now and all that are on their way there, but for these."""
        coming = [stay.tokens for id_, stay in ledger.ahead.coming.items() if id_ not in gone]
        tokens = request.arrived.prompt_tokens + sum(coming)
        load = _trusted(self._outlook.load_now(ledger, now, tokens, len(coming) + 1), ledger)
        margin = self._outlook.margin.decode + _kept(request, ledger)
        return load.over(ledger.ahead.strictest(request.limits.tbt)) <= 1.0 - margin

    def too_late(self, event: PrefillFailed, now: float) -> Refusal:
        """It gave way to others until its first token could not come in time. Advised: until that queue is through."""
        load = self._fleet.prefill.get(event.instance)
        wait = load.seconds(now) if load is not None else 0.0
        return Refusal(RejectReason.TTFT_SLO, f"{event.instance}: {event.reason}; retry later", clamp_retry(wait))


def _kept(request: Request, ledger: Ledger) -> float:
    """The share of a decode instance that those of sooner ranks may still want; an empty one takes anybody."""
    return min(kept(request.sooner, ledger.taken), MOST_KEPT) if ledger.batch else 0.0


def _trusted(load: DecodeLoad, ledger: Ledger) -> DecodeLoad:
    return structs.replace(load, tbt_seconds=load.tbt_seconds * trust(ledger.cost.fit))


def trust(fit: Fit) -> float:
    """How far a fitted time is believed, 0 to 1: a wrong one corrects itself only if requests are let through."""
    return min(fit.observations / TRUSTED_OBSERVATIONS, 1.0)


def _by_load(tbt: float) -> Callable[[DecodeLoad], float]:
    return lambda load: load.over(tbt)
