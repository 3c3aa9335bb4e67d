"""A report as one HTML file that needs nothing else: figures, distributions, and what happened over time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from importlib import resources

from msgspec import Struct

from moonpool.report.charts import Axes, Limit, Line, area_chart, bar_chart, legend, line_chart
from moonpool.report.rows import COMPARED, Column, differences, limits, sections, show_difference
from moonpool.report.run import Run
from moonpool.report.samples import loads
from moonpool.report.timeline import Bin, Curve

LONGEST_CURVE = 0.999
"""The slowest thousandth would squeeze the rest of a distribution."""


class Page(Struct, frozen=True):
    title: str
    facts: tuple[str, ...]
    """Lines under the title: what was run, on what."""
    columns: tuple[Column, ...]


def page(report: Page) -> str:
    """The whole file. Charts over time show each configuration's first seed. Raises ValueError for no columns."""
    if not report.columns or not all(column.runs for column in report.columns):
        raise ValueError("no run to report on")
    return document(report.title, report.facts, sections_of(report.columns))


def sections_of(columns: Sequence[Column]) -> list[str]:
    """All that is to be shown of these runs."""
    return [
        _distributions(columns),
        _buckets(columns),
        *(_over_time(columns, *each) for each in OVER_TIME),
        _figures(columns),
    ]


def document(title: str, facts: Sequence[str], parts: Sequence[str]) -> str:
    """A whole file of these parts."""
    head = [f"<h1>{escape(title)}</h1>", *(f'<p class="soft">{escape(fact)}</p>' for fact in facts)]
    style = (resources.files("moonpool.report") / "style.css").read_text()
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n"
        + "\n".join(part for part in (*head, *parts) if part)
        + "\n</body>\n</html>\n"
    )


# Tables


def _figures(columns: Sequence[Column]) -> str:
    rows = []
    for group in sections(columns):
        for at, row in enumerate(group):
            mark = "" if at else ' class="first"'
            name = escape(row.name).replace("  ", "&emsp;")
            cells = "".join(f"<td>{escape(row.cell(column.runs))}</td>" for column in columns)
            rows.append(f"<tr{mark}><td>{name}</td>{cells}</tr>")
    seeds = len(columns[0].runs)
    note = f"Means over {seeds} seeds, ± half the 95 % interval." if seeds > 1 else ""
    return section("Figures", note, _table(columns, rows)) + _differences(columns)


