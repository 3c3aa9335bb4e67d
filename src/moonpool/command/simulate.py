"""`moonpool simulate`: a trace on a simulated cluster, one column of figures for each combination of policies."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from moonpool.core.admission import ADMISSION_POLICIES, AdmissionPolicy
from moonpool.core.conductor import ConductorConfig
from moonpool.core.placement import PLACEMENT_POLICIES, PlacementPolicy
from moonpool.core.settings import Decisions
from moonpool.core.vocabulary import Slo
from moonpool.errors import ConfigError, TraceError
from moonpool.report.summary import Summary, summarize
from moonpool.sim.cluster import Setup, Simulation
from moonpool.sim.profile import load_profile
from moonpool.trace.read import TraceFile
from moonpool.trace.request import TraceRequest

P = TypeVar("P", PlacementPolicy, AdmissionPolicy)

QUEUE_BOUND = 1 << 20
"""The paper's cluster refuses by limits alone."""


class Wanted(msgspec.Struct, frozen=True):
    """The command line."""

    file: Path
    hardware: str
    prefill: int
    decode: int
    placement: str
    admission: str
    threshold: float
    ttft: float | None
    tbt: float | None
    speed: float
    first: int | None
    seed: int
    skip_bad: bool
    as_json: bool


class Simulated(msgspec.Struct, frozen=True):
    """One column; what `--json` prints a list of."""

    placement: str
    admission: str
    summary: Summary
    decisions: Decisions
    preemptions: int
    prefill_busy: float
    """Share of the time that prefill instances computed."""
    decode_busy: float
    wall_seconds: float


class SimulationReport(msgspec.Struct, frozen=True):
    file: str
    hardware: str
    prefill: int
    decode: int
    speed: float
    seed: int
    slo: Slo
    skipped: int
    runs: tuple[Simulated, ...]


def simulate(wanted: Wanted) -> int:
    """Print what came of it. Raises ConfigError or TraceError."""
    placements = _some_of("--placement", wanted.placement, PLACEMENT_POLICIES)
    admissions = _some_of("--admission", wanted.admission, ADMISSION_POLICIES)
    profile = load_profile(wanted.hardware)
    trace = TraceFile(wanted.file, wanted.skip_bad)
    requests = _requests(trace, wanted)
    slo = Slo(wanted.ttft, wanted.tbt)
    runs = []
    for placement in placements:
        for admission in admissions:
            config = ConductorConfig(
                placement=placement,
                admission=admission,
                threshold=wanted.threshold,
                slo=slo,
                queue_bound=QUEUE_BOUND,
            )
            setup = Setup(profile, wanted.prefill, wanted.decode, config, seed=wanted.seed)
            runs.append(_run(setup, requests, slo))
    report = SimulationReport(
        str(wanted.file),
        profile.name,
        wanted.prefill,
        wanted.decode,
        wanted.speed,
        wanted.seed,
        slo,
        trace.skipped,
        tuple(runs),
    )
    if wanted.as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(report)).decode() + "\n")
        return 0
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    console.print(
        f"{escape(str(wanted.file))}: {len(requests)} requests in {requests[-1].arrival:.0f} s on "
        f"{wanted.prefill} prefill and {wanted.decode} decode instances, {profile.name}, seed {wanted.seed}"
    )
    console.print(_table(runs, slo))
    if trace.skipped:
        console.print(f"[bold]{trace.skipped} malformed lines[/] were left out, the first: {trace.first_skipped}")
    return 0


def _some_of(flag: str, text: str, known: Sequence[P]) -> list[P]:
    by_name = {str(policy): policy for policy in known}
    chosen = [word.strip() for word in text.split(",")]
    for word in chosen:
        if word not in by_name:
            raise ConfigError(f"{flag} {word!r}: must be of {', '.join(by_name)}, with commas between")
    return list(dict.fromkeys(by_name[word] for word in chosen))


def _requests(trace: TraceFile, wanted: Wanted) -> list[TraceRequest]:
    """In order of arrival, from time 0, sped up."""
    found = sorted(trace, key=lambda request: request.arrival)[: wanted.first]
    if any(request.input_tokens < 1 for request in found):
        raise TraceError(f"{wanted.file} has a request without input tokens; a prompt has at least one")
    began = found[0].arrival
    return [msgspec.structs.replace(request, arrival=(request.arrival - began) / wanted.speed) for request in found]


