"""Runs side by side in the terminal: a column each."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE
from rich.markup import escape
from rich.table import Table

from moonpool.core.vocabulary import Slo
from moonpool.report.run import Run
from moonpool.report.summary import Spread


def columns(runs: Sequence[Run], wall_seconds: Sequence[float]) -> Table:
    """`wall_seconds`: how long each took to simulate."""
    table = Table(box=SIMPLE, padding=(0, 1), pad_edge=False)
    table.add_column("")
    for run in runs:
        table.add_column(escape(run.name), justify="right")
    _add_worth(table, runs)
    table.add_section()
    _add_times(table, runs)
    table.add_section()
    _add_work(table, runs)
    table.add_section()
    _add_buckets(table, runs)
    table.add_section()
    pairs = zip(runs, wall_seconds, strict=True)
    table.add_row("simulated requests a second", *(f"{run.summary.requests / seconds:.0f}" for run, seconds in pairs))
    return table


def limits(slo: Slo) -> str:
    """`TTFT 30 s, TBT 0.1 s`."""
    parts = [f"{name} {value:g} s" for name, value in (("TTFT", slo.ttft), ("TBT", slo.tbt)) if value]
    return ", ".join(parts) or "no limits"


def _add_worth(table: Table, runs: Sequence[Run]) -> None:
    summaries = [run.summary for run in runs]
    shown = {limits(run.slo) for run in runs}
    table.add_row("completed", *(f"{s.completed} ({s.completed / s.requests:.1%})" for s in summaries))
    within = f"within {shown.pop()}" if len(shown) == 1 else "within its own limits"
    table.add_row(within, *(f"{s.attained} ({s.attained / s.requests:.1%})" for s in summaries))
    table.add_row("goodput, requests/s", *(f"{s.goodput_requests:.3f}" for s in summaries))
    table.add_row("goodput, tokens/s", *(f"{s.goodput_tokens:.0f}" for s in summaries))
    for reason in sorted({reason for s in summaries for reason in s.refused}):
        table.add_row(f"refused: {reason}", *(str(s.refused.get(reason, 0)) for s in summaries))


def _add_times(table: Table, runs: Sequence[Run]) -> None:
    summaries = [run.summary for run in runs]
    table.add_row("TTFT, mean (s)", *(f"{s.ttft.mean:.2f}" for s in summaries))
    table.add_row("  quartiles", *(f"{s.ttft.p25:.2f} / {s.ttft.p50:.2f} / {s.ttft.p75:.2f}" for s in summaries))
    table.add_row("  P90, P99", *(f"{s.ttft.p90:.2f}, {s.ttft.p99:.2f}" for s in summaries))
    table.add_row(
        "TBT of the slowest tenth, P50, P90, P99 (ms)",
        *(", ".join(f"{v * 1e3:.0f}" for v in _quantiles(s.slowest_tenth)) for s in summaries),
    )
    table.add_row("longest pause, P99 (ms)", *(f"{s.longest_interval.p99 * 1e3:.0f}" for s in summaries))


def _add_work(table: Table, runs: Sequence[Run]) -> None:
    summaries = [run.summary for run in runs]
    table.add_row("prompt tokens from the cache", *(f"{s.cached_share:.1%}" for s in summaries))
    table.add_row("blocks fetched from other nodes", *(str(run.decisions.fetched_blocks) for run in runs))
    wasted = (f"{s.wasted_tokens / max(s.computed_tokens, 1):.1%}" for s in summaries)
    table.add_row("prefill for nothing", *wasted)
    table.add_row("prefill, decode busy", *(f"{run.prefill_busy:.0%}, {run.decode_busy:.0%}" for run in runs))
    table.add_row("preemptions", *(str(run.preemptions) for run in runs))


def _add_buckets(table: Table, runs: Sequence[Run]) -> None:
    """By prompt length; the same requests are in the same buckets, whoever serves them."""
    for same in zip(*(run.summary.buckets for run in runs), strict=True):
        names = sorted({bucket.name for bucket in same})
        cells = (f"{b.attained / max(b.requests, 1):.1%} of {b.requests}" for b in same)
        table.add_row(f"attain, {' or '.join(names)} tokens", *cells)


def _quantiles(spread: Spread) -> tuple[float, float, float]:
    return spread.p50, spread.p90, spread.p99
