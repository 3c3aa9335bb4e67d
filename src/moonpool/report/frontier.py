"""What a plan found: each split of the machines with the load that it bears, and what its DRAM is worth."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Literal

from msgspec import Struct

from moonpool.core.vocabulary import Slo
from moonpool.report.charts import Axes, Limit, Line, legend, line_chart
from moonpool.report.html import document, panels_of, section, sections_of
from moonpool.report.rows import Column

How = Literal["whole trace", "no more", "beginning", "arithmetic"]
"""Where a rate comes from: simulated on the whole trace; simulated there at that rate, at which it does not attain;
from what the trace's beginning bears; from arithmetic that was corrected by the others."""


class Point(Struct, frozen=True):
    """One split of the machines."""

    name: str
    prefill: int
    """Machines."""
    decode: int
    pipeline: int
    """Prefill machines that form one instance."""
    how: How
    speed: float
    """The highest at which the wanted share attains, in times the trace's own."""
    rate: float
    """Requests a second that are offered then."""
    goodput: float
    """Those that attain, a second; no less than this where they were not all waited for."""
    prefill_load: float
    """Share of the time that prefill machines compute."""
    decode_load: float
    """Of decode machines, over time: seconds of a step over their limit."""
    limit: str
    """The pool that a higher rate lacks: prefill or decode."""


class Capacity(Struct, frozen=True):
    """One size of the machines' DRAM, with the best split."""

    dram_tokens: int
    """Of KVCache, a machine."""
    hit_share: float
    """Of all prompt tokens, what one pool of all machines has when they come."""
    rate: float | None
    """That was tried; None: none was."""
    attains: bool


class Compared(Struct, frozen=True):
    """With a look at every split on the whole trace."""

    split: str
    rate: float
    simulated: int
    seconds: float


class PlanReport(Struct, frozen=True):
    """What `--json` prints."""

    trace: str
    requests: int
    hardware: str
    nodes: int
    slo: Slo
    share: float
    seed: int
    best: Point
    frontier: tuple[Point, ...]
    own_dram_tokens: int
    """Of the hardware profile, with which the splits were measured."""
    capacities: tuple[Capacity, ...]
    enough_dram_tokens: int | None
    """The least that was seen to bear `NEARLY` the best rate; None: no capacity was tried."""
    simulated: int
    """Requests, for the search."""
    trials: int
    seconds: float
    """That the search took; differs from run to run."""
    exhaustive: Compared | None
    configuration: str
    """YAML for `moonpool simulate --compare`."""


NEARLY = 0.97
FRONTIER_HEADINGS = ("split", "rate", "goodput", "x trace", "prefill busy", "decode load", "lacks", "known from")
CAPACITY_HEADINGS = ("DRAM, tokens a machine", "prompt tokens cached", "bears", "")


def frontier_row(point: Point) -> tuple[str, ...]:
    """For FRONTIER_HEADINGS; ~ before what was not measured."""
    about = {"whole trace": "", "no more": "≤ ", "beginning": "~ ", "arithmetic": "~ "}[point.how]
    figures = [f"{about}{value:.3f}" for value in (point.rate, point.goodput)]
    loads = (f"{point.prefill_load:.0%}", f"{point.decode_load:.2f}")
    return (point.name, *figures, f"{point.speed:.2f}", *loads, point.limit, point.how)


def capacity_row(capacity: Capacity, report: PlanReport) -> tuple[str, ...]:
    """For CAPACITY_HEADINGS."""
    marks = []
    if capacity.dram_tokens == report.own_dram_tokens:
        marks.append("the hardware's own")
    if capacity.dram_tokens == report.enough_dram_tokens:
        marks.append("enough")
    bears = ""
    if capacity.rate is not None:
        bears = f"{'≥' if capacity.attains else '<'} {capacity.rate:.3f}"
    return (tokens(capacity.dram_tokens), f"{capacity.hit_share:.1%}", bears, ", ".join(marks))


def tokens(count: int) -> str:
    """`3M`, `187.5k`."""
    for size, unit in ((1_000_000, "M"), (1000, "k")):
        if count >= size:
            return f"{count / size:g}{unit}"
    return str(count)


def plan_page(report: PlanReport, facts: Sequence[str], columns: Sequence[Column]) -> str:
    """One HTML file. `columns`: the run of the best split at its rate."""
    parts = [_splits(report), _capacities(report), *sections_of(columns)]
    return document("Moonpool: a plan", facts, parts)


def _splits(report: PlanReport) -> str:
    sizes = sorted({point.pipeline for point in report.frontier})
    by_size = [[point for point in report.frontier if point.pipeline == size] for size in sizes]
    rates, loads = [], []
    for colour, points in enumerate(by_size):
        at = [float(point.prefill) for point in points]
        rates.append(Line(_size(points[0].pipeline), at, [point.goodput for point in points], colour))
    plain = by_size[0]
    at = [float(point.prefill) for point in plain]
    loads.append(Line("prefill machines busy", at, [point.prefill_load for point in plain], 0))
    loads.append(Line("decode step over its limit", at, [point.decode_load for point in plain], 1))
    best = Limit(report.best.name, float(report.best.prefill), upright=True)
    x = f"prefill machines of {report.nodes}"
    panels = [
        ("Goodput", line_chart(rates, Axes(x, "requests/s within the limits"), [best]) + _names(rates)),
        (f"Load at that rate, {_size(sizes[0])}", line_chart(loads, Axes(x, "load"), [best]) + _names(loads)),
    ]
    rows = ["".join(f"<td>{escape(cell)}</td>" for cell in frontier_row(point)) for point in report.frontier]
    note = (
        f"Each split at the highest rate at which {report.share:.0%} of the requests attain. ~: not simulated on the "
        "whole trace; ≤: simulated there, and it does not attain."
    )
    return section("Splits of the machines", note, panels_of(panels) + _table(FRONTIER_HEADINGS, rows))


def _capacities(report: PlanReport) -> str:
    if not report.capacities:
        return ""
    at = [float(each.dram_tokens) for each in report.capacities]
    hits = Line("cached", at, [each.hit_share for each in report.capacities], 2)
    enough = report.enough_dram_tokens
    marks = [] if enough is None else [Limit("enough", float(enough), upright=True)]
    chart = line_chart([hits], Axes("DRAM (tokens a machine)", "of prompt tokens", log_x=True, percent=True), marks)
    rows = ["".join(f"<td>{escape(cell)}</td>" for cell in capacity_row(each, report)) for each in report.capacities]
    note = f"Enough: the least that bears {NEARLY:.0%} of the best rate with the best split."
    panels = panels_of([("Prompt tokens that the pool has", chart)])
    return section("What DRAM is worth", note, panels + _table(CAPACITY_HEADINGS, rows))


def _names(lines: Sequence[Line]) -> str:
    return legend([(line.name, line.colour) for line in lines])


def _size(pipeline: int) -> str:
    return f"pipelines of {pipeline}" if pipeline > 1 else "no pipelines"


def _table(headings: Sequence[str], rows: Sequence[str]) -> str:
    heads = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    body = "\n".join(f"<tr>{row}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{heads}</tr></thead><tbody>\n{body}\n</tbody></table></div>'