def _differences(columns: Sequence[Column]) -> str:
    if len(columns) < 2 or not differences(columns):
        return ""
    found = {(each.name, each.figure): each for each in differences(columns)}
    rows = []
    for row in COMPARED:
        cells = (escape(show_difference(row, found.get((column.name, row.name)))) for column in columns[1:])
        rows.append(f"<tr><td>{escape(row.name)}</td>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    note = "Seed by seed, with the 95 % interval; in brackets what may be chance." if len(columns[0].runs) > 1 else ""
    return section(f"Difference from {columns[0].name}", note, _table(columns[1:], rows))


def _table(columns: Sequence[Column], rows: Sequence[str]) -> str:
    heads = "".join(f"<th>{escape(column.name)}</th>" for column in columns)
    body = "\n".join(rows)
    return f'<div class="wide"><table><thead><tr><th></th>{heads}</tr></thead><tbody>\n{body}\n</tbody></table></div>'


# Distributions


def _distributions(columns: Sequence[Column]) -> str:
    ttft_limits, tbt_limits = _limits_of(columns)
    ttft = [_distribution(column, at, column.runs[0].over.ttft) for at, column in enumerate(columns)]
    tbt = [_distribution(column, at, column.runs[0].over.slowest_tenth) for at, column in enumerate(columns)]
    share = "share of all requests"
    panels = [
        ("Time to first token", line_chart(ttft, Axes("TTFT (s)", share, True, 1.0, True), ttft_limits)),
        (
            "Time between tokens: mean of each request's slowest tenth",
            line_chart(tbt, Axes("TBT (s)", share, True, 1.0, True), tbt_limits),
        ),
    ]
    note = (
        "A curve ends at the share of requests that were served at all; left of and above the dotted line they attain."
    )
    return section("How long requests wait", note, _names(columns) + panels_of(panels))


def _distribution(column: Column, colour: int, curve: Curve) -> Line:
    steps = [at * curve.share / max(len(curve.values) - 1, 1) for at in range(len(curve.values))]
    kept = [at for at, step in enumerate(steps) if step <= LONGEST_CURVE * curve.share or at == 0]
    return Line(column.name, [max(curve.values[at], 1e-3) for at in kept], [steps[at] for at in kept], colour)


def _limits_of(columns: Sequence[Column]) -> tuple[list[Limit], list[Limit]]:
    slos = [run.slo for column in columns for run in column.runs[:1]]
    ttft = sorted({slo.ttft for slo in slos if slo.ttft is not None})
    tbt = sorted({slo.tbt for slo in slos if slo.tbt is not None})
    return (
        [Limit(f"limit {value:g} s", value, upright=True) for value in ttft],
        [Limit(f"limit {value:g} s", value, upright=True) for value in tbt],
    )


def _buckets(columns: Sequence[Column]) -> str:
    firsts = [column.runs[0].summary for column in columns]
    names = [bucket.name for bucket in firsts[0].buckets]
    seconds = firsts[0].seconds or 1.0
    good, attained = [], []
    for at, (column, summary) in enumerate(zip(columns, firsts, strict=True)):
        good.append(Line(column.name, (), [bucket.attained / seconds for bucket in summary.buckets], at))
        shares = [bucket.attained / max(bucket.requests, 1) for bucket in summary.buckets]
        attained.append(Line(column.name, (), shares, at))
    panels = [
        ("Goodput", bar_chart(names, good, Axes("prompt length (tokens)", "requests/s within the limits"))),
        ("Attainment", bar_chart(names, attained, Axes("prompt length (tokens)", "share", y_most=1.0, percent=True))),
    ]
    note = f"Limits: {'; '.join(dict.fromkeys(limits(column.runs[0].slo) for column in columns))}."
    return section("By length of the prompt", note, _names(columns) + panels_of(panels))


# Over time


def _load(run: Run) -> str:
    if not run.over.samples:
        return ""
    times = [sample.time for sample in run.over.samples]
    prefill, decode = loads(run.over.samples, run.slo)
    lines = [Line("prefill", times, prefill, 0), Line("decode", times, decode, 1)]
    marks = [Limit("limit", 1.0)] if run.slo.ttft and run.slo.tbt else []
    told = run.swing
    note = (
        f"mean ± deviation: prefill {told.prefill_mean:.2f} ± {told.prefill_deviation:.2f}, "
        f"decode {told.decode_mean:.2f} ± {told.decode_deviation:.2f}; correlation {told.correlation:+.2f}"
        + "".join(f", decode {seconds:.0f} s later {value:+.2f}" for seconds, value in told.lagged)
    )
    unit = "predicted time / limit" if marks else "predicted (s)"
    return line_chart(lines, Axes("time (s)", unit), marks) + f'<p class="soft">{note}</p>'


def _batch(run: Run) -> str:
    if not run.over.samples:
        return ""
    times = [sample.time for sample in run.over.samples]
    lines = [
        Line("assigned, still in prefill too", times, [sample.assigned for sample in run.over.samples], 0),
        Line("in the batch", times, [sample.batch for sample in run.over.samples], 1),
    ]
    return line_chart(lines, Axes("time (s)", "requests an instance"))


def _hits(run: Run) -> str:
    if run.live is not None and not run.live.knows_cached:
        return ""

    def part(tokens: Callable[[Bin], int]) -> list[float]:
        totals = [max(b.local_tokens + b.fetched_tokens + b.computed_tokens, 1) for b in run.over.bins]
        return [tokens(b) / total for b, total in zip(run.over.bins, totals, strict=True)]

    times = [b.time for b in run.over.bins]
    layers = [
        Line("cached", times, part(lambda b: b.local_tokens), 2),
        Line("cached, fetched from another node", times, part(lambda b: b.fetched_tokens), 5),
        Line("computed", times, part(lambda b: b.computed_tokens), 4),
    ]
    return area_chart(layers, Axes("arrival (s)", "share of prompt tokens", y_most=1.0, percent=True))


def _links(run: Run) -> str:
    if not run.over.samples:
        return ""
    times = [sample.time for sample in run.over.samples]
    lines = [
        Line("the busiest", times, [sample.link_use_most for sample in run.over.samples], 1),
        Line("mean of all", times, [sample.link_use for sample in run.over.samples], 0),
    ]
    return line_chart(lines, Axes("time (s)", "share of the time in use", y_most=1.0, percent=True))


def _replicas(run: Run) -> str:
    times = [sample.time for sample in run.over.samples]
    lines = [
        Line(watched.name, times, [float(sample.replicas[at]) for sample in run.over.samples], at)
        for at, watched in enumerate(run.over.watched)
    ]
    if not lines or not times:
        return ""
    names = legend([(line.name, line.colour) for line in lines])
    return line_chart(lines, Axes("time (s)", "nodes that hold it")) + names


def _waste(run: Run) -> str:
    if run.live is not None and not run.live.knows_cached:
        return ""
    times = [b.time for b in run.over.bins]
    computed = max((b.computed_tokens for b in run.over.bins), default=0) or 1
    layers = [
        Line("of use", times, [float(b.computed_tokens - b.wasted_tokens) for b in run.over.bins], 2),
        Line("for nothing", times, [float(b.wasted_tokens) for b in run.over.bins], 1),
    ]
    return area_chart(layers, Axes("arrival (s)", "prompt tokens computed", y_most=computed * 1.05))


def _endings(run: Run) -> str:
    times = [b.time for b in run.over.bins]
    late = [b.requests - b.attained - b.refused_early - b.refused_late for b in run.over.bins]
    layers = [
        Line("attain", times, [float(b.attained) for b in run.over.bins], 2),
        Line("served too slowly, or failed", times, [float(value) for value in late], 4),
        Line("refused after prefill", times, [float(b.refused_late) for b in run.over.bins], 1),
        Line("refused at once", times, [float(b.refused_early) for b in run.over.bins], 3),
    ]
    return area_chart(layers, Axes("arrival (s)", "requests"))


OVER_TIME: tuple[tuple[str, str, Callable[[Run], str], tuple[tuple[str, int], ...]], ...] = (
    (
        "Load of both pools",
        "What the Conductor predicts, over the limits: until the queue of a prefill instance is computed, and for a "
        "step of a decode instance; means of each pool. Deviation and correlation are taken while requests arrive.",
        _load,
        (("prefill", 0), ("decode", 1)),
    ),
    ("Decode batches", "", _batch, (("assigned, still in prefill too", 0), ("in the batch", 1))),
    (
        "Where prompts come from",
        "",
        _hits,
        (("cached", 2), ("cached, fetched from another node", 5), ("computed", 4)),
    ),
    ("Links between machines", "", _links, (("the busiest", 1), ("mean of all", 0))),
    ("Replicas of the hottest prefixes", "", _replicas, ()),
    (
        "What became of requests",
        "",
        _endings,
        (("attain", 2), ("served too slowly, or failed", 4), ("refused after prefill", 1), ("refused at once", 3)),
    ),
    (
        "Waste",
        "Prompt tokens computed for requests that do not attain.",
        _waste,
        (("of use", 2), ("for nothing", 1)),
    ),
)
"""Title, what it says, the chart of a run, what its colours mean."""


def _over_time(
    columns: Sequence[Column], title: str, note: str, chart: Callable[[Run], str], names: Sequence[tuple[str, int]]
) -> str:
    panels = [(column.name, drawn) for column in columns if (drawn := chart(column.runs[0]))]
    if not panels:
        return ""
    return section(title, note, (legend(names) if names else "") + panels_of(panels))


def section(title: str, note: str, body: str) -> str:
    said = f'<p class="soft">{escape(note)}</p>' if note else ""
    return f"<section><h2>{escape(title)}</h2>{said}{body}</section>"


def panels_of(panels: Sequence[tuple[str, str]]) -> str:
    drawn = "".join(f'<div class="panel"><h3>{escape(name)}</h3>{body}</div>' for name, body in panels)
    return f'<div class="panels">{drawn}</div>'


def _names(columns: Sequence[Column]) -> str:
    return legend([(column.name, at) for at, column in enumerate(columns)])
