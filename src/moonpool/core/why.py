"""What was weighed when the most recent requests were placed, held or refused: for /cluster and `moonpool explain`.

To note it costs a few references. What each instance would have cost is worked out when somebody asks: the policy is
asked what it would choose if that instance were the only one.
"""

from __future__ import annotations

from collections import OrderedDict
from copy import copy
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from msgspec import Struct, structs

from moonpool.core.admission import Refusal
from moonpool.core.cost import PrefillCost
from moonpool.core.options import Options, Wait
from moonpool.core.placement import Choice, PrefillOption, place
from moonpool.core.requests import Request
from moonpool.core.settings import ConductorConfig
from moonpool.core.vocabulary import RequestId

KEPT_REQUESTS = 512
KEPT_OPTIONS = 32_768
"""Instances that could be chosen from, over all that is kept; each takes some hundred bytes."""
KEPT_ATTEMPTS = 4
"""Of one request, the newest."""
EXACT_OPTIONS = 64
"""With more prefill instances than that, what each would have cost is told by what its cost model has learned since."""

Verdict = Refusal | Wait | None


class PrefillCandidate(Struct, frozen=True):
    """One prefill instance, and what the policy would do there."""

    id: str
    queue_seconds: float
    hit_blocks: int
    """Leading blocks that need not be computed, after the fetch."""
    fetch_blocks: int
    fetch_from: str
    fetch_seconds: float
    """What the first token waits for besides the queue and its own computing."""
    compute_seconds: float
    ttft_seconds: float
    """From the decision to the first token."""
    decode: str
    """The decode instance that the policy takes together with it."""


class DecodeCandidate(Struct, frozen=True):
    id: str
    tbt_seconds: float
    """Of a step with this request in the batch."""
    held_blocks: int
    """That need not be sent there."""


class Weighing(Struct, frozen=True):
    """One decision on one attempt of a request."""

    at: float
    """Of the driver's clock."""
    attempt: int
    policy: str
    tokens: int
    blocks: int
    """Whole blocks of the prompt."""
    waited_seconds: float
    """Since the request first arrived."""
    prefill: tuple[PrefillCandidate, ...]
    decode: tuple[DecodeCandidate, ...]
    chosen_prefill: str
    chosen_decode: str
    ttft_seconds: float
    """Predicted, from the decision to the first token; with `waited_seconds` it is what the limit is put to."""
    tbt_seconds: float
    slo_ttft: float | None
    slo_tbt: float | None
    verdict: str
    """`placed`, `held` or `refused`."""
    reason: str
    """Why it was not placed."""


class Waiting(Struct, frozen=True):
    """A reason for which a request was held, and when."""

    attempt: int
    reason: str
    first_at: float
    last_at: float
    times: int


class _Weighed(NamedTuple):
    at: float
    request: Request
    attempt: int
    tokens: int
    options: Options
    choice: Choice
    verdict: Verdict
    coefficients: list[tuple[float, ...]] | None
    """Of each prefill option's cost, as they were; what was learned since is not what was weighed."""


@dataclass(slots=True)
class _Notes:
    weighed: list[_Weighed] = field(default_factory=list)
    waits: list[Waiting] = field(default_factory=list)
    options: int = 0


