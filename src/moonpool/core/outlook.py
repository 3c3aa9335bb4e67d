"""What the Conductor expects of its decode instances, and how far its expectations were off.

It books every placed request on the instance's future (`forecast.py`), asks that future for the load at a given time,
and compares what it said with what came: the margin below the limits is learned from its own errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moonpool.core.admission import DecodeLoad, Margin
from moonpool.core.fleet import DecodeLoad as Ledger
from moonpool.core.fleet import Fleet
from moonpool.core.forecast import Load, Stay
from moonpool.core.lengths import Expected, LengthForecast
from moonpool.core.requests import Placement, Request
from moonpool.core.vocabulary import BlockKey

_WEIGHT = 0.02
"""Of one error: some fifty count."""
_SAMPLE = 4
"""Of so many requests one tells how well the load of its decode instance was predicted."""
_MOST_MARGIN = 0.3
_FIRST_RESIDENCE_SECONDS = 10.0
"""Of a request in the batch, before any was seen."""
_RESIDENCE_WEIGHT = 0.1
_PAGES_A_REQUEST = 1.5
"""On average half of a page is not full, and a whole one is kept to grow into (`decode.py`)."""
LOOKS_AHEAD = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 11.0, 15.0, 20.0, 27.0, 36.0, 48.0, 64.0, 90.0, 120.0)
"""Seconds from now at which it is seen whether an instance has room."""


@dataclass(slots=True)
class Error:
    """Of a predicted load: what came less what was said, 1 being the limit."""

    mean: float = 0.0
    spread: float = 0.0
    """Mean distance from the mean."""

    def observe(self, error: float) -> None:
        self.mean += _WEIGHT * (error - self.mean)
        self.spread += _WEIGHT * (abs(error - self.mean) - self.spread)

    @property
    def margin(self) -> float:
        return min(max(self.mean + self.spread, 0.0), _MOST_MARGIN)


class Outlook:
    def __init__(self, fleet: Fleet) -> None:
        self.lengths = LengthForecast()
        self.residence = _FIRST_RESIDENCE_SECONDS
        """Seconds that a request decodes: the paper's uniform t_d."""
        self._fleet = fleet
        self._prefill = Error()
        self._decode = Error()

    @property
    def margin(self) -> Margin:
        return Margin(self._prefill.margin, self._decode.margin)

    # What came

    def placed(self, request: Request, placed: Placement, tbt: float | None, now: float) -> None:
        """`tbt`: its limit, seconds."""
        ledger = self._fleet.decode[placed.choice.decode.id]
        stay = Stay(
            now + placed.choice.ttft_seconds, request.arrived.prompt_tokens, self.rest(request, placed.keys), tbt
        )
        ledger.ahead.book(request.id, stay, step_of(ledger), now)
        if request.serial % _SAMPLE == 0:
            stay.expected_load = self.load_at(ledger, stay.joins_at, now).over(tbt)

    def computed(self, placed: Placement, ttft: float | None, now: float) -> None:
        """Its prompt is; `ttft`: its limit, seconds."""
        if ttft is not None:
            self._prefill.observe((now - placed.asked_at - placed.choice.ttft_seconds) / ttft)

    def joined(self, request: Request, placed: Placement, now: float) -> None:
        ledger = self._fleet.decode[placed.choice.decode.id]
        stay = ledger.ahead.coming[request.id]
        ledger.ahead.join(request.id, step_of(ledger), now)
        if stay.expected_load is not None:
            self._decode.observe(self.load_now(ledger, now).over(stay.tbt) - stay.expected_load)

    def finished(self, request: Request, placed: Placement, output_tokens: int, seconds: float | None) -> None:
        """`output_tokens`: of all attempts; `seconds` it has decoded, None if prefill did it all."""
        self.lengths.observe(request.arrived.model, placed.keys, output_tokens)
        if seconds is not None:
            self.residence += _RESIDENCE_WEIGHT * (seconds - self.residence)

    # What is expected

    def rest(self, request: Request, keys: Sequence[BlockKey]) -> Expected:
        """Tokens that it will still produce, in equally likely slices."""
        produced = request.arrived.output_tokens
        most = produced + request.arrived.max_output_tokens
        found = self.lengths.expected(request.arrived.model, keys, produced, most)
        return tuple([max(length - produced, 1.0) for length in found]) if produced else found

    def load_now(self, ledger: Ledger, now: float, tokens: int = 0, more: int = 0) -> DecodeLoad:
        """Of what runs, and `more` requests with `tokens` tokens."""
        return _as_load(ledger, ledger.ahead.now(step_of(ledger), now), tokens, more)

    def load_most(self, ledger: Ledger, time: float, now: float, tokens: int) -> DecodeLoad:
        """Of all that are known and one more request, if nobody leaves until then."""
        return _as_load(ledger, ledger.ahead.most(time, step_of(ledger), now), tokens, 1)

    def load_at(self, ledger: Ledger, time: float, now: float, tokens: int = 0, more: int = 0) -> DecodeLoad:
        """Of what runs then, and `more` requests with `tokens` tokens."""
        return _as_load(ledger, ledger.ahead.at(time, step_of(ledger), now), tokens, more)

    def fits_in(
        self, ledger: Ledger, tokens: int, ready: float, tbt: float | None, margin: float, now: float
    ) -> float | None:
        """Seconds until a request that would join at `ready` may arrive, if nothing else does: coarse, from above."""
        for seconds in LOOKS_AHEAD:
            if self.load_at(ledger, ready + seconds, now, tokens, 1).over(tbt) <= 1.0 - margin:
                return seconds
        return None

    def mean_load(self, ledgers: Sequence[Ledger], tokens: int, time: float, now: float) -> DecodeLoad:
        """The paper's system-level prediction for `time`, with one more request of `tokens` tokens.

        All whose prefill ends by then are spread evenly, those that will have decoded for longer than `residence` are
        gone, and the instances' loads are averaged.
        """
        coming = [stay.tokens for ledger in ledgers for stay in ledger.ahead.coming.values() if stay.joins_at <= time]
        batch = (len(coming) + 1) / len(ledgers)
        spread = (sum(coming) + tokens) / len(ledgers)
        tbt = room = 0.0
        for ledger in ledgers:
            running = ledger.ahead.now(step_of(ledger), now)
            gone = gone_tokens = 0
            for stay in ledger.ahead.joined.values():
                if stay.joins_at >= time - self.residence:
                    break
                gone += 1
                gone_tokens += stay.tokens
            left = Load(max(running.batch - gone, 0.0), max(running.tokens - gone_tokens, 0.0))
            load = _as_load(ledger, left, spread, batch)
            tbt += load.tbt_seconds / len(ledgers)
            room += load.room / len(ledgers)
        return DecodeLoad(tbt, room)


def step_of(ledger: Ledger) -> float:
    """Seconds of one step with all that are assigned: what those that join will see."""
    return ledger.cost.seconds(ledger.ahead.batch, ledger.ahead.tokens)


def _as_load(ledger: Ledger, load: Load, tokens: float, more: float) -> DecodeLoad:
    batch, context = load.batch + more, load.tokens + tokens
    capacity = ledger.part.capacity
    room = batch / capacity.slots if capacity.slots else 0.0
    if capacity.pages:
        pages = context / ledger.space.block_tokens + _PAGES_A_REQUEST * batch
        room = max(room, pages / capacity.pages)
    # One that has the instance for itself has all the room there is.
    return DecodeLoad(ledger.cost.fit.predict(1.0, batch, context), room if batch > 1.0 else 0.0)
