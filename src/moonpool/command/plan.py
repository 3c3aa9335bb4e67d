"""`moonpool plan`: the split of so many machines with the highest goodput on a trace, its pipelines, and its DRAM."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from moonpool.command.hardware import hardware_profile
from moonpool.command.machine import cores
from moonpool.command.planning import LEAST_LIMITS, Planner, Wanted
from moonpool.command.processes import Runners
from moonpool.command.settings import duration
from moonpool.command.workload import Traffic
from moonpool.core.vocabulary import Slo
from moonpool.errors import ConfigError
from moonpool.report.frontier import (
    CAPACITY_HEADINGS,
    FRONTIER_HEADINGS,
    PlanReport,
    Point,
    capacity_row,
    frontier_row,
    plan_page,
    tokens,
)
from moonpool.report.rows import Column, limits
from moonpool.sim.planner import plan
from moonpool.sim.profile import Profile

SHOWN = 0.4
"""Of the best rate: splits that bear less have no row in the terminal."""
FILE_COLUMNS = 160


def make_plan(wanted: Wanted) -> int:
    """Print what came of it. Raises ConfigError or TraceError."""
    if wanted.nodes < 2:
        raise ConfigError(f"--nodes {wanted.nodes}: give at least 2, one to prefill and one to decode")
    for flag, file in (("--out", wanted.out), ("--html", wanted.html)):
        if file is not None and not file.parent.is_dir():
            raise ConfigError(f"{flag} {file}: there is no folder {file.parent}")
    began = time.perf_counter()
    profile, slo = hardware_profile(wanted.hardware), read_slo(wanted.slo)
    traffic = Traffic(wanted.workload, profile.block_tokens)
    requests = list(traffic.requests(seed=wanted.seed))
    with Runners(wanted.jobs or cores(), traffic) as runners:
        planner = Planner(wanted, profile, slo, requests, runners)
        planned = plan(planner.among, planner.bounds, planner.look)
        seconds = time.perf_counter() - began
        if planned.best.best is None:
            raise ConfigError(
                f"no split of {wanted.nodes} machines lets {planner.goal.share:.0%} of the requests attain "
                f"{limits(slo)}, however slowly they come; the last one tried lacked {planned.best.limit}"
            )
        capacities, enough = planner.capacities(planned.best)
        compared = planner.compare() if wanted.exhaustive else None
        frontier = tuple(planner.point(split, planned) for split in planner.among)
        (best,) = (point for point in frontier if point.name == planned.best.split.name)
        report = PlanReport(
            trace=wanted.workload.source,
            requests=len(requests),
            hardware=wanted.hardware,
            nodes=wanted.nodes,
            slo=slo,
            share=planner.goal.share,
            seed=wanted.seed,
            best=best,
            frontier=frontier,
            own_dram_tokens=profile.dram_tokens,
            capacities=capacities,
            enough_dram_tokens=enough,
            simulated=planned.simulated,
            trials=planned.trials,
            seconds=seconds,
            exhaustive=compared,
            configuration=_configuration(wanted, slo, profile, best),
        )
        if wanted.html is not None:
            column = Column(f"{best.name} at {best.rate:.3f}/s", (planner.run(planned.best),))
            _write("--html", wanted.html, plan_page(report, _facts(report), [column]))
    if wanted.out is not None:
        _write("--out", wanted.out, report.configuration)
    if wanted.as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(report)).decode() + "\n")
    else:
        _print(wanted, report)
    return 0


def read_slo(text: str) -> Slo:
    """`ttft=30s,tbt=100ms`, one of them or both. Raises ConfigError."""
    found: dict[str, float] = {}
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        try:
            seconds = duration(value)
        except ValueError:
            seconds = 0.0
        if name not in ("ttft", "tbt") or name in found or not equals or seconds <= 0.0:
            raise ConfigError(f"--slo {text!r}: must be ttft=DURATION, tbt=DURATION or both, as in ttft=30s,tbt=100ms")
        found[name] = seconds
    return Slo(**found)


def _configuration(wanted: Wanted, slo: Slo, profile: Profile, best: Point) -> str:
    keys: dict[str, object] = {
        "name": best.name,
        "hardware": wanted.hardware,
        "prefill": best.prefill,
        "decode": best.decode,
        "pipeline": best.pipeline,
        "dram-tokens": profile.dram_tokens,
        "placement": wanted.placement,
        "admission": wanted.admission,
        "ttft": slo.ttft,
        "tbt": slo.tbt,
    }
    return "".join(f"{key}: {value}\n" for key, value in keys.items() if value is not None)


def _serve(wanted: Wanted, report: PlanReport) -> str:
    best, slo = report.best, report.slo
    flags = [f"--nodes {report.nodes}", f"--prefill {best.prefill // best.pipeline}", f"--decode {best.decode}"]
    flags += [f"--slo-{name} {value:g}s" for name, value in (("ttft", slo.ttft), ("tbt", slo.tbt)) if value]
    return " ".join(["moonpool serve", *flags, f"--placement {wanted.placement}", f"--admission {wanted.admission}"])


def _facts(report: PlanReport) -> list[str]:
    lasts = report.requests / report.best.rate
    short = []
    if report.slo.ttft is not None and lasts < LEAST_LIMITS * report.slo.ttft:
        short.append(
            f"At {report.best.rate:.3f} requests a second the trace lasts {lasts:.0f} s only, less than {LEAST_LIMITS} "
            f"times the TTFT limit: queues take in what would not last, and all rates are too high. Use a longer one."
        )
    return [
        f"{report.trace}: {report.requests} requests, seed {report.seed}; {report.nodes} machines, {report.hardware}; "
        f"{limits(report.slo)} for {report.share:.0%} of all that are offered",
        f"{report.trials} trials, {report.simulated} requests simulated",
        *short,
    ]


def _print(wanted: Wanted, report: PlanReport) -> None:
    console = Console(highlight=False, width=None if sys.stdout.isatty() else FILE_COLUMNS)
    best = report.best
    for fact in _facts(report):
        console.print(escape(fact))
    shown = [point for point in report.frontier if point.rate >= SHOWN * best.rate]
    console.print(_table(FRONTIER_HEADINGS, [frontier_row(point) for point in shown], shown.index(best)))
    if len(shown) < len(report.frontier):
        left = len(report.frontier) - len(shown)
        console.print(f"{left} splits that bear less than {SHOWN:.0%} of the best are left out (--json has them)")
    if report.capacities:
        console.print(_table(CAPACITY_HEADINGS, [capacity_row(each, report) for each in report.capacities]))
    console.print(
        f"[bold]{escape(best.name)}[/]: {best.rate:.3f} requests/s, {best.goodput:.3f} within the limits; more "
        f"would lack {best.limit}"
        + (
            f"; DRAM for {tokens(report.enough_dram_tokens)} tokens a machine is enough"
            if report.enough_dram_tokens
            else ""
        )
    )
    console.print(f"found in {report.seconds:.1f} s")
    if (other := report.exhaustive) is not None:
        console.print(
            f"every split on the whole trace: {escape(other.split)} with {other.rate:.3f} requests/s "
            f"({best.rate / other.rate - 1:+.1%} found), in {other.seconds:.1f} s and {other.simulated} requests: "
            f"{other.seconds / report.seconds:.1f} and {other.simulated / report.simulated:.1f} times as much"
        )
    console.print()
    console.print(escape(report.configuration), soft_wrap=True)
    console.print(escape(_serve(wanted, report)), soft_wrap=True)
    if best.pipeline > 1:
        console.print("(`serve` has no pipeline groups yet: its prefill workers are whole instances)")
    for file in (wanted.out, wanted.html):
        if file is not None:
            console.print(f"written: {escape(str(file))}")


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]], bold: int | None = None) -> Table:
    table = Table(box=SIMPLE, padding=(0, 1), pad_edge=False)
    for at, heading in enumerate(headings):
        table.add_column(heading, justify="right" if at else "left")
    for at, row in enumerate(rows):
        table.add_row(*map(escape, row), style="bold" if at == bold else None)
    return table


def _write(flag: str, file: Path, text: str) -> None:
    try:
        file.write_text(text)
    except OSError as e:
        raise ConfigError(f"{flag} {file}: {e.strerror}") from None
