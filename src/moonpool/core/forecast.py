"""What a decode instance will have to do at a future time.

Every request that is assigned to it is booked as a stay: when it joins, and when it has probably left, as equally
likely slices of the output lengths of its family (`lengths.py`). Stays are added up in time buckets, so that a look
ahead costs a sum over buckets and not a walk over requests. Those that run are known exactly, so buckets only tell
which share of them is left at a time: an answer that is longer than most of its kin is thereby expected on as the rest.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from msgspec import Struct

from moonpool.core.lengths import SLICES, Expected
from moonpool.core.vocabulary import RequestId

BUCKET_SECONDS = 0.5
BUCKETS = 256
"""What ends later is counted in the last one."""
_RATE_SECONDS = 30.0
"""Over which joins are counted, to tell how soon those that wait have their turn."""


class Load(Struct, frozen=True):
    """Expected at one moment."""

    batch: float
    tokens: float
    """Of KV."""


@dataclass(slots=True)
class Stay:
    """Of one request."""

    joins_at: float
    """When it has joined, or probably will."""
    tokens: int
    """At that moment."""
    rest: Expected
    """Tokens that it will still produce."""
    tbt: float | None
    """Its limit, seconds."""
    expected_load: float | None = None
    """Of the instance when it joins, 1 at its limit; None where nobody looked."""
    joins: int = 0
    """The bucket of `joins_at`."""
    ends: tuple[int, ...] = ()
    """The bucket of each slice's end."""


@dataclass(slots=True)
class Curve:
    """Slices of requests, and their tokens, by the bucket of time in which something happens to them."""

    first: int = 0
    """The bucket of now; earlier ones are forgotten."""
    slices: int = 0
    tokens: int = 0
    """Of all buckets."""
    _slices: list[int] = field(default_factory=lambda: [0] * BUCKETS)
    _tokens: list[int] = field(default_factory=lambda: [0] * BUCKETS)

    def advance(self, bucket: int) -> None:
        for at in range(max(self.first, bucket - BUCKETS), bucket):
            at %= BUCKETS
            self.slices -= self._slices[at]
            self.tokens -= self._tokens[at]
            self._slices[at] = self._tokens[at] = 0
        self.first = max(self.first, bucket)

    def add(self, bucket: int, slices: int, tokens: int) -> None:
        """Negative numbers take back what was added to the same bucket."""
        if bucket >= self.first:
            at = bucket % BUCKETS
            self._slices[at] += slices
            self._tokens[at] += tokens
            self.slices += slices
            self.tokens += tokens

    def add_each(self, buckets: Iterable[int], slices: int, tokens: int) -> None:
        """As `add` to one bucket after another, so much to each."""
        all_slices, all_tokens, first, count = self._slices, self._tokens, self.first, 0
        for bucket in buckets:
            if bucket >= first:
                at = bucket % BUCKETS
                all_slices[at] += slices
                all_tokens[at] += tokens
                count += 1
        self.slices += count * slices
        self.tokens += count * tokens

    def until(self, bucket: int) -> tuple[int, int]:
        """Slices and tokens from now to the end of that bucket."""
        if bucket >= self.first + BUCKETS - 1:
            return self.slices, self.tokens
        start, end = self.first % BUCKETS, bucket % BUCKETS + 1
        if start < end:
            return sum(self._slices[start:end]), sum(self._tokens[start:end])
        return self.slices - sum(self._slices[end:start]), self.tokens - sum(self._tokens[end:start])

    def check_integrity(self) -> None:
        assert (self.slices, self.tokens) == (sum(self._slices), sum(self._tokens))
        assert min(*self._slices, *self._tokens) >= 0


