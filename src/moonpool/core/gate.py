"""The admission checks, put to one request at one moment."""

from __future__ import annotations

from moonpool.core.admission import Prediction, Refusal, admit, check_queue
from moonpool.core.events import RequestArrived
from moonpool.core.fleet import Fleet
from moonpool.core.placement import Choice
from moonpool.core.requests import Request, Requests
from moonpool.core.settings import ConductorConfig

_FIRST_RESIDENCE_SECONDS = 10.0
"""Of a request in the batch, before any was seen."""
_WEIGHT = 0.1
_LEAVING_WEIGHT = 0.02
"""Small: prompts that share a chunk leave together."""
_PRIOR_LEAVERS = 8
"""That many requests would have to leave the queue to say as much as the cost models do."""


class Gate:
    """A request that has been placed once is never refused here any more."""

    def __init__(self, config: ConductorConfig, fleet: Fleet) -> None:
        self._config = config
        self._fleet = fleet
        self._residence = _FIRST_RESIDENCE_SECONDS
        self._last_left: float | None = None
        """When a prompt had been computed last, if the queue was long then."""
        self._leavers = 0.0
        self._leaving_seconds = 0.0
        """Between so many that left a long queue; old ones fade."""

    def decoded(self, seconds: float) -> None:
        """A request was in the batch for this long; tells how soon the next one ends."""
        self._residence += _WEIGHT * (seconds - self._residence)

    def computed(self, waiting: int, now: float) -> None:
        """A prompt has been computed, one of `waiting` requests; tells how fast a long queue goes down."""
        if self._last_left is not None:
            self._leavers += 1.0 - _LEAVING_WEIGHT * self._leavers
            self._leaving_seconds += now - self._last_left - _LEAVING_WEIGHT * self._leaving_seconds
        self._last_left = now if 2 * waiting > self._config.queue_bound else None

    def at_arrival(self, event: RequestArrived, requests: Requests, now: float) -> Refusal | None:
        if event.attempt > 1 or requests.waiting < self._config.queue_bound:
            return None
        return check_queue(requests.waiting, self._config.queue_bound, self._backlog(event, requests, now))

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

    def at_placement(self, request: Request, choice: Choice, now: float) -> Refusal | None:
        if request.accepted:
            return None
        ends_in = self._residence / max(self._fleet.decode[choice.decode.id].batch, 1)
        ttft = now - request.first_arrived_at + choice.ttft_seconds
        predicted = Prediction(ttft, choice.decode.tbt_seconds, ends_in)
        return admit(self._config.admission, predicted, request.limits)

    def while_held(self, request: Request, now: float) -> Refusal | None:
        """One that cannot have its first token in time any more is told so at once."""
        if request.accepted:
            return None
        predicted = Prediction(now - request.first_arrived_at, 0.0, 0.0)
        return admit(self._config.admission, predicted, request.limits)

    def ttft_left(self, request: Request, now: float) -> float | None:
        """Seconds in which its first token must come; None where nobody refuses it any more for being late."""
        limit = request.limits.ttft
        if request.accepted or limit is None or self._config.admission == "none":
            return None
        return request.first_arrived_at + limit - now
