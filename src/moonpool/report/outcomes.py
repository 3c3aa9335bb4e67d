"""What became of requests, live or simulated: one by one, and of all of a run in columns of numbers."""

from __future__ import annotations

import struct
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from moonpool.core.vocabulary import Slo

_ROW = struct.Struct("=5d5qHH?")
_COLUMNS = np.dtype(
    [
        ("arrived", "f8"),
        ("ttft", "f8"),
        ("slowest_tenth", "f8"),
        ("p90_interval", "f8"),
        ("longest_interval", "f8"),
        ("input_tokens", "i8"),
        ("output_tokens", "i8"),
        ("cached_tokens", "i8"),
        ("fetched_tokens", "i8"),
        ("computed_tokens", "i8"),
        ("refusal", "u2"),
        ("priority", "u2"),
        ("completed", "?"),
    ]
)
"""As in _ROW; names are numbers here."""
_ROWS_A_TIME = 1024

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


class Outcome(Struct, frozen=True):
    """One request that is over. Times in seconds, lengths in tokens."""

    arrived: float
    input_tokens: int
    output_tokens: int
    """Produced."""
    completed: bool
    ttft: float | None
    """None: there was no first token."""
    slowest_tenth: float
    """The mean of the longest 10 % of its token intervals, at least one; 0 where it has none."""
    p90_interval: float
    longest_interval: float
    cached_tokens: int
    computed_tokens: int
    """By prefill, over all attempts."""
    refusal: str = ""
    """Why it was not served, empty if it was."""
    fetched_tokens: int = 0
    """Those of `cached_tokens` that came from another node."""
    priority: str = ""
    """What it asked for."""

    def attains(self, slo: Slo) -> bool:
        """It is complete and within both limits (DESIGN: words)."""
        if not self.completed or self.ttft is None:
            return False
        in_time = slo.ttft is None or self.ttft <= slo.ttft
        return in_time and (slo.tbt is None or self.slowest_tenth <= slo.tbt)


class Outcomes:
    """One for each request, 85 bytes: there may be millions. Columns have the fields of `Outcome`."""

    def __init__(self) -> None:
        self._rows = bytearray()
        self._count = 0
        self._names: dict[str, int] = {"": 0}
        """Of refusals and classes."""

    @classmethod
    def of(cls, outcomes: Iterable[Outcome]) -> Outcomes:
        found = cls()
        for at, outcome in enumerate(outcomes):
            found.put(at, outcome)
        return found

    def __len__(self) -> int:
        return self._count

    def put(self, at: int, outcome: Outcome) -> None:
        """That of request number `at`, from 0; they come in any order, and none may be lacking in the end."""
        if at >= self._count:
            self._count = at + 1
            if len(self._rows) < self._count * _ROW.size:
                self._rows.extend(bytes(_ROW.size * (self._count + _ROWS_A_TIME) - len(self._rows)))
        _ROW.pack_into(
            self._rows,
            at * _ROW.size,
            outcome.arrived,
            np.nan if outcome.ttft is None else outcome.ttft,
            outcome.slowest_tenth,
            outcome.p90_interval,
            outcome.longest_interval,
            outcome.input_tokens,
            outcome.output_tokens,
            outcome.cached_tokens,
            outcome.fetched_tokens,
            outcome.computed_tokens,
            self._names.setdefault(outcome.refusal, len(self._names)),
            self._names.setdefault(outcome.priority, len(self._names)),
            outcome.completed,
        )

    def where(self, mask: Mask) -> Outcomes:
        """Those alone."""
        found = Outcomes()
        found._names = self._names
        found._rows = bytearray(self._table()[mask].tobytes())
        found._count = len(found._rows) // _ROW.size
        return found

    @property
    def arrived(self) -> Floats:
        return self._table()["arrived"]

    @property
    def ttft(self) -> Floats:
        """NaN: there was no first token."""
        return self._table()["ttft"]

    @property
    def slowest_tenth(self) -> Floats:
        return self._table()["slowest_tenth"]

    @property
    def p90_interval(self) -> Floats:
        return self._table()["p90_interval"]

    @property
    def longest_interval(self) -> Floats:
        return self._table()["longest_interval"]

    @property
    def input_tokens(self) -> Ints:
        return self._table()["input_tokens"]

    @property
    def output_tokens(self) -> Ints:
        return self._table()["output_tokens"]

    @property
    def cached_tokens(self) -> Ints:
        return self._table()["cached_tokens"]

    @property
    def fetched_tokens(self) -> Ints:
        return self._table()["fetched_tokens"]

    @property
    def computed_tokens(self) -> Ints:
        return self._table()["computed_tokens"]

    @property
    def completed(self) -> Mask:
        return self._table()["completed"]

    @property
    def refused(self) -> Mask:
        return self._table()["refusal"] > 0

    def refusals(self) -> dict[str, int]:
        """How many for each reason, by name."""
        counts = np.bincount(self._table()["refusal"], minlength=len(self._names)).tolist()
        return {name: counts[at] for name, at in sorted(self._names.items()) if name and counts[at]}

    def of_priorities(self, names: Iterable[str]) -> Mask:
        """Which asked for one of these classes."""
        return np.isin(self._table()["priority"], [self._names[name] for name in names if name in self._names])

    def priorities(self) -> tuple[str, ...]:
        """All that were asked for."""
        there = np.unique(self._table()["priority"]).tolist()
        return tuple(name for name, at in self._names.items() if at in there)

    def attain(self, slo: Slo) -> Mask:
        """Which do, see `Outcome.attains`."""
        ttft, good = self.ttft, self.completed.copy()
        good &= ~np.isnan(ttft) if slo.ttft is None else ttft <= slo.ttft
        if slo.tbt is not None:
            good &= self.slowest_tenth <= slo.tbt
        return good

    def _table(self) -> npt.NDArray[np.void]:
        # While a view of it lives no outcome can be put.
        return np.frombuffer(self._rows, _COLUMNS, self._count)


def total(values: npt.NDArray[np.generic]) -> int:
    """Of whole numbers, or how many are true."""
    return int(values.sum(dtype=np.int64))
