"""What `make bench-goodput` makes of its probes: tables, reports beside the simulator's, and what must hold."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec import Struct
from rich.console import Console
from rich.table import Table

from moonpool.bench.goodput_live import Probe
from moonpool.bench.goodput_systems import Coupled, Pools, Servers, System
from moonpool.bench.ninety import Found
from moonpool.bench.result import Bar, bar
from moonpool.report.html import Page, page
from moonpool.report.rows import Column
from moonpool.report.run import Run

TIMES_PLAIN = 1.75
TIMES_TUNED = 1.1
POINT_ERROR = 0.15
TTFT_ERROR = 0.2
LEAST_IDLE = 0.1
MOST_STEPS = 1.1
MOST_LAG = 0.05
"""Seconds."""


class Measured(Struct):
    """One system; everything once for each seed."""

    system: System | Servers
    live: list[Found] = []
    simulated: list[Found] = []
    probes: list[dict[float, Probe]] = []
    """By rate."""
    foreseen: list[Run] = []
    """Simulated at the rate of `shown`."""

    def shown(self, at: int) -> Probe:
        """Of one seed: at the highest rate that does, else at the lowest that was looked at."""
        probes = self.probes[at]
        return probes[self.live[at].low or min(probes)]

    @property
    def point(self) -> float:
        """Mean of the seeds."""
        return statistics.mean(found.rate for found in self.live)

    @property
    def most(self) -> float:
        """What it serves at most: its 90 % point, or where it has none the lowest rate that does not do."""
        return statistics.mean(found.rate or found.high for found in self.live)

    @property
    def foreseen_point(self) -> float:
        return statistics.mean(found.rate for found in self.simulated)

    @property
    def is_bracketed(self) -> bool:
        """For every seed."""
        return all(found.is_bracketed for found in self.live)

    @property
    def error(self) -> float | None:
        """Of the simulator's 90 % point; None where the live one is not bracketed for every seed."""
        if not self.simulated or not self.is_bracketed:
            return None
        return self.foreseen_point / self.point - 1

    def ratio(self, of: Callable[[Run], float]) -> float | None:
        """A figure of the simulator's runs over that of the live ones, means of the seeds; None for none."""
        if not self.foreseen:
            return None
        live = statistics.mean(of(self.shown(at).run) for at in range(len(self.live)))
        return statistics.mean(of(run) for run in self.foreseen) / live if live else None


class Results(Struct):
    measured: list[Measured] = []
    half: Pools | None = None
    planned: Pools | None = None
    tuned: Coupled | None = None

    def of(self, system: System | None) -> Measured | None:
        return next((each for each in self.measured if each.system == system), None)

    @property
    def plain(self) -> list[Measured]:
        return [m for m in self.measured if isinstance(m.system, Coupled) and m.system.routing == "round-robin"]

    @property
    def all_probes(self) -> list[Probe]:
        return [probe for each in self.measured for seed in each.probes for probe in seed.values()]


def bars(results: Results, lack: str = "") -> list[Bar]:
    """`lack`: why nothing was measured."""
    half, planned, tuned = (results.of(each) for each in (results.half, results.planned, results.tuned))
    plain: list[Measured | None] = [*results.plain] or [None]
    found = [
        bar(f"{name(half)}: 90 % point, times {name(each)}", _times(half, each), TIMES_PLAIN, reason=lack)
        for each in plain
    ]
    found.append(
        bar(
            f"{name(planned)} (planned): 90 % point, times {name(tuned)}",
            _times(planned, tuned),
            TIMES_TUNED,
            reason=lack,
        )
    )
    probes = results.all_probes
    return [
        *found,
        *foreseen_bars(results),
        bar("machine idle, least of all probes", min((p.idle for p in probes), default=None), LEAST_IDLE, reason=lack),
        bar(
            "steps, times the profile's seconds, worst instance",
            max((p.steps for p in probes if p.steps is not None), default=None),
            MOST_STEPS,
            at_most=True,
            reason=lack,
        ),
        _lag_bar(probes, "", lack),
    ]


def _lag_bar(probes: Sequence[Probe], prefix: str, lack: str = "") -> Bar:
    latest = max((p.lag for p in probes), default=None)
    return bar(f"{prefix}requests sent late, P99, worst probe (s)", latest, MOST_LAG, at_most=True, reason=lack)


TORCH = "torch, "


def torch_bars(results: Results) -> list[Bar]:
    return [*foreseen_bars(results, TORCH), _lag_bar(results.all_probes, TORCH)]


def torch_ratios(results: Results) -> dict[str, float]:
    """The first system's 90 % point, times what each other serves at most."""
    if not results.measured:
        return {}
    first, *others = results.measured
    return {
        f"{name(first)}, times {name(each)}": round(times, 3)
        for each in others
        if (times := _times(first, each)) is not None
    }


