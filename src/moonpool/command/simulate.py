"""`moonpool simulate`: a trace on a simulated cluster, one column of figures for each combination of policies."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TypeVar

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from moonpool.command.columns import columns
from moonpool.command.hardware import hardware_profile
from moonpool.command.workload import Traffic, Workload
from moonpool.core.admission import ADMISSION_POLICIES, AdmissionPolicy
from moonpool.core.conductor import ConductorConfig
from moonpool.core.placement import PLACEMENT_POLICIES, PlacementPolicy
from moonpool.core.vocabulary import Slo
from moonpool.errors import ConfigError
from moonpool.report.run import Run
from moonpool.sim.cluster import Setup
from moonpool.sim.profile import Profile
from moonpool.sim.run import run
from moonpool.trace.request import TraceRequest

P = TypeVar("P", PlacementPolicy, AdmissionPolicy)

QUEUE_BOUND = 1 << 20
"""The paper's cluster refuses by limits alone."""
FILE_COLUMNS = 160
"""Where the output is no terminal."""


class Wanted(msgspec.Struct, frozen=True):
    """The command line."""

    workload: Workload
    hardware: str
    prefill: int
    decode: int
    placement: str
    admission: str
    threshold: float
    ttft: float | None
    tbt: float | None
    seed: int
    as_json: bool


class SimulationReport(msgspec.Struct, frozen=True):
    """What `--json` prints."""

    workload: Workload
    hardware: str
    prefill: int
    decode: int
    seed: int
    slo: Slo
    skipped: int
    runs: tuple[Run, ...]


def simulate(wanted: Wanted) -> int:
    """Print what came of it. Raises ConfigError or TraceError."""
    profile = hardware_profile(wanted.hardware)
    setups = _setups(wanted, profile)
    traffic = Traffic(wanted.workload, profile.block_tokens)
    requests = list(traffic.requests(seed=wanted.seed))
    timed = [_run(name, setup, requests) for name, setup in setups.items()]
    runs = [each for each, _ in timed]
    if wanted.as_json:
        return _print_json(wanted, traffic, runs)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else FILE_COLUMNS)
    console.print(
        f"{escape(wanted.workload.source)}: {len(requests)} requests in {requests[-1].arrival:.0f} s on "
        f"{wanted.prefill} prefill and {wanted.decode} decode instances, {wanted.hardware}, seed {wanted.seed}"
    )
    console.print(columns(runs, [seconds for _, seconds in timed]))
    if traffic.skipped:
        first = escape(traffic.first_skipped)
        console.print(f"[bold]{traffic.skipped} malformed lines[/] were left out, the first: {first}")
    return 0


def _setups(wanted: Wanted, profile: Profile) -> dict[str, Setup]:
    """By name: every placement with every admission."""
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


def _run(name: str, setup: Setup, requests: Sequence[TraceRequest]) -> tuple[Run, float]:
    """With the seconds that it took."""
    shown = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    began = time.perf_counter()
    with Progress(*shown, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(name, total=len(requests))
        done = run(name, setup, requests, lambda over: progress.update(task, completed=over))
    return done, time.perf_counter() - began


def _print_json(wanted: Wanted, traffic: Traffic, runs: Sequence[Run]) -> int:
    report = SimulationReport(
        workload=wanted.workload,
        hardware=wanted.hardware,
        prefill=wanted.prefill,
        decode=wanted.decode,
        seed=wanted.seed,
        slo=Slo(wanted.ttft, wanted.tbt),
        skipped=traffic.skipped,
        runs=tuple(runs),
    )
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(report)).decode() + "\n")
    return 0
