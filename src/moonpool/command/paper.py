"""`moonpool paper`: the paper's experiments on the traces in a folder, its figures beside ours."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from moonpool.command.beside_coupled import coupled_chapters
from moonpool.command.elsewhere import Task
from moonpool.command.hardware import hardware_profile
from moonpool.command.machine import cores
from moonpool.command.processes import run_all
from moonpool.command.replays import replay
from moonpool.command.simulate import QUEUE_BOUND, read_seeds, run_with_progress
from moonpool.command.workload import Workload
from moonpool.core.admission import ADMISSION_POLICIES, AdmissionPolicy
from moonpool.core.conductor import ConductorConfig
from moonpool.core.eviction import EvictionPolicy
from moonpool.core.placement import PLACEMENT_POLICIES, PlacementPolicy
from moonpool.core.vocabulary import Slo
from moonpool.errors import ConfigError
from moonpool.report.goodput import Search
from moonpool.report.paper import (
    Chapter,
    PaperFigures,
    cost_findings,
    hit_findings,
    overload_findings,
    paper_figures,
    placement_findings,
)
from moonpool.report.run import Run
from moonpool.sim.cluster import Setup
from moonpool.sim.profile import Profile
from moonpool.trace.hits import PAPER_BLOCK_TOKENS, load
from moonpool.trace.read import TraceFile

LIMITS = Slo(30.0, 0.1)
"""Of the paper's real workload."""
JITTER = 3.0
"""Seconds: the traces come in batches of three."""
LEAST_REQUESTS = 1000
"""A trace of fewer is a sample."""
SCARCE = ", few decode"
"""At the end of a task's name."""
EVICTION: tuple[EvictionPolicy, ...] = ("lru", "lfu", "length-aware")
REFUSED = 0.18, 0.02
"""The paper's baseline refuses 18.2 %; a load at which ours refuses that much, more or less, is the same overload."""
DECODE_SHARE = 8
"""One of so many machines decodes in overload: with as many as prefill, this hardware never lacks any."""
FILE_COLUMNS = 160


class Wanted(msgspec.Struct, frozen=True):
    """The command line."""

    traces: Path
    hardware: str
    prefill: int
    decode: int
    seeds: str
    first: int | None
    as_json: bool
    jobs: int
    coupled: bool = False
    """Only the chapters beside coupled workers, which take many times as long as all others."""


class PaperReport(msgspec.Struct, frozen=True):
    """What `--json` prints."""

    trace: str
    seeds: tuple[int, ...]
    source: str
    """Of the paper's figures."""
    chapters: tuple[Chapter, ...]


