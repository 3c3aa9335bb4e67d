"""`moonpool paper`: the paper's experiments on the traces in a folder, its figures beside ours."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from moonpool.command.beside_coupled import coupled_chapters
from moonpool.command.experiments import Machines, Slices, experiments
from moonpool.command.hardware import hardware_profile
from moonpool.command.laboratory import Laboratory, Watch, slices
from moonpool.command.machine import cores
from moonpool.command.processes import Runners
from moonpool.command.replays import replay
from moonpool.command.simulate import read_seeds
from moonpool.command.workload import Traffic
from moonpool.core.eviction import EvictionPolicy
from moonpool.errors import ConfigError
from moonpool.report.paper import Chapter, PaperFigures, cost_findings, hit_findings, paper_figures
from moonpool.sim.profile import Profile
from moonpool.trace.hits import PAPER_BLOCK_TOKENS, Load, load
from moonpool.trace.read import TraceFile
from moonpool.trace.request import TraceRequest

JITTER = 3.0
"""Seconds: the traces come in batches of three."""
SLICE = 3000
"""Requests of each seed: with fewer, queues have no time to grow as they do in the whole trace."""
OVERLOAD_SLICE = 6000
"""More: what waits in a queue within the TTFT limit is not refused, and must be little beside what is."""
LEAST_REQUESTS = 1000
"""A trace of fewer is a sample."""
EVICTION: tuple[EvictionPolicy, ...] = ("lru", "lfu", "length-aware")
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
    full: bool = False
    """All of the trace with each seed, and every placement policy."""
    coupled: bool = False
    """Only the chapters beside coupled workers, which take many times as long as all others."""


class PaperReport(msgspec.Struct, frozen=True):
    """What `--json` prints."""

    trace: str
    seeds: tuple[int, ...]
    source: str
    """Of the paper's figures."""
    chapters: tuple[Chapter, ...]


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
    console = Console(stderr=True)
    with Runners(wanted.jobs or cores()) as runners, Watch(console) as watch:
        chapters = _by_the_trace(wanted, with_blocks, profile, figures, watch)
        seeds = read_seeds(wanted.seeds)
        requests = sorted(with_blocks[main].requests, key=lambda each: each.arrival)[: wanted.first]
        placement, overload = (
            _slices(main, requests, None if wanted.full else size, seeds, profile) for size in (SLICE, OVERLOAD_SLICE)
        )
        machines = Machines(profile, wanted.prefill, wanted.decode)
        laboratory = Laboratory(seeds, runners, watch)
        chapters += experiments(laboratory, machines, placement, overload, figures, wanted.full)
    return _print(wanted, PaperReport(str(main), seeds, figures.source, tuple(chapters)))


def _by_the_trace(
    wanted: Wanted, traces: dict[Path, Load], profile: Profile, figures: PaperFigures, watch: Watch
) -> list[Chapter]:
    """What needs no cluster; all of each trace."""
    capacities = figures.hit_ratios.capacities
    chapters = []
    for file, each in traces.items():
        watch.step(f"hit ratios of {file.name}")
        ratios = replay(each, file, False, capacities, EVICTION, wanted.jobs or cores())
        ours = {(str(ratio.policy), ratio.capacity): ratio.by_block for ratio in ratios}
        note = f"one pool, {file.name}, {len(each.requests)} requests, blocks of {PAPER_BLOCK_TOKENS} tokens"
        note += "; the paper's trace is another"
        chapters.append(Chapter("§2, table 1: hit ratios", note, hit_findings(ours, figures)))
    note = f"{profile.name}, each curve relative to its own end"
    found = cost_findings(profile.prefill, profile.decode, profile.chunk_tokens, figures)
    return [*chapters, Chapter("Figure 2: prefill and decode times", note, found)]


def _slices(
    file: Path, requests: Sequence[TraceRequest], size: int | None, seeds: Sequence[int], profile: Profile
) -> Slices:
    many = "1 seed" if len(seeds) == 1 else f"{len(seeds)} seeds"
    if size is None or size >= len(requests):
        where = f"{file.name}, {len(requests)} requests, {many}, jitter {JITTER:g} s"
    else:
        where = (
            f"{file.name}, {many}, each with {size} consecutive requests of its {len(requests)}, evenly spread over it "
            f"(--full: all of them), jitter {JITTER:g} s"
        )
    workloads = slices(str(file), requests, len(seeds), size, JITTER)
    first = list(Traffic(workloads[0], profile.block_tokens).requests(seed=seeds[0]))
    return Slices(workloads, first, where)


def _files(folder: Path) -> list[Path]:
    try:
        return sorted(file for file in folder.iterdir() if file.suffix in (".jsonl", ".csv"))
    except OSError as e:
        raise ConfigError(f"--traces {folder}: {e.strerror}") from None


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
