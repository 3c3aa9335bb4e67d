"""Priority classes: which one a request is in, which limits it has, what is kept for those that go before it.

A request names a class, or an integer as in vLLM: the smaller, the sooner. An integer means the first class whose rank
is not smaller, and the last one where all are: nobody goes sooner than asked for. Who asks for nothing is in the class
`default` if there is one, else in the last. `batch` is always there: without limits, behind all others, in idle
capacity only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from moonpool.core.vocabulary import PriorityClass, Slo

BATCH = PriorityClass("batch", rank=1 << 30)
DEFAULT = PriorityClass("default")
MOST_CLASSES = 32
MOST_RANK = 1_000_000
_NAME = re.compile(r"(?!-?\d+$)[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_INTEGER = re.compile(r"-?\d{1,20}")


class Classes:
    """The configured ones. Raises ValueError for what cannot work; it names the class and the limit."""

    def __init__(self, configured: Sequence[PriorityClass], slo: Slo) -> None:
        """`slo`: of requests and classes that have none of their own."""
        check_classes(configured)
        served = sorted(configured or [DEFAULT], key=lambda c: (c.rank, c.name))
        self.all = (*served, BATCH)
        """The soonest first."""
        self._slo = slo
        self._by_name = {c.name: c for c in self.all}
        self._default = self._by_name.get(DEFAULT.name, served[-1])

    def of(self, asked: str) -> PriorityClass:
        """`asked`: a class, an integer, or nothing; what is unknown here is nothing."""
        if not asked:
            return self._default
        if (found := self._by_name.get(asked)) is not None:
            return found
        if _INTEGER.fullmatch(asked):
            rank = int(asked)
            served = self.all[:-1]
            return next((c for c in served if c.rank >= rank), served[-1])
        return self._default

    def sooner(self, priority: PriorityClass) -> tuple[PriorityClass, ...]:
        """Those of an earlier rank for which something is kept."""
        return tuple(c for c in self.all if c.share and c.rank < priority.rank)

    def place(self, priority: PriorityClass) -> int:
        """Of its rank in the order of all ranks, from 0."""
        return len({c.rank for c in self.all if c.rank < priority.rank})

    def limits(self, own: Slo, priority: PriorityClass) -> Slo:
        """The request's own before its class's before those of all. Batch work has none."""
        if is_batch(priority):
            return Slo()
        ttft = next((s.ttft for s in (own, priority.slo) if s.ttft is not None), self._slo.ttft)
        tbt = next((s.tbt for s in (own, priority.slo) if s.tbt is not None), self._slo.tbt)
        return Slo(ttft, tbt)


def is_batch(priority: PriorityClass) -> bool:
    return priority.rank >= BATCH.rank


def kept(sooner: tuple[PriorityClass, ...], taken: Callable[[int], float]) -> float:
    """The share, 0 to 1, of something that must stay free for these classes: what each has not taken of its own yet.

    `taken`: the share that a rank has.
    """
    return sum([max(c.share - taken(c.rank), 0.0) for c in sooner]) if sooner else 0.0


def check_classes(classes: Sequence[PriorityClass]) -> None:
    """Raises ValueError."""
    if len(classes) > MOST_CLASSES:
        raise ValueError(f"there are {len(classes)} classes; give at most {MOST_CLASSES}")
    seen: dict[str, None] = {}
    for c in classes:
        if not _NAME.fullmatch(c.name):
            raise ValueError(f"class {c.name!r}: a name has 1 to 64 letters, digits, dots, dashes, and is no number")
        if c.name == BATCH.name:
            raise ValueError("class 'batch' is built in and has no limits and no share; choose another name")
        if c.name in seen:
            raise ValueError(f"class {c.name!r} is there twice")
        seen[c.name] = None
        if abs(c.rank) > MOST_RANK:
            raise ValueError(f"class {c.name!r}: rank is {c.rank}; give one from {-MOST_RANK} to {MOST_RANK}")
        for limit in (c.slo.ttft, c.slo.tbt):
            if limit is not None and not 0 < limit < float("inf"):
                raise ValueError(f"class {c.name!r}: a limit is {limit:g} s; give a finite time above 0")
        if not 0 <= c.share < 1:
            raise ValueError(f"class {c.name!r}: share is {c.share:g}; give a number from 0 to below 1")
    if (total := sum(c.share for c in classes)) > 0.95:
        raise ValueError(f"the shares of all classes add up to {total:g}; keep them within 0.95")
