"""`moonpool trace`: what a trace is like, and what a pool would hit of it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import msgspec
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from moonpool.command.machine import cores
from moonpool.command.replays import replay
from moonpool.core.eviction import EvictionPolicy
from moonpool.errors import ConfigError, TraceError
from moonpool.trace.describe import Description, Spread
from moonpool.trace.describe import describe as describe_requests
from moonpool.trace.hits import HitRatio, load
from moonpool.trace.read import TraceFile

COUNTS = {"k": 10**3, "m": 10**6}
MAX_CAPACITY = 10**12
FILE_COLUMNS = 120
"""Where the output is no terminal."""


class HitReport(msgspec.Struct, frozen=True):
    """What `--json` prints."""

    file: str
    requests: int
    skipped: int
    blocks: int
    whole_blocks: int
    tokens: int
    distinct_blocks: int
    block_tokens: int
    unfit: int
    hit_ratios: tuple[HitRatio, ...]


class DescriptionReport(msgspec.Struct, frozen=True):
    """What `--json` prints."""

    file: str
    format: str
    skipped: int
    failed: int
    description: Description


def hits(file: Path, capacity: str, policy: str, block_size: int, skip_bad: bool, as_json: bool, jobs: int = 1) -> int:
    """Print the hit ratios of a global pool. `jobs`: processes, 0 for one a core. Raises ConfigError or TraceError."""
    capacities, policies = read_capacities(capacity), read_policies(policy)
    trace = TraceFile(file, skip_bad)
    loaded = load(trace, block_size)
    if not loaded.blocks:
        raise TraceError(f"{file} has no block ids (hash_ids): what a pool would hit cannot be told from lengths alone")
    with Console(stderr=True).status(f"replaying {len(loaded.requests)} requests", spinner="dots"):
        ratios = replay(loaded, file, skip_bad, capacities, policies, jobs or cores())
    if as_json:
        report = HitReport(
            file=str(file),
            requests=len(loaded.requests),
            skipped=trace.skipped,
            blocks=loaded.blocks,
            whole_blocks=loaded.whole_blocks,
            tokens=loaded.tokens,
            distinct_blocks=loaded.distinct_blocks,
            block_tokens=block_size,
            unfit=loaded.unfit,
            hit_ratios=ratios,
        )
        return _print_json(report)
    console = trace_console()
    console.print(
        f"{escape(str(file))}: {len(loaded.requests)} requests, {loaded.blocks} blocks of {block_size} tokens, "
        f"{loaded.distinct_blocks} different ones"
    )
    console.print(_hit_table(ratios, capacities, policies))
    console.print("holes: the most blocks without their parent at the end of any request")
    _print_notes(console, trace, loaded.unfit, block_size)
    return 0


def describe(file: Path, block_size: int, skip_bad: bool, as_json: bool) -> int:
    """Print what the trace is like. Raises TraceError."""
    trace = TraceFile(file, skip_bad)
    found = describe_requests(trace, block_size)
    form = trace.format.value if trace.format else ""
    if as_json:
        return _print_json(DescriptionReport(str(file), form, trace.skipped, trace.failed, found))
    console = trace_console()
    order = "in order" if found.is_ordered else "[bold]not in order of arrival[/]"
    console.print(
        f"{escape(str(file))} ({form}): {found.requests} requests in {found.seconds:.0f} s, "
        f"{found.requests_per_second:.2f} a second, at most {found.most_at_once} at once, {order}"
    )
    console.print(f"from one time of arrival to the next: {found.gap_seconds:.3g} s (median)")
    console.print(_spread_table(found))
    if found.blocks:
        console.print(
            f"blocks: {found.blocks}, {found.distinct_blocks} different ones, of which {found.blocks_used_once} "
            f"({found.blocks_used_once / found.distinct_blocks:.0%}) are used once; one is used "
            f"{found.most_uses_of_a_block} times"
        )
        console.print(f"reused: {ratio(1 - found.distinct_blocks / found.blocks)} of the blocks")
        console.print(_family_table(found))
    else:
        console.print("no block ids: the file tells nothing of shared prefixes")
    _print_notes(console, trace, found.unfit, block_size)
    return 0


def read_capacities(text: str) -> list[int | None]:
    """`inf,100k,50k,3000`: blocks, None for inf. Raises ConfigError."""
    return list(dict.fromkeys(_capacity(word.strip()) for word in text.split(",")))


def _capacity(word: str) -> int | None:
    if word.lower() == "inf":
        return None
    unit = COUNTS.get(word[-1:].lower(), 1)
    digits = word if unit == 1 else word[:-1]
    # isdecimal alone would let other scripts' digits through.
    if not (digits.isascii() and digits.isdecimal() and 0 < int(digits) * unit <= MAX_CAPACITY):
        raise ConfigError(
            f"--capacity {word!r}: must be numbers of blocks like 500, 30k, 2m or inf, with commas between"
        )
    return int(digits) * unit


def read_policies(text: str) -> list[EvictionPolicy]:
    """`lru,lfu`. Raises ConfigError."""
    known: tuple[EvictionPolicy, ...] = get_args(EvictionPolicy)
    by_name = {str(policy): policy for policy in known}
    chosen = [word.strip() for word in text.split(",")]
    for word in chosen:
        if word not in by_name:
            raise ConfigError(f"--policy {word!r}: must be of {', '.join(by_name)}, with commas between")
    return list(dict.fromkeys(by_name[word] for word in chosen))


def ratio(value: float) -> str:
    """`.366`, as the paper writes it."""
    return f"{value:.3f}".removeprefix("0")


def _hit_table(
    ratios: Sequence[HitRatio], capacities: Sequence[int | None], policies: Sequence[EvictionPolicy]
) -> Table:
    table = Table(box=SIMPLE, padding=(0, 1), pad_edge=False)
    table.add_column("hit ratio")
    table.add_column("policy")
    for capacity in capacities:
        table.add_column(_count(capacity), justify="right", no_wrap=True)
    cells = {
        "by block": [ratio(r.by_block) for r in ratios],
        "by whole block": [ratio(r.by_whole_block) for r in ratios],
        "by token": [ratio(r.by_token) for r in ratios],
        "holes": [str(r.holes) for r in ratios],
    }
    width = len(capacities)
    for what, values in cells.items():
        table.add_section()
        for row, policy in enumerate(policies):
            table.add_row("" if row else what, policy, *values[row * width : (row + 1) * width])
    return table


def _spread_table(found: Description) -> Table:
    table = Table(box=SIMPLE, padding=(0, 1), pad_edge=False)
    table.add_column("tokens")
    for column in ("mean", "median", "p90", "p99", "highest", "all"):
        table.add_column(column, justify="right", no_wrap=True)
    spreads: dict[str, Spread] = {"input": found.input_tokens, "output": found.output_tokens}
    for name, spread in spreads.items():
        numbers = (spread.mean, spread.median, spread.p90, spread.p99, spread.highest, spread.total)
        table.add_row(name, *(f"{number:.0f}" for number in numbers))
    return table


def _family_table(found: Description) -> Table:
    table = Table(box=SIMPLE, padding=(0, 1), pad_edge=False)
    for column in ("family", "requests", "share", "blocks all share", "mean input", "median output"):
        table.add_column(column, justify="right", no_wrap=True)
    for family in found.families:
        table.add_row(
            str(family.first_block),
            str(family.requests),
            f"{family.requests / found.requests:.1%}",
            str(family.shared_blocks),
            f"{family.mean_input:.0f}",
            f"{family.median_output:.0f}",
        )
    return table


def _print_notes(console: Console, trace: TraceFile, unfit: int, block_size: int) -> None:
    """What a reader of the numbers should not miss."""
    if unfit:
        console.print(
            f"[bold]{unfit} requests[/] have more or fewer ids than blocks of {block_size} tokens: "
            "is --block-size right?"
        )
    if trace.failed:
        console.print(f"requests without an answer, left out: [bold]{trace.failed}[/] (they failed)")
    if trace.skipped:
        console.print(f"malformed lines left out: [bold]{trace.skipped}[/], the first: {escape(trace.first_skipped)}")


def _print_json(report: HitReport | DescriptionReport) -> int:
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(report)).decode() + "\n")
    return 0


def trace_console() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=FILE_COLUMNS)


def _count(capacity: int | None) -> str:
    if capacity is None:
        return "inf"
    for suffix, unit in reversed(COUNTS.items()):
        if capacity % unit == 0:
            return f"{capacity // unit}{suffix}"
    return str(capacity)
