"""The figures of a report and how they are written, one form for terminal and page."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from msgspec import Struct

from moonpool.core.vocabulary import Slo
from moonpool.report.estimates import Estimate, estimate, paired_difference
from moonpool.report.live import Live
from moonpool.report.priorities import ClassWorth
from moonpool.report.run import Run


class Row(Struct, frozen=True):
    """One figure of each run."""

    name: str
    of: Callable[[Run], float]
    show: Callable[[float], str]

    def cell(self, runs: Sequence[Run]) -> str:
        """Of one configuration: the mean over its seeds and, where there are several, half its 95 % interval."""
        values = [self.of(run) for run in runs]
        if any(math.isnan(value) for value in values):
            return "-"
        found = estimate(values)
        shown = self.show(found.mean)
        return shown if found.half_width is None else f"{shown} ± {self.show(found.half_width)}"


class Column(Struct, frozen=True):
    """One configuration: a run for each seed, in the same order in each column."""

    name: str
    runs: tuple[Run, ...]


class Difference(Struct, frozen=True):
    """Of one figure between two configurations, seed by seed."""

    name: str
    figure: str
    against: str
    estimate: Estimate
    relative: float | None
    """The mean difference over the other's mean; None where that is 0."""


def share(value: float) -> str:
    return f"{value:.1%}"


def number(digits: int) -> Callable[[float], str]:
    return lambda value: f"{value:.{digits}f}"


def milliseconds(value: float) -> str:
    return f"{value * 1e3:.0f}"


def limits(slo: Slo) -> str:
    """`TTFT 30 s, TBT 0.1 s`."""
    parts = [f"{name} {value:g} s" for name, value in (("TTFT", slo.ttft), ("TBT", slo.tbt)) if value]
    return ", ".join(parts) or "no limits"


GOODPUT = Row("goodput, requests/s", lambda run: run.summary.goodput_requests, number(3))
GOODPUT_TOKENS = Row("goodput, tokens/s", lambda run: run.summary.goodput_tokens, number(0))
ATTAINED = Row("attained", lambda run: run.summary.attained / run.summary.requests, share)
MEAN_TTFT = Row("TTFT, mean (s)", lambda run: run.summary.ttft.mean, number(2))
WASTE = Row(
    "prefill for nothing",
    lambda run: run.summary.wasted_tokens / max(run.summary.computed_tokens, 1) if _tells_cached(run) else math.nan,
    share,
)
COMPARED = (GOODPUT, GOODPUT_TOKENS, ATTAINED, MEAN_TTFT, WASTE)


def sections(columns: Sequence[Column]) -> list[list[Row]]:
    """What is worth a row for these configurations, in groups."""
    runs = [run for column in columns for run in column.runs]
    inside = [_loads(), _swings()] if any(run.live is None for run in runs) else []
    return [_worth(runs), _times(), _work(), *inside, _buckets(runs), *_classes(runs), *_live(runs)]


def differences(columns: Sequence[Column]) -> list[Difference]:
    """Of each column from the first; where it has as many seeds, and both know the figure."""
    found = []
    for column in columns[1:]:
        for row in COMPARED:
            mine, other = ([row.of(run) for run in each.runs] for each in (column, columns[0]))
            if len(mine) != len(other) or any(math.isnan(value) for value in (*mine, *other)):
                continue
            base = sum(other) / len(other)
            difference = paired_difference(mine, other)
            relative = difference.mean / base if base else None
            found.append(Difference(column.name, row.name, columns[0].name, difference, relative))
    return found


def show_difference(row: Row, difference: Difference | None) -> str:
    """`+0.120 ± 0.030 (+4.1%)`; in brackets where the interval holds 0."""
    if difference is None:
        return "-"
    found = difference.estimate
    half = "" if found.half_width is None else f" ± {row.show(found.half_width)}"
    sign = "+" if found.mean >= 0 else "-"
    relative = "" if difference.relative is None or row.show is share else f" ({difference.relative:+.1%})"
    text = f"{sign}{row.show(abs(found.mean))}{half}{relative}"
    return f"[{text}]" if found.half_width is not None and not found.is_clear else text


def _worth(runs: Sequence[Run]) -> list[Row]:
    shown = {limits(run.slo) for run in runs}
    within = f"within {shown.pop()}" if len(shown) == 1 else "within its own limits"
    rows = [
        Row("completed", lambda run: run.summary.completed / run.summary.requests, share),
        Row(within, ATTAINED.of, share),
        GOODPUT,
        GOODPUT_TOKENS,
        Row("output tokens/s", lambda run: run.summary.output_tokens / (run.summary.seconds or math.inf), number(0)),
    ]
    reasons = sorted({reason for run in runs for reason in run.summary.refused})
    rows.extend(Row(f"refused: {reason}", _refused(reason), number(0)) for reason in reasons)
    if any(run.late_refusals for run in runs):
        rows.append(Row("  of all these, after prefill", lambda run: run.late_refusals, number(0)))
    return rows