@dataclass(slots=True)
class Ahead:
    """Of one decode instance. `step` is always the seconds that one of its steps takes."""

    joined: dict[RequestId, Stay] = field(default_factory=dict)
    """In order of joining."""
    coming: dict[RequestId, Stay] = field(default_factory=dict)
    last_coming: float = 0.0
    """No known request joins later."""
    _joined_tokens: int = 0
    _joined_at: float = 0.0
    """Sum over those that have joined."""
    _coming_tokens: int = 0
    _limits: dict[float, int] = field(default_factory=dict)
    """TBT limits, and how many requests have each."""
    _join_tokens: float = 0.0
    """A second, of late."""
    _counted_at: float = 0.0
    _leaving: Curve = field(default_factory=Curve)
    """The ends of those that have joined."""
    _joining: Curve = field(default_factory=Curve)
    """Of those that are coming."""
    _passing: Curve = field(default_factory=Curve)
    """Their ends."""

    def book(self, request: RequestId, stay: Stay, step: float, now: float) -> None:
        """It has been placed and will join."""
        self._advance(now)
        self._book_limit(stay.tbt, 1)
        self.coming[request] = stay
        self._coming_tokens += stay.tokens
        self.last_coming = max(self.last_coming, stay.joins_at)
        stay.joins = self._bucket(max(stay.joins_at, now))
        stay.ends = self._ends(stay, step)
        self._joining.add(stay.joins, SLICES, stay.tokens * SLICES)
        _add(self._passing, stay, 1)

    def join(self, request: RequestId, step: float, now: float) -> None:
        stay = self.coming[request]
        self._advance(now)
        self._unbook_coming(request)
        stay.joins_at = now
        stay.ends = self._ends(stay, step)
        self.joined[request] = stay
        self._joined_tokens += stay.tokens
        self._joined_at += now
        _add(self._leaving, stay, 1)
        fading = _RATE_SECONDS / (_RATE_SECONDS + max(now - self._counted_at, 0.0))
        self._join_tokens = self._join_tokens * fading + stay.tokens / _RATE_SECONDS
        self._counted_at = now

    def leave(self, request: RequestId) -> None:
        """Whatever it was doing; one that is not booked is ignored."""
        stay = self.joined.pop(request, None)
        if stay is not None:
            self._joined_tokens -= stay.tokens
            self._joined_at = self._joined_at - stay.joins_at if self.joined else 0.0
            _add(self._leaving, stay, -1)
        elif (stay := self.coming.get(request)) is not None:
            self._unbook_coming(request)
        else:
            return
        self._book_limit(stay.tbt, -1)

    @property
    def batch(self) -> int:
        """All that are assigned, wherever they are."""
        return len(self.joined) + len(self.coming)

    @property
    def tokens(self) -> int:
        """Of all that are assigned, when they join."""
        return self._joined_tokens + self._coming_tokens

    def strictest(self, own: float | None = None) -> float | None:
        """The least TBT limit of all that are here or coming, and of one with the limit `own`."""
        least = min(self._limits, default=None)
        return own if least is None or (own is not None and own < least) else least

    def join_tokens(self, now: float) -> float:
        """Tokens a second that joined of late."""
        return self._join_tokens * _RATE_SECONDS / (_RATE_SECONDS + max(now - self._counted_at, 0.0))

    def now(self, step: float, now: float) -> Load:
        """Only what runs: what a look at the instance would show."""
        batch = len(self.joined)
        return Load(batch, self._joined_tokens + max(batch * now - self._joined_at, 0.0) / step)

    def most(self, time: float, step: float, now: float) -> Load:
        """More than there can be at that time of those that are known: nobody leaves. Cheaper than `at`."""
        batch = self.batch
        running = self.now(step, now)
        return Load(batch, running.tokens + self._coming_tokens + batch * max(time - now, 0.0) / step)

    def at(self, time: float, step: float, now: float) -> Load:
        """With what is coming by then, and without what has ended by then."""
        self._advance(now)
        ahead = max(time - now, 0.0)
        bucket = int((now + ahead) / BUCKET_SECONDS)
        running = self.now(step, now)
        batch, tokens = running.batch, running.tokens
        if self._leaving.slices:
            gone, gone_tokens = self._leaving.until(bucket)
            batch *= 1.0 - gone / self._leaving.slices
            tokens *= 1.0 - gone_tokens / self._leaving.tokens
        tokens += batch * ahead / step
        joins, join_tokens = self._joining.until(bucket)
        ended, ended_tokens = self._passing.until(bucket)
        late, late_tokens = self._joining.slices - joins, self._joining.tokens - join_tokens
        batch += max(len(self.coming) - (late + ended) / SLICES, 0.0)
        tokens += max(self._coming_tokens - (late_tokens + ended_tokens) / SLICES, 0.0)
        return Load(batch, tokens)

    def check_integrity(self) -> None:
        assert self._joined_tokens == sum(stay.tokens for stay in self.joined.values())
        assert self._coming_tokens == sum(stay.tokens for stay in self.coming.values())
        limits = [stay.tbt for stay in (*self.joined.values(), *self.coming.values()) if stay.tbt is not None]
        assert sum(self._limits.values()) == len(limits)
        assert min(self._limits, default=None) == min(limits, default=None)
        for curve in (self._leaving, self._joining, self._passing):
            curve.check_integrity()

    def _advance(self, now: float) -> None:
        bucket = int(now / BUCKET_SECONDS)
        if bucket > self._leaving.first:
            for curve in (self._leaving, self._joining, self._passing):
                curve.advance(bucket)

    def _bucket(self, time: float) -> int:
        return min(int(time / BUCKET_SECONDS), self._leaving.first + BUCKETS - 1)

    def _ends(self, stay: Stay, step: float) -> tuple[int, ...]:
        joins_at, last = stay.joins_at, self._leaving.first + BUCKETS - 1
        ends = [int((joins_at + tokens * step) / BUCKET_SECONDS) for tokens in stay.rest]
        return tuple([end if end < last else last for end in ends])

    def _unbook_coming(self, request: RequestId) -> None:
        stay = self.coming.pop(request)
        self._coming_tokens -= stay.tokens
        self._joining.add(stay.joins, -SLICES, -stay.tokens * SLICES)
        _add(self._passing, stay, -1)
        if not self.coming:
            self.last_coming = 0.0

    def _book_limit(self, tbt: float | None, count: int) -> None:
        if tbt is not None:
            left = self._limits[tbt] = self._limits.get(tbt, 0) + count
            if not left:
                del self._limits[tbt]


def _add(ends: Curve, stay: Stay, sign: int) -> None:
    ends.add_each(stay.ends, sign, sign * stay.tokens)
