"""The newest requests with what was weighed for each of them last, for the dashboard.

What each instance would have cost is worked out by asking the policy again (`core/why.py`), so it is done once for a
decision, and for only so many of them a look: in a busy large cluster some of the table's lines have no costs.
"""

from __future__ import annotations

import math

from msgspec import Struct, structs

from moonpool.core.conductor import Conductor
from moonpool.core.vocabulary import RequestId
from moonpool.core.why import Weighing
from moonpool.wire.story import Stories

REQUESTS = 12
CANDIDATES = 4
"""Of each kind, the best ones and the chosen one."""
PAIRS_A_LOOK = 4096
"""Of a prefill and a decode instance; a decision that has begun is told whole."""


class Decided(Struct, frozen=True):
    request: str
    label: str
    """The client's x-request-id."""
    seconds_ago: float
    """Since its arrival."""
    outcome: str
    why: str
    weighing: Weighing | None
    """The last one, with its best candidates."""
    prefill_instances: int = 0
    decode_instances: int = 0
    """So many were weighed."""


class Decisions:
    """Costs nothing while nobody looks."""

    def __init__(self) -> None:
        self._told: dict[RequestId, Decided] = {}

    def look(self, stories: Stories, conductor: Conductor, now: float) -> tuple[Decided, ...]:
        """The newest first."""
        told: dict[RequestId, Decided] = {}
        left = PAIRS_A_LOOK
        for brief in stories.latest(REQUESTS, now):
            id_ = RequestId(brief.request)
            before = self._told.get(id_)
            after = before.weighing.at if before is not None and before.weighing is not None else -math.inf
            new = conductor.weighing(id_, after) if left > 0 else None
            costs: tuple[Weighing | None, int, int] = (None, 0, 0)
            if new is not None:
                left -= len(new.prefill) * len(new.decode)
                costs = _best(new), len(new.prefill), len(new.decode)
            elif before is not None:
                costs = before.weighing, before.prefill_instances, before.decode_instances
            told[id_] = Decided(brief.request, brief.label, brief.seconds_ago, brief.outcome, brief.why, *costs)
        self._told = told
        return tuple(told.values())


def _best(weighing: Weighing) -> Weighing:
    prefill = sorted(weighing.prefill, key=lambda c: (c.id != weighing.chosen_prefill, c.ttft_seconds, c.id))
    decode = sorted(weighing.decode, key=lambda d: (d.id != weighing.chosen_decode, d.tbt_seconds, d.id))
    return structs.replace(weighing, prefill=tuple(prefill[:CANDIDATES]), decode=tuple(decode[:CANDIDATES]))
