"""The numbers of `make bench-store`: passes as they were measured, their tables, and the bars that they must reach."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rich.table import Table

KIB, MIB = 1 << 10, 1 << 20
OURS, PEER = "moonpool", "mooncake"
REMOTE, LOCAL = "remote, tcp loopback", "same host"
BATCH = 32


@dataclass(frozen=True, slots=True)
class Case:
    """One row: what is measured, by each side in turn."""

    place: str
    do: str
    size: int
    batch: int

    def __str__(self) -> str:
        return f"{self.do} {size_name(self.size)}, {'single' if self.batch == 1 else f'batch of {self.batch}'}"


@dataclass(slots=True)
class Series:
    """One side's passes of a case. A pass is one walk over all of the buffer."""

    passes: list[float] = field(default_factory=list)
    """Seconds each."""
    calls: list[float] = field(default_factory=list)
    """Seconds of every call of every pass."""

    def add(self, seconds: Sequence[float]) -> None:
        self.passes.append(sum(seconds))
        self.calls += seconds

    def percentile_us(self, percent: float) -> float:
        ordered = sorted(self.calls)
        return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))] * 1e6


class Figures:
    def __init__(self, walk_bytes: int) -> None:
        self.walk_bytes = walk_bytes
        self.cases: dict[Case, dict[str, Series]] = {}
        self.limits: dict[str, list[float]] = {}
        """Seconds for the walk, by what was measured."""

    def add(self, case: Case, side: str, seconds: Sequence[float]) -> None:
        self.cases.setdefault(case, {}).setdefault(side, Series()).add(seconds)

    def add_limit(self, name: str, seconds: float) -> None:
        self.limits.setdefault(name, []).append(seconds)

    def series(self, case: Case, side: str) -> Series | None:
        return self.cases.get(case, {}).get(side)

    def gbs(self, case: Case, side: str) -> list[float]:
        """GB/s of each pass."""
        return [self.walk_bytes / 1e9 / seconds for seconds in self.cases[case][side].passes]

    def limit_gbs(self, name: str) -> list[float]:
        return [self.walk_bytes / 1e9 / seconds for seconds in self.limits[name]]

    def ratio(self, case: Case) -> float | None:
        """How many times faster than the peer: the median over the repetitions, each side's beside the other's."""
        ours, theirs = self.series(case, OURS), self.series(case, PEER)
        return median_ratio(theirs.passes, ours.passes) if ours and theirs else None

    def share(self, case: Case, limit: str) -> float | None:
        """What part of a limit is reached."""
        ours, raw = self.series(case, OURS), self.limits.get(limit)
        return median_ratio(raw, ours.passes) if ours and raw else None

    def tables(self) -> Iterator[Table]:
        for place in dict.fromkeys(case.place for case in self.cases):
            yield self._table(place, [case for case in self.cases if case.place == place])
        table = Table("limit of this machine", "GB/s", "min", "max", "n", title="raw, in the same run")
        for name in self.limits:
            rates = self.limit_gbs(name)
            cells = (f"{v:.2f}" for v in (statistics.median(rates), min(rates), max(rates)))
            table.add_row(name, *cells, str(len(rates)))
        yield table

    def _table(self, place: str, cases: Sequence[Case]) -> Table:
        both = any(PEER in self.cases[case] for case in cases)
        title = f"{place}: median (min–max) of {len(self.cases[cases[0]][OURS].passes)} walks over "
        table = Table("call", title=title + f"{self.walk_bytes // MIB} MiB", show_lines=False)
        for side in (OURS, PEER) if both else (OURS,):
            table.add_column(f"{side}\nGB/s", justify="right")
            table.add_column("p50 / p99\nµs a call", justify="right")
        if both:
            table.add_column("times\nfaster", justify="right")
        for case in cases:
            cells = [cell for side in (OURS, PEER) if both for cell in self._cells(case, side)]
            if not both:
                cells = self._cells(case, OURS)
            ratio = self.ratio(case)
            table.add_row(str(case), *cells, *([f"{ratio:.2f}" if ratio else "–"] if both else []))
        return table

    def _cells(self, case: Case, side: str) -> list[str]:
        series = self.cases[case].get(side)
        if series is None:
            return ["–", "–"]
        rates = self.gbs(case, side)
        rate = f"{statistics.median(rates):.2f} ({min(rates):.2f}–{max(rates):.2f})"
        if case.do not in ("put", "get"):
            rate = ""
        return [rate, f"{series.percentile_us(50):,.0f} / {series.percentile_us(99):,.0f}"]


def median_ratio(slower: Sequence[float], faster: Sequence[float]) -> float:
    """Of the pairs in the order measured: how many times longer the first took than the second."""
    return statistics.median(a / b for a, b in zip(slower, faster, strict=False))


def size_name(size: int) -> str:
    return f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB"
