"""`moonpool simulate`: a trace on a simulated cluster, one column of figures for each combination of policies."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from moonpool.command.columns import columns
from moonpool.core.admission import ADMISSION_POLICIES, AdmissionPolicy
from moonpool.core.conductor import ConductorConfig
from moonpool.core.placement import PLACEMENT_POLICIES, PlacementPolicy
from moonpool.core.vocabulary import Slo
from moonpool.errors import ConfigError, TraceError
from moonpool.report.run import Run
from moonpool.sim.cluster import Setup
from moonpool.sim.profile import load_profile
from moonpool.sim.run import run
from moonpool.trace.read import TraceFile
from moonpool.trace.request import TraceRequest

P = TypeVar("P", PlacementPolicy, AdmissionPolicy)

QUEUE_BOUND = 1 << 20
"""The paper's cluster refuses by limits alone."""
FILE_COLUMNS = 160
"""Where the output is no terminal."""


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


class SimulationReport(msgspec.Struct, frozen=True):
    """What `--json` prints."""

    file: str
    hardware: str
    prefill: int
    decode: int
    speed: float
    seed: int
    slo: Slo
    skipped: int
    runs: tuple[Run, ...]


def simulate(wanted: Wanted) -> int:
    """Print what came of it. Raises ConfigError or TraceError."""
    setups = _setups(wanted)
    trace = TraceFile(wanted.file, wanted.skip_bad)
    requests = _requests(trace, wanted)
    timed = [_run(name, setup, requests) for name, setup in setups.items()]
    runs = [each for each, _ in timed]
    if wanted.as_json:
        return _print_json(wanted, trace, runs)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else FILE_COLUMNS)
    console.print(
        f"{escape(str(wanted.file))}: {len(requests)} requests in {requests[-1].arrival:.0f} s on "
        f"{wanted.prefill} prefill and {wanted.decode} decode instances, {wanted.hardware}, seed {wanted.seed}"
    )
    console.print(columns(runs, [seconds for _, seconds in timed]))
    if trace.skipped:
        console.print(f"[bold]{trace.skipped} malformed lines[/] were left out, the first: {trace.first_skipped}")
    return 0


def _setups(wanted: Wanted) -> dict[str, Setup]:
    """By name: every placement with every admission."""
    profile = load_profile(wanted.hardware)
    found = {}
    for placement in _some_of("--placement", wanted.placement, PLACEMENT_POLICIES):
        for admission in _some_of("--admission", wanted.admission, ADMISSION_POLICIES):
            config = ConductorConfig(
                placement=placement,
                admission=admission,
                threshold=wanted.threshold,
                slo=Slo(wanted.ttft, wanted.tbt),
                queue_bound=QUEUE_BOUND,
            )
            setup = Setup(profile, wanted.prefill, wanted.decode, config, seed=wanted.seed)
            found[f"{placement} {admission}"] = setup
    return found


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


def _run(name: str, setup: Setup, requests: Sequence[TraceRequest]) -> tuple[Run, float]:
    """With the seconds that it took."""
    shown = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    began = time.perf_counter()
    with Progress(*shown, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(name, total=len(requests))
        done = run(name, setup, requests, lambda over: progress.update(task, completed=over))
    return done, time.perf_counter() - began


def _print_json(wanted: Wanted, trace: TraceFile, runs: Sequence[Run]) -> int:
    report = SimulationReport(
        file=str(wanted.file),
        hardware=wanted.hardware,
        prefill=wanted.prefill,
        decode=wanted.decode,
        speed=wanted.speed,
        seed=wanted.seed,
        slo=Slo(wanted.ttft, wanted.tbt),
        skipped=trace.skipped,
        runs=tuple(runs),
    )
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(report)).decode() + "\n")
    return 0