def _times() -> list[Row]:
    return [
        MEAN_TTFT,
        Row("  first quartile", lambda run: run.summary.ttft.p25, number(2)),
        Row("  median", lambda run: run.summary.ttft.p50, number(2)),
        Row("  third quartile", lambda run: run.summary.ttft.p75, number(2)),
        Row("  P90", lambda run: run.summary.ttft.p90, number(2)),
        Row("  P99", lambda run: run.summary.ttft.p99, number(2)),
        Row("TBT of the slowest tenth, median (ms)", lambda run: run.summary.slowest_tenth.p50, milliseconds),
        Row("  P90", lambda run: run.summary.slowest_tenth.p90, milliseconds),
        Row("  P99", lambda run: run.summary.slowest_tenth.p99, milliseconds),
        Row("longest pause, P99 (ms)", lambda run: run.summary.longest_interval.p99, milliseconds),
    ]


def _work() -> list[Row]:
    cached = Row(
        "prompt tokens from the cache",
        lambda run: run.summary.cached_share if _tells_cached(run) else math.nan,
        share,
    )
    return [cached, WASTE]


def _loads() -> list[Row]:
    return [
        Row("blocks fetched from other nodes", _inside(lambda run: run.decisions.fetched_blocks), number(0)),
        Row("prefill busy", _inside(lambda run: run.prefill_busy), share),
        Row("decode busy", _inside(lambda run: run.decode_busy), share),
        Row("preemptions", _inside(lambda run: run.preemptions), number(0)),
    ]


def _swings() -> list[Row]:
    return [
        Row("prefill load, mean", _inside(lambda run: run.swing.prefill_mean), number(2)),
        Row("  its deviation over time", _inside(lambda run: run.swing.prefill_deviation), number(2)),
        Row("decode load, mean", _inside(lambda run: run.swing.decode_mean), number(2)),
        Row("  its deviation over time", _inside(lambda run: run.swing.decode_deviation), number(2)),
        Row("correlation of both", _inside(lambda run: run.swing.correlation), number(2)),
    ]


def _inside(of: Callable[[Run], float]) -> Callable[[Run], float]:
    """NaN for a run on a real endpoint, into which nobody has looked."""
    return lambda run: math.nan if run.live is not None else of(run)


def _tells_cached(run: Run) -> bool:
    return run.live is None or run.live.knows_cached


def _live(runs: Sequence[Run]) -> list[list[Row]]:
    """Of runs on a real endpoint; NaN for those that were simulated."""
    if all(run.live is None for run in runs):
        return []
    errors = sorted({kind for run in runs if run.live is not None for kind in run.live.errors})
    own = [
        Row("sent late, P99 (ms)", _of_live(lambda live: live.client.lag.p99), milliseconds),
        Row("  at most", _of_live(lambda live: live.client.lag.most), milliseconds),
        Row("replay's event loop late, P99 (ms)", _of_live(lambda live: live.client.stall.p99), milliseconds),
        Row("replay's processor time, of a core", _of_live(lambda live: live.client.cpu_share), share),
        Row("  for each token (µs)", _of_live(lambda live: live.client.cpu_per_token * 1e6), number(0)),
        Row("streams at one time, most", _of_live(lambda live: live.client.most_streams), number(0)),
    ]
    between = [
        Row("between all tokens, mean (ms)", _of_live(lambda live: live.intervals.mean * 1e3), number(1)),
        Row("  median", _of_live(lambda live: live.intervals.p50 * 1e3), number(1)),
        Row("  P90", _of_live(lambda live: live.intervals.p90 * 1e3), number(1)),
        Row("  P99", _of_live(lambda live: live.intervals.p99 * 1e3), number(1)),
        Row("  longest", _of_live(lambda live: live.intervals.most * 1e3), number(1)),
    ]
    broken = [Row(f"failed: {kind}", _of_live(_errors_of(kind)), number(0)) for kind in errors]
    return [group for group in (broken, between, own) if group]


def _errors_of(kind: str) -> Callable[[Live], float]:
    return lambda live: live.errors.get(kind, 0)


def _of_live(of: Callable[[Live], float]) -> Callable[[Run], float]:
    return lambda run: math.nan if run.live is None else of(run.live)


def _buckets(runs: Sequence[Run]) -> list[Row]:
    """By prompt length. Seeds of a generated trace may have small buckets that others have not; those are left out."""
    common = set.intersection(*({bucket.name for bucket in run.summary.buckets} for run in runs))
    return [
        Row(f"attain, {bucket.name} tokens", _attained(bucket.name), share)
        for bucket in runs[0].summary.buckets
        if bucket.name in common
    ]


def _classes(runs: Sequence[Run]) -> list[list[Row]]:
    """Nothing where there are no priority classes; the same requests are in the same ones, whoever serves them."""
    names = list(dict.fromkeys(worth.name for run in runs for worth in run.classes))
    rows = []
    for name in names:
        rows.append(Row(f"{name}: within its limits", _of_class(name, lambda c: c.attained / c.requests), share))
        rows.append(Row("  refused", _of_class(name, lambda c: sum(c.refused.values()) / c.requests), share))
        rows.append(Row("  TTFT, mean (s)", _of_class(name, lambda c: c.ttft.mean), number(2)))
    return [rows] if rows else []


def _of_class(name: str, of: Callable[[ClassWorth], float]) -> Callable[[Run], float]:
    """NaN for a run that knows no classes (coupled workers)."""
    return lambda run: next((of(worth) for worth in run.classes if worth.name == name), math.nan)


def _refused(reason: str) -> Callable[[Run], float]:
    return lambda run: run.summary.refused.get(reason, 0)


def _attained(name: str) -> Callable[[Run], float]:
    return lambda run: sum(b.attained / max(b.requests, 1) for b in run.summary.buckets if b.name == name)
