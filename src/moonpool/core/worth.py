"""In overload: what prefill can compute goes to the prompts that are worth most of it.

While the queues are short everything is taken. When more is asked for than can be computed within the TTFT limit, some
must be refused, and it matters who: a tenth of the prompts may be more than half of the work, namely long ones of which
nothing is cached. Refused only when the queue has become too long for them, they get most of the machines and little is
served; refused all, their sessions never come to have anything cached. So a prompt's computing, after what is cached of
it, is held against its worth:

    price = seconds / uses     uses: how often its KVCache will probably be used (`sequels.py`)

What was asked for of late (refused or not) is counted by this price. The cutoff is where what is asked for in the time
to the limit, the cheapest first, fills what can be computed in that time, less what is queued already. The queue is
kept so short that the large prompts, which make up the work, still fit behind it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from moonpool.core.fleet import PrefillLoad
from moonpool.core.sequels import Sequels
from moonpool.core.vocabulary import BlockKey

MEMORY_SECONDS = 60.0
"""What was asked for earlier counts less and less."""
REUSE_SHARE = 0.5
"""Of the uses to come: what is refused now may be computed for the next of them."""
SPARE_PROMPTS = 2.0
"""So many of the prompts that make up the work fit into what the queue leaves of the time to the limit."""
LEAST_QUEUE = 0.2
"""Of the limit: a queue that is always allowed, or instances would run dry."""
_LOOKS = 60
"""At the cutoff in the time to the limit; and not more often than every ..."""
_LOOK_SECONDS = 0.5
_LEAST_PRICE = 1e-4
_STEP = 2.0**0.125
_BINS = 208
INFINITE = float("inf")


def _starts() -> list[float]:
    """Of the bins: eight for each doubling, by multiplication alone, so that every machine counts alike."""
    starts = [_LEAST_PRICE]
    while len(starts) < _BINS:
        starts.append(starts[-1] * _STEP)
    return starts


_STARTS = _starts()


@dataclass(slots=True)
class Asked:
    """Of one class of requests for one model: seconds of computing, by price."""

    total: float = 0.0
    squares: float = 0.0
    """Of the seconds of each."""
    seconds: float = 0.0
    """Over which they were asked for; fades like them."""
    at: float = 0.0
    _bins: list[float] = field(default_factory=lambda: [0.0] * (_BINS + 1))
    _cutoff: float = INFINITE
    _for: tuple[float, float] = (0.0, -INFINITE)
    """The limit that the cutoff is for, and until when it is good."""

    def add(self, price: float, seconds: float) -> None:
        self._bins[bisect_right(_STARTS, price)] += seconds
        self.total += seconds
        self.squares += seconds * seconds

    def fade(self, now: float) -> None:
        """Rational, not exponential: every machine computes it alike."""
        passed = now - self.at
        if passed <= 0.0:
            return
        keep = MEMORY_SECONDS / (MEMORY_SECONDS + passed)
        self._bins = [some * keep for some in self._bins]
        self.total *= keep
        self.squares *= keep
        self.seconds = (self.seconds + passed) * keep
        self.at = now

    def rate(self, limit: float) -> float:
        """Seconds of computing asked for in a second; a first burst counts as spread over a third of the limit."""
        return self.total / max(self.seconds, limit / 3.0)

    def cutoff(self, room: float, limit: float) -> float:
        """The price up to which what is asked for in `limit` seconds fits into `room` seconds of computing."""
        scale = limit / max(self.seconds, limit / 3.0)
        if self.total * scale <= room:
            return INFINITE
        left, low = max(room, 0.0), 0.0
        for some, high in zip(self._bins, (*_STARTS, INFINITE), strict=True):
            some *= scale
            if some > left:
                return low + (high - low) * left / some if high < INFINITE else low
            left -= some
            low = high
        return INFINITE

    def known(self, limit: float, now: float) -> float | None:
        """The cutoff, where it was looked at just now."""
        return self._cutoff if self._for[0] == limit and now < self._for[1] else None

    def keep(self, cutoff: float, limit: float, now: float) -> float:
        self._cutoff, self._for = cutoff, (limit, now + min(limit / _LOOKS, _LOOK_SECONDS))
        return cutoff

    @property
    def usual(self) -> float:
        """Seconds of the prompts that make up the work: half of it is in longer ones, roughly."""
        return self.squares / self.total if self.total else 0.0

    def check_integrity(self) -> None:
        assert min(self._bins) >= 0.0
        assert abs(sum(self._bins) - self.total) <= 1e-6 * (1.0 + self.total)


class Worth:
    def __init__(self) -> None:
        self.sequels = Sequels()
        self._asked: dict[tuple[str, int], Asked] = {}
        """By model and rank."""

    def asked(self, model: str, rank: int, keys: Sequence[BlockKey], tokens: int, seconds: float, now: float) -> float:
        """A request has come whose prompt takes so many seconds to compute; what they are divided by."""
        asked = self._asked.get((model, rank))
        if asked is None:
            asked = self._asked[model, rank] = Asked(at=now)
        uses = 1.0 + REUSE_SHARE * (self.sequels.asked(keys, tokens) - 1.0)
        asked.add(seconds / uses, seconds)
        return uses

    def cutoff(self, model: str, rank: int, loads: Sequence[PrefillLoad], limit: float, now: float) -> float:
        """The highest price that is taken now. `limit`: seconds in which a first token must come."""
        asked = self._asked[model, rank]
        known = asked.known(limit, now)
        if known is not None:
            return known
        for (of, _), each in self._asked.items():
            if of == model:
                each.fade(now)
        return asked.keep(asked.cutoff(self._room(model, rank, loads, limit, now), limit), limit, now)

    def wait(
        self, price: float, model: str, rank: int, loads: Sequence[PrefillLoad], limit: float, now: float
    ) -> float | None:
        """Seconds until this price would be taken if nothing else arrived, from above; None: not within sight."""
        asked = self._asked[model, rank]
        for seconds in (1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0, 240.0):
            fading = MEMORY_SECONDS / (MEMORY_SECONDS + seconds)
            room = self._room(model, rank, loads, limit, now + seconds) / fading
            if price <= asked.cutoff(room, limit):
                return seconds
        return None

    def _room(self, model: str, rank: int, loads: Sequence[PrefillLoad], limit: float, now: float) -> float:
        """Seconds of computing, of all instances, in the time to the limit, less what goes before."""
        asked, count = self._asked[model, rank], len(loads)
        queued = sum([load.seconds_before(rank, now) for load in loads])
        queue = max(limit - SPARE_PROMPTS * asked.usual, LEAST_QUEUE * limit)
        sooner = sum([each.rate(limit) for (of, other), each in self._asked.items() if of == model and other < rank])
        return count * (limit + queue) - queued - sooner * limit

    def check_integrity(self) -> None:
        self.sequels.check_integrity()
        for asked in self._asked.values():
            asked.check_integrity()