class Laboratory:
    """Runs of one trace on one hardware."""

    def __init__(self, wanted: Wanted, profile: Profile, file: Path, requests: int) -> None:
        self.seeds = read_seeds(wanted.seeds)
        self.jobs = wanted.jobs or cores()
        self._wanted = wanted
        self._profile = profile
        self._workload = Workload(str(file), jitter=JITTER, first=wanted.first)
        self.requests = min(requests, wanted.first or requests)

    @property
    def short_of_decode(self) -> tuple[int, int]:
        """The same machines, but few of them decode."""
        machines = self._wanted.prefill + self._wanted.decode
        decode = max(min(machines // DECODE_SHARE, self._wanted.decode), 1)
        return machines - decode, decode

    def task(
        self, placement: PlacementPolicy, admission: AdmissionPolicy, speed: float, seed: int, scarce: bool = False
    ) -> Task:
        """`scarce`: with few decode machines."""
        prefill, decode = self.short_of_decode if scarce else (self._wanted.prefill, self._wanted.decode)
        config = ConductorConfig(placement=placement, admission=admission, slo=LIMITS, queue_bound=QUEUE_BOUND)
        setup = Setup(self._profile, prefill, decode, config, seed=seed)
        return Task(f"{placement} {admission}{SCARCE if scarce else ''}", self._workload, setup, speed)

    def find_speeds(
        self, asked: Sequence[tuple[PlacementPolicy, AdmissionPolicy, bool, Callable[[Run], bool]]]
    ) -> list[float]:
        """For each the highest speed at which a run with the first seed is as wanted, all searched side by side."""
        searches = [Search(tolerance=0.03) for _ in asked]
        while any(not search.is_over for search in searches):
            open_ = [at for at, search in enumerate(searches) if not search.is_over]
            tasks = [
                self.task(asked[at][0], asked[at][1], searches[at].speed, self.seeds[0], asked[at][2]) for at in open_
            ]
            for at, said in zip(open_, run_all(tasks, self.jobs), strict=True):
                if said.run is not None:
                    searches[at].tell(1.0 if asked[at][3](said.run) else 0.0)
        return [search.found or search.speed for search in searches]

    def run(self, tasks: Sequence[Task]) -> dict[str, list[Run]]:
        """By the tasks' names, in order of their seeds."""
        found: dict[str, list[Run]] = {}
        for said in run_with_progress(tasks, self.jobs, self.requests):
            if said.run is not None:
                found.setdefault(said.run.name, []).append(said.run)
        return found


def paper(wanted: Wanted) -> int:
    """Print what came of it. Raises ConfigError or TraceError."""
    figures, profile = paper_figures(), hardware_profile(wanted.hardware)
    loaded = {file: load(TraceFile(file, skip_bad=False)) for file in _files(wanted.traces)}
    with_blocks = {file: each for file, each in loaded.items() if each.blocks and len(each.requests) >= LEAST_REQUESTS}
    if not with_blocks:
        raise ConfigError(
            f"--traces {wanted.traces}: no trace with block ids (hash_ids) and at least {LEAST_REQUESTS} requests; "
            "the paper's are at github.com/kvcache-ai/Mooncake"
        )
    main = max(with_blocks, key=lambda file: len(with_blocks[file].requests))
    if wanted.coupled:
        chapters = coupled_chapters(main, profile, figures, wanted.first, wanted.jobs or cores())
        return _print(wanted, PaperReport(str(main), (), figures.source, tuple(chapters)))
    capacities = figures.hit_ratios.capacities
    chapters = []
    for file, each in with_blocks.items():
        ratios = replay(each, file, False, capacities, EVICTION, wanted.jobs or cores())
        ours = {(str(ratio.policy), ratio.capacity): ratio.by_block for ratio in ratios}
        note = f"one pool, {file.name}, {len(each.requests)} requests, blocks of {PAPER_BLOCK_TOKENS} tokens"
        note += "; the paper's trace is another"
        chapters.append(Chapter("§2, table 1: hit ratios", note, hit_findings(ours, figures)))
    note = f"{profile.name}, each curve relative to its own end"
    found = cost_findings(profile.prefill, profile.decode, profile.chunk_tokens, figures)
    chapters.append(Chapter("Figure 2: prefill and decode times", note, found))
    laboratory = Laboratory(wanted, profile, main, len(with_blocks[main].requests))
    chapters += _experiments(wanted, laboratory, main, figures)
    return _print(wanted, PaperReport(str(main), laboratory.seeds, figures.source, tuple(chapters)))


def _files(folder: Path) -> list[Path]:
    try:
        return sorted(file for file in folder.iterdir() if file.suffix in (".jsonl", ".csv"))
    except OSError as e:
        raise ConfigError(f"--traces {folder}: {e.strerror}") from None


def _experiments(wanted: Wanted, laboratory: Laboratory, file: Path, figures: PaperFigures) -> list[Chapter]:
    """Figure 8 and the table of §5, in one batch."""
    slow = figures.mean_ttft["load-balance"]
    admissions: list[AdmissionPolicy] = [policy for policy in ADMISSION_POLICIES if policy != "none"]
    reference = admissions[0]
    prefill, decode = laboratory.short_of_decode
    share, apart = REFUSED
    saturated, overload = laboratory.find_speeds(
        [
            ("load-balance", "none", False, lambda run: run.summary.ttft.mean <= slow),
            ("algorithm-1", reference, True, lambda run: _refused(run) <= share),
        ]
    )
    placements: list[PlacementPolicy] = list(PLACEMENT_POLICIES)
    tasks = [laboratory.task(each, "none", saturated, seed) for each in placements for seed in laboratory.seeds]
    tasks += [
        laboratory.task("algorithm-1", each, overload, seed, scarce=True)
        for each in admissions
        for seed in laboratory.seeds
    ]
    tasks.append(laboratory.task("algorithm-1", reference, overload, laboratory.seeds[0]))
    runs = laboratory.run(tasks)
    seeds = "1 seed" if len(laboratory.seeds) == 1 else f"{len(laboratory.seeds)} seeds"
    where = f"{seeds}, jitter {JITTER:g} s"
    given = f"{wanted.prefill}P+{wanted.decode}D"
    first = runs[f"algorithm-1 {reference}{SCARCE}"]
    refused = sum(_refused(run) for run in first) / len(first)
    even = runs[f"algorithm-1 {reference}"][0]
    same = (
        "about the paper's overload" if abs(refused - share) <= apart else f"not the paper's 18.2 %, but {refused:.1%}"
    )
    return [
        Chapter(
            "Figure 8: placement",
            f"{file.name} on {given}, {where}, admission none, at {saturated:.2f} times the speed: there "
            "load-balance has the paper's mean TTFT, and that one figure says nothing",
            placement_findings({each: runs[f"{each} none"] for each in placements}, figures),
        ),
        Chapter(
            "§5, table 3 and figure 9: overload",
            f"{file.name} on {prefill}P+{decode}D, {where}, placement algorithm-1, limits 30 s and 0.1 s, at "
            f"{overload:.2f} times the speed, where {reference} refuses {refused:.1%}: {same}. On {given} decode "
            f"refuses {even.late_refusals} of {even.summary.requests} requests at this speed ({_refused(even):.1%} are "
            "refused in all): policies that look at decode differ there by chance alone",
            overload_findings({str(each): runs[f"algorithm-1 {each}{SCARCE}"] for each in admissions}, figures),
        ),
    ]


def _refused(run: Run) -> float:
    return sum(run.summary.refused.values()) / run.summary.requests


def _print(wanted: Wanted, report: PaperReport) -> int:
    if wanted.as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(report)).decode() + "\n")
        return 0
    console = Console(highlight=False, width=None if sys.stdout.isatty() else FILE_COLUMNS)
    for chapter in report.chapters:
        console.print(f"[bold]{escape(chapter.title)}[/]")
        console.print(escape(chapter.note))
        table = Table(box=SIMPLE, padding=(0, 1), pad_edge=False)
        for heading in ("", "paper", "ours", "comment"):
            table.add_column(heading, overflow="fold")
        for finding in chapter.findings:
            table.add_row(*(escape(text) for text in (finding.what, finding.paper, finding.ours, finding.comment)))
        console.print(table)
    console.print(f"paper: {escape(report.source)} Figures 7 and 10 to 13 are not among these.")
    return 0