def _run(setup: Setup, requests: Sequence[TraceRequest], slo: Slo) -> Simulated:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    name = f"{setup.conductor.placement} {setup.conductor.admission}"
    began = time.perf_counter()
    simulation = Simulation(setup, requests)
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(name, total=len(requests))
        simulation.run(lambda over: progress.update(task, completed=over))
    seconds = max(simulation.clock.now, 1e-9)
    prefill, decode = simulation.prefill.values(), simulation.decode.values()
    return Simulated(
        placement=setup.conductor.placement,
        admission=setup.conductor.admission,
        summary=summarize([request.outcome() for request in simulation.requests], slo),
        decisions=simulation.decisions,
        preemptions=sum(worker.preemptions for worker in decode),
        prefill_busy=sum(worker.busy_seconds for worker in prefill) / len(prefill) / seconds,
        decode_busy=sum(worker.busy_seconds for worker in decode) / len(decode) / seconds,
        wall_seconds=time.perf_counter() - began,
    )


def _table(runs: Sequence[Simulated], slo: Slo) -> Table:
    table = Table(box=SIMPLE, padding=(0, 1), pad_edge=False)
    table.add_column("")
    for run in runs:
        table.add_column(f"{run.placement}\n{run.admission}", justify="right")

    def row(name: str, values: Sequence[str]) -> None:
        table.add_row(name, *values)

    summaries = [run.summary for run in runs]
    limits = ", ".join(f"{name} {value:g} s" for name, value in (("TTFT", slo.ttft), ("TBT", slo.tbt)) if value)
    row("completed", [f"{s.completed} ({s.completed / s.requests:.1%})" for s in summaries])
    row(f"within {limits or 'no limits'}", [f"{s.attained} ({s.attained / s.requests:.1%})" for s in summaries])
    row("goodput, requests/s", [f"{s.goodput_requests:.3f}" for s in summaries])
    row("goodput, tokens/s", [f"{s.goodput_tokens:.0f}" for s in summaries])
    for reason in sorted({reason for s in summaries for reason in s.refused}):
        row(f"refused: {reason}", [str(s.refused.get(reason, 0)) for s in summaries])
    table.add_section()
    row("TTFT, mean (s)", [f"{s.ttft.mean:.2f}" for s in summaries])
    row("  quartiles", [f"{s.ttft.p25:.2f} / {s.ttft.p50:.2f} / {s.ttft.p75:.2f}" for s in summaries])
    row("  P90, P99", [f"{s.ttft.p90:.2f}, {s.ttft.p99:.2f}" for s in summaries])
    row(
        "TBT of the slowest tenth, P50, P90, P99 (ms)",
        [", ".join(f"{v * 1e3:.0f}" for v in _quantiles(s)) for s in summaries],
    )
    row("longest pause, P99 (ms)", [f"{s.longest_interval.p99 * 1e3:.0f}" for s in summaries])
    table.add_section()
    row("prompt tokens from the cache", [f"{s.cached_share:.1%}" for s in summaries])
    row("blocks fetched from other nodes", [str(run.decisions.fetched_blocks) for run in runs])
    row("prefill for nothing", [f"{s.wasted_tokens / max(s.computed_tokens, 1):.1%}" for s in summaries])
    row("prefill, decode busy", [f"{run.prefill_busy:.0%}, {run.decode_busy:.0%}" for run in runs])
    row("preemptions", [str(run.preemptions) for run in runs])
    for at in range(max(len(s.buckets) for s in summaries)):
        if not at:
            table.add_section()
        names = {s.buckets[at].name for s in summaries}
        row(
            f"attain, {' or '.join(sorted(names))} tokens",
            [f"{b.attained / max(b.requests, 1):.1%} of {b.requests}" for b in (s.buckets[at] for s in summaries)],
        )
    table.add_section()
    row(
        "simulated requests a second",
        [f"{s.requests / run.wall_seconds:.0f}" for s, run in zip(summaries, runs, strict=True)],
    )
    return table


def _quantiles(summary: Summary) -> tuple[float, float, float]:
    spread = summary.slowest_tenth
    return spread.p50, spread.p90, spread.p99