class Why:
    """No part of what a journal's segment begins with: it explains the past and decides nothing."""

    def __init__(self, keeps: bool = True) -> None:
        """`keeps`: False to note nothing."""
        self._keeps = keeps
        self._notes: OrderedDict[RequestId, _Notes] = OrderedDict()
        self._options = 0

    def weighed(self, request: Request, options: Options, choice: Choice, verdict: Verdict, now: float) -> None:
        if not self._keeps:
            return
        notes = self._of(request.id)
        view = options.view
        coefficients = [o.cost.fit.coefficients for o in view.prefill] if len(view.prefill) <= EXACT_OPTIONS else None
        arrived = request.arrived
        kept = notes.weighed
        # A request that is looked at again and again while it is held is told of once.
        if kept and isinstance(kept[-1].verdict, Wait) and kept[-1].attempt == arrived.attempt:
            self._count(notes, kept.pop(), -1)
        kept.append(
            _Weighed(now, request, arrived.attempt, arrived.prompt_tokens, options, choice, verdict, coefficients)
        )
        self._count(notes, kept[-1], 1)
        if len(kept) > KEPT_ATTEMPTS:
            self._count(notes, kept.pop(0), -1)
        while self._options > KEPT_OPTIONS and len(self._notes) > 1:
            self._forget()

    def waits(self, request: Request, reason: str, now: float) -> None:
        """Why it is held; if something was weighed at this moment, then that is what came of it."""
        if not self._keeps:
            return
        notes = self._of(request.id)
        waits, weighed = notes.waits, notes.weighed
        if weighed and weighed[-1].at == now and weighed[-1].verdict is None:
            weighed[-1] = weighed[-1]._replace(verdict=Wait(reason))
        last = waits[-1] if waits else None
        if last is not None and last.reason == reason and last.attempt == request.attempt:
            waits[-1] = Waiting(last.attempt, reason, last.first_at, now, last.times + 1)
        else:
            waits.append(Waiting(request.attempt, reason, now, now, 1))
            del waits[: -2 * KEPT_ATTEMPTS]

    def weighings(self, id_: RequestId, config: ConductorConfig) -> tuple[Weighing, ...]:
        """Oldest first; empty for a request of which nothing is kept."""
        notes = self._notes.get(id_)
        return tuple(_weighing(each, config) for each in notes.weighed) if notes is not None else ()

    def newest(self, id_: RequestId, config: ConductorConfig, after: float) -> Weighing | None:
        """The last one, unless it is not later than `after` or nothing is kept: then nothing is worked out."""
        notes = self._notes.get(id_)
        if notes is None or not notes.weighed or notes.weighed[-1].at <= after:
            return None
        return _weighing(notes.weighed[-1], config)

    def waitings(self, id_: RequestId) -> tuple[Waiting, ...]:
        notes = self._notes.get(id_)
        return tuple(notes.waits) if notes is not None else ()

    def to_plain(self) -> object:
        return None

    @classmethod
    def from_plain(cls, plain: None) -> Why:
        return cls()

    def _count(self, notes: _Notes, weighed: _Weighed, sign: int) -> None:
        view = weighed.options.view
        count = sign * (len(view.prefill) + len(view.decode))
        notes.options += count
        self._options += count

    def _of(self, id_: RequestId) -> _Notes:
        notes = self._notes.get(id_)
        if notes is None:
            notes = self._notes[id_] = _Notes()
            if len(self._notes) > KEPT_REQUESTS:
                self._forget()
        return notes

    def _forget(self) -> None:
        self._options -= self._notes.popitem(last=False)[1].options


def _weighing(weighed: _Weighed, config: ConductorConfig) -> Weighing:
    request, options, choice = weighed.request, weighed.options, weighed.choice
    verdict = weighed.verdict
    return Weighing(
        at=weighed.at,
        attempt=weighed.attempt,
        policy=config.placement,
        tokens=weighed.tokens,
        blocks=len(options.keys),
        waited_seconds=weighed.at - request.first_arrived_at,
        prefill=tuple(
            _candidate(option, weighed.coefficients[at] if weighed.coefficients else None, options, config)
            for at, option in enumerate(options.view.prefill)
        ),
        decode=tuple(DecodeCandidate(d.id, d.tbt_seconds, d.held_blocks) for d in options.view.decode),
        chosen_prefill=choice.prefill.id,
        chosen_decode=choice.decode.id,
        ttft_seconds=choice.ttft_seconds,
        tbt_seconds=choice.decode.tbt_seconds,
        slo_ttft=request.limits.ttft,
        slo_tbt=request.limits.tbt,
        verdict="placed" if verdict is None else "held" if isinstance(verdict, Wait) else "refused",
        reason="" if verdict is None else verdict.reason if isinstance(verdict, Wait) else verdict.message,
    )


def _candidate(
    option: PrefillOption, coefficients: tuple[float, ...] | None, options: Options, config: ConductorConfig
) -> PrefillCandidate:
    then = option if coefficients is None else structs.replace(option, cost=_as_it_was(option.cost, coefficients))
    view = structs.replace(options.view, prefill=(then,))
    rng = np.random.Generator(np.random.PCG64(0))
    choice = place(config.placement, view, options.wanted, rng, config.threshold)
    fetch = choice.fetch
    return PrefillCandidate(
        id=option.id,
        queue_seconds=option.queue_seconds,
        hit_blocks=choice.hit_blocks,
        fetch_blocks=fetch.count if fetch is not None else 0,
        fetch_from=fetch.source if fetch is not None else "",
        fetch_seconds=choice.fetch_seconds,
        compute_seconds=choice.prefill_seconds,
        ttft_seconds=choice.ttft_seconds,
        decode=choice.decode.id,
    )


def _as_it_was(cost: PrefillCost, coefficients: tuple[float, ...]) -> PrefillCost:
    then = copy(cost)
    then.fit = copy(cost.fit)
    then.fit.coefficients = coefficients
    return then
