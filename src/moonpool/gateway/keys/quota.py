"""What one key may use: requests and tokens a minute, streams at one time.

Pure: whoever asks brings the time, in seconds on a clock that never goes back.
"""

from __future__ import annotations

from msgspec import Struct

MINUTE = 60.0
GRAIN = 1e-6
"""Seconds. A wait that is shorter is none: sums of floats are not exact."""
WEIGHT = 0.1
"""Of the newest stream in the average."""


class Allowance(Struct, frozen=True):
    """None: without limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    streams: int | None = None
    """At one time; each prompt of a request is one."""


class OverQuota(Struct, frozen=True):
    quota: str
    """As the keys file calls it."""
    limit: int
    wait: float
    """Seconds until there will be room; for streams, until there is likely to be."""


class Bucket:
    """Fills evenly, up to a minute's worth. May be in debt: what is known at the end only is taken all the same."""

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at = now

    def wait(self, amount: float, now: float) -> float:
        """Seconds until `amount` may be taken. What is more than a whole bucket waits for a full one."""
        lacking = min(amount, self.per_minute) - self._level_at(now)
        seconds = lacking * MINUTE / self.per_minute
        return seconds if seconds > GRAIN else 0.0

    def take(self, amount: float, now: float) -> None:
        """Below zero: it is given back."""
        self._level = self._level_at(now) - amount
        self._at = now

    def resize(self, per_minute: int, now: float) -> None:
        """Whoever had to wait waits as long as before."""
        self._level = self._level_at(now) * per_minute / self.per_minute
        self._at = now
        self.per_minute = per_minute

    def _level_at(self, now: float) -> float:
        return min(self._level + (now - self._at) * self.per_minute / MINUTE, self.per_minute)


class Quota:
    """Of one key: what it has used of its allowance."""

    def __init__(self, allowed: Allowance, now: float) -> None:
        self.allowed = allowed
        self.streams = 0
        """That are open."""
        self._requests = _bucket(None, allowed.requests_per_minute, now)
        self._tokens = _bucket(None, allowed.tokens_per_minute, now)
        self._stream_seconds = 1.0
        """That a stream lasts, averaged."""

    def over(self, now: float, *, requests: int = 0, streams: int = 0, tokens: int = 0) -> OverQuota | None:
        """What keeps so many more out; of several quotas the one that does longest. None: nothing."""
        found = []
        for quota, bucket, amount in (
            ("requests-per-minute", self._requests, requests),
            ("tokens-per-minute", self._tokens, tokens),
        ):
            if bucket is not None and amount and (wait := bucket.wait(amount, now)):
                found.append(OverQuota(quota, bucket.per_minute, wait))
        most = self.allowed.streams
        if most is not None and streams and (lacking := self.streams + streams - most) > 0:
            found.append(OverQuota("streams", most, lacking * self._stream_seconds / max(self.streams, 1)))
        return max(found, key=lambda over: over.wait, default=None)

    def take(self, now: float, *, requests: int = 0, streams: int = 0, tokens: int = 0) -> None:
        """Also what is over; tokens below zero are given back."""
        self.streams += streams
        if self._requests is not None:
            self._requests.take(requests, now)
        if self._tokens is not None:
            self._tokens.take(tokens, now)

    def close(self, streams: int, seconds: float) -> None:
        """So many streams, which were open for so long, have ended."""
        self.streams -= streams
        self._stream_seconds += WEIGHT * (seconds - self._stream_seconds)

    def change(self, allowed: Allowance, now: float) -> None:
        """What was used stays used; a limit that is new begins with a full minute."""
        self.allowed = allowed
        self._requests = _bucket(self._requests, allowed.requests_per_minute, now)
        self._tokens = _bucket(self._tokens, allowed.tokens_per_minute, now)

    def check_integrity(self) -> None:
        assert self.streams >= 0, f"{self.streams} streams are open"


def _bucket(before: Bucket | None, per_minute: int | None, now: float) -> Bucket | None:
    if per_minute is None:
        return None
    if before is None:
        return Bucket(per_minute, now)
    before.resize(per_minute, now)
    return before
