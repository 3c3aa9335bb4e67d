"""`moonpool goodput`: the default policies against all others, each at its own 90 % point and in overload."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table as Grid

from moonpool.command.choices import some_of
from moonpool.command.contest import FINE, Contender, Contest
from moonpool.command.hardware import hardware_profile
from moonpool.command.machine import cores
from moonpool.command.processes import Runners
from moonpool.command.simulate import FILE_COLUMNS, QUEUE_BOUND, read_seeds
from moonpool.command.workload import Traffic, Workload
from moonpool.core.admission import ADMISSION_POLICIES, AdmissionPolicy
from moonpool.core.conductor import ConductorConfig
from moonpool.core.placement import PLACEMENT_POLICIES, PlacementPolicy
from moonpool.core.vocabulary import Slo
from moonpool.errors import ConfigError
from moonpool.report.contest import (
    ContestReport,
    Table,
    Unservable,
    cells,
    contest_page,
    headings,
    told,
    unserved,
)
from moonpool.report.goodput import gain, goodput
from moonpool.report.run import Run
from moonpool.report.summary import BUCKETS
from moonpool.sim.cluster import Setup
from moonpool.sim.unservable import unservable
from moonpool.trace.arrivals import Arrivals
from moonpool.trace.request import TraceRequest

DEFAULT = ConductorConfig()
REFERENCE = "algorithm-1 early"
"""What no prompt length shall fare much worse than."""
CLOSER = 3
"""So many of the others are looked at closely, the best at first sight: one of them is the best."""


class Wanted(msgspec.Struct, frozen=True):
    """The command line."""

    workload: Workload
    hardware: str
    prefill: int
    decode: int
    pipeline: int
    placement: str
    admission: str
    ttft: float
    tbt: float
    seeds: str
    start: float
    overload: float
    html: Path | None
    as_json: bool
    jobs: int


def measure(wanted: Wanted) -> int:
    """Print what came of it. Raises ConfigError or TraceError."""
    seeds, profile = read_seeds(wanted.seeds), hardware_profile(wanted.hardware)
    contenders = _contenders(wanted)
    traffic = Traffic(wanted.workload, profile.block_tokens)
    requests = traffic.requests(seed=seeds[0])
    with Runners(wanted.jobs or cores(), traffic) as runners, _progress() as progress:
        bar = progress.add_task("", total=1.0)
        contest = Contest(
            wanted.workload,
            seeds,
            runners,
            lambda what, share: progress.update(bar, description=what, completed=share / len(requests)),
        )
        report = _report(wanted, contest, contenders, seeds, requests)
    if wanted.html is not None:
        try:
            wanted.html.write_text(contest_page(report))
        except OSError as e:
            raise ConfigError(f"--html {wanted.html}: {e.strerror}") from None
    if wanted.as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(report)).decode() + "\n")
    else:
        _print(report)
    return 0


def _contenders(wanted: Wanted) -> tuple[Contender, ...]:
    """The default first, then every other placement with every admission."""
    placements: list[PlacementPolicy] = some_of("--against", wanted.placement, PLACEMENT_POLICIES)
    admissions: list[AdmissionPolicy] = some_of("--admission", wanted.admission, ADMISSION_POLICIES)
    pairs = [(DEFAULT.placement, DEFAULT.admission)]
    pairs += [(placement, each) for placement in placements if placement != DEFAULT.placement for each in admissions]
    if len(pairs) < 2:
        raise ConfigError(f"--against {wanted.placement!r}: {DEFAULT.placement} is the default; name others")
    profile, slo = hardware_profile(wanted.hardware), Slo(wanted.ttft, wanted.tbt)
    found = []
    for placement, admission in pairs:
        config = ConductorConfig(placement=placement, admission=admission, slo=slo, queue_bound=QUEUE_BOUND)
        setup = Setup(profile, wanted.prefill, wanted.decode, config, pipeline=wanted.pipeline)
        found.append(Contender(f"{placement} {admission}", setup))
    return tuple(found)


def _report(
    wanted: Wanted,
    contest: Contest,
    contenders: Sequence[Contender],
    seeds: tuple[int, ...],
    requests: Arrivals,
) -> ContestReport:
    default, others = contenders[0], contenders[1:]
    points = contest.coarse(contenders, wanted.start)
    ranked = sorted(others, key=lambda each: -points[each.name].speed)
    close = [default, *ranked[:CLOSER]]
    points |= contest.fine(close, points)
    best = max(ranked[:CLOSER], key=lambda each: _requests(points[each.name].runs))
    order = [default, *sorted(others, key=lambda each: (each is not best, -points[each.name].speed))]
    speeds = [points[each.name].speed for each in order]
    at_points = dict(
        zip([each.name for each in order], contest.at(order, speeds, "each at its 90 % point"), strict=True)
    )
    beside = [default, best, *(each for each in others if each.name == REFERENCE and each is not best)]
    speed = points[best.name].speed
    shared = contest.at(beside, [speed] * len(beside), "at the best other's 90 % point")
    loads = [wanted.overload * speed] * len(order)
    overload = contest.at(order, loads, f"{wanted.overload:g} times that")
    tables = (
        Table(
            "Each at its own 90 % point",
            f"the highest speed at which 90 % of what is offered attain: within {FINE:.1%} by all seeds for "
            f"{_names([default, *ranked[:CLOSER]])}; within 5 % by the first seed for the others",
            tuple(goodput(each.name, points[each.name].speed, at_points[each.name]) for each in order),
            (gain(default.name, at_points[default.name], best.name, at_points[best.name]),),
        ),
        Table(
            "At the best other's 90 % point",
            f"that of {best.name}",
            tuple(goodput(each.name, speed, runs) for each, runs in zip(beside, shared, strict=True)),
            tuple(
                gain(default.name, shared[0], each.name, runs)
                for each, runs in zip(beside[1:], shared[1:], strict=True)
            ),
        ),
        Table(
            "In overload",
            f"{wanted.overload:g} times that speed",
            tuple(goodput(each.name, loads[0], runs) for each, runs in zip(order, overload, strict=True)),
            (gain(default.name, overload[0], best.name, overload[1]),),
        ),
    )
    return ContestReport(
        _facts(wanted, len(requests), seeds),
        seeds,
        default.name,
        best.name,
        tables,
        _unservable(default.setup, requests),
    )


def _requests(runs: Sequence[Run]) -> float:
    return sum(run.summary.goodput_requests for run in runs)


def _names(contenders: Sequence[Contender]) -> str:
    return ", ".join(each.name for each in contenders)


def _facts(wanted: Wanted, count: int, seeds: Sequence[int]) -> tuple[str, ...]:
    workload = wanted.workload
    slice_ = f" (the first {workload.first})" if workload.first else ""
    together = f", pipelines of {wanted.pipeline}" if wanted.pipeline > 1 else ""
    facts = [
        f"{workload.source}: {count} requests{slice_}, jitter {workload.jitter:g} s, "
        f"seeds {', '.join(map(str, seeds))}; speed: how many times as fast as recorded",
        f"{wanted.prefill} prefill and {wanted.decode} decode machines{together}, {wanted.hardware}; "
        f"limits: TTFT {wanted.ttft:g} s, TBT {wanted.tbt:g} s",
    ]
    if len(seeds) > 1 and not workload.jitter:
        facts.append("all seeds have the same arrivals: --jitter SECONDS draws them")
    return tuple(facts)


def _unservable(setup: Setup, requests: Arrivals) -> tuple[Unservable, ...]:
    def bucket(request: TraceRequest) -> str:
        return [name for name, start in BUCKETS if request.input_tokens >= start][-1]

    found = Counter(bucket(each) for each in unservable(requests, setup.profile, setup.conductor.slo))
    of = Counter(bucket(each) for each in requests)
    return tuple(Unservable(name, found[name], of[name]) for name, _ in BUCKETS if of[name])


def _progress() -> Progress:
    shown = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn()
    return Progress(*shown, console=Console(stderr=True), transient=True)


def _print(report: ContestReport) -> None:
    console = Console(highlight=False, width=None if sys.stdout.isatty() else FILE_COLUMNS)
    for fact in report.facts:
        console.print(escape(fact))
    for table in report.tables:
        console.print(f"\n[bold]{escape(table.title)}[/]: {escape(table.note)}")
        grid = Grid(box=SIMPLE, padding=(0, 1), pad_edge=False)
        grid.add_column("")
        for name in headings(table):
            grid.add_column(escape(name), justify="right")
        for line in table.lines:
            grid.add_row(escape(line.name), *(escape(cell) for cell in cells(line)))
        console.print(grid)
        for gain_ in table.gains:
            console.print(escape(told(gain_)))
    console.print(f"\nin brackets: may be chance. {escape(unserved(report.unservable))}")