def foreseen_bars(results: Results, prefix: str = "") -> list[Bar]:
    found = []
    for each in results.measured:
        if not each.simulated:
            continue
        error, ttft = each.error, each.ratio(lambda run: run.summary.ttft.p50)
        found.append(
            bar(
                f"{prefix}{name(each)}: the simulator's 90 % point, off by",
                None if error is None else abs(error),
                POINT_ERROR,
                at_most=True,
                reason="the live one is not bracketed",
            )
        )
        found.append(
            bar(
                f"{prefix}{name(each)}: its median TTFT, off by",
                None if ttft is None else abs(ttft - 1),
                TTFT_ERROR,
                at_most=True,
                reason="no first token",
            )
        )
    return found


def name(measured: Measured | None) -> str:
    return "-" if measured is None else measured.system.name


def _times(ours: Measured | None, other: Measured | None) -> float | None:
    """Of what the other serves at most."""
    return ours.point / other.most if ours is not None and other is not None and other.most else None


def points_table(results: Results, slow_down: float) -> Table:
    shown = Table("system", title="90 % points, requests/s of the hardware: mean (least - most over the seeds)")
    for heading in ("live", "simulated", "off", "probes", "idle\nleast", "steps\nworst", "late (ms)\nP99"):
        shown.add_column(heading, justify="right")
    for each in results.measured:
        probes = [probe for seed in each.probes for probe in seed.values()]
        error = each.error
        shown.add_row(
            each.system.name,
            _spread([found.rate * slow_down for found in each.live])
            + (
                ""
                if each.is_bracketed
                else f"\nbelow {each.most * slow_down:.2f}"
                if not each.point
                else "\nno bracket"
            ),
            _spread([found.rate * slow_down for found in each.simulated]) if each.simulated else "",
            "" if error is None else f"{error:+.1%}",
            str(len(probes)),
            f"{min(p.idle for p in probes):.0%}",
            "" if (steps := max((p.steps or 0.0) for p in probes)) == 0.0 else f"{steps:.2f}",
            f"{max(p.lag for p in probes) * 1e3:.0f}",
        )
    return shown


FIGURES: tuple[tuple[str, Callable[[Run], float]], ...] = (
    ("attained", lambda run: run.summary.attained / run.summary.requests),
    ("goodput, requests/s", lambda run: run.summary.goodput_requests),
    ("TTFT, median (s)", lambda run: run.summary.ttft.p50),
    ("TTFT, P90 (s)", lambda run: run.summary.ttft.p90),
    ("slowest tenth, median (s)", lambda run: run.summary.slowest_tenth.p50),
    ("slowest tenth, P90 (s)", lambda run: run.summary.slowest_tenth.p90),
    ("cached", lambda run: run.summary.cached_share),
)


def errors_table(results: Results) -> Table:
    shown = Table("live, simulated", title="at the highest rate that does, live seconds: means of the seeds")
    for each in results.measured:
        shown.add_column(each.system.name, justify="right")
    for heading, of in FIGURES:
        cells = []
        for each in results.measured:
            live = statistics.mean(of(each.shown(at).run) for at in range(len(each.live)))
            if not each.foreseen:
                cells.append(f"{live:.3g}")
                continue
            simulated = statistics.mean(of(run) for run in each.foreseen)
            cells.append(f"{live:.3g}, {simulated:.3g}" + (f" ({simulated / live - 1:+.0%})" if live else ""))
        shown.add_row(heading, *cells)
    return shown


def limiting_table(results: Results) -> Table:
    """What each system has nothing left of, at the rates of `errors_table`."""
    shown = Table("system", "limited by, for each seed", title="what limits, of processors: shares of one core")
    for each in results.measured:
        probes = [each.shown(at) for at in range(len(each.live))]
        shown.add_row(each.system.name, "\n".join(probe.limited_by for probe in probes))
    return shown


def show(results: Results, slow_down: float, folder: Path, facts: Sequence[str], console: Console) -> None:
    """Tables on the console, reports in the folder; nothing where nothing was measured."""
    if not results.measured:
        return
    console.print(points_table(results, slow_down))
    console.print(errors_table(results))
    for file in write_reports(results, folder, facts):
        console.print(f"written: {file}")


def _spread(values: Sequence[float]) -> str:
    middle = f"{statistics.mean(values):.2f}"
    return middle if len(values) < 2 else f"{middle} ({min(values):.2f} - {max(values):.2f})"


def write_reports(results: Results, folder: Path, facts: Sequence[str]) -> list[Path]:
    """One of all systems live, and one of each beside its simulation."""
    folder.mkdir(parents=True, exist_ok=True)
    live = {each.system.name: _live(each) for each in results.measured}
    pages = {"goodput.html": Page("Moonpool: goodput, live", tuple(facts), tuple(live.values()))}
    for number, each in enumerate(results.measured):
        if not each.foreseen:
            continue
        columns = (live[each.system.name], Column(f"{each.system.name}, simulated", tuple(each.foreseen)))
        pages[f"simulated-{number}.html"] = Page(
            f"Moonpool: {each.system.name}, live and simulated", tuple(facts), columns
        )
    for file, report in pages.items():
        (folder / file).write_text(page(report))
    return [folder / file for file in pages]


def _live(measured: Measured) -> Column:
    return Column(measured.system.name, tuple(measured.shown(at).run for at in range(len(measured.live))))
