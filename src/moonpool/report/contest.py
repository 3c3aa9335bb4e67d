"""A contest for goodput as it is shown: one form for terminal, JSON and page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from msgspec import Struct

from moonpool.report.charts import Axes, Line, bar_chart, legend
from moonpool.report.estimates import Estimate
from moonpool.report.goodput import Gain, Goodput, Share
from moonpool.report.html import document, panels_of, section


class Table(Struct, frozen=True):
    """Contenders at some load, the default first."""

    title: str
    note: str
    lines: tuple[Goodput, ...]
    gains: tuple[Gain, ...] = ()
    """Of the first line over others."""


class Unservable(Struct, frozen=True):
    """Requests that no idle cluster could serve in time, by prompt length."""

    name: str
    requests: int
    of: int


class ContestReport(Struct, frozen=True):
    """What `moonpool goodput --json` prints."""

    facts: tuple[str, ...]
    """What was run, on what."""
    seeds: tuple[int, ...]
    default: str
    best_other: str
    tables: tuple[Table, ...]
    unservable: tuple[Unservable, ...]


def headings(table: Table) -> tuple[str, ...]:
    names = tuple(f"attain, {bucket.name}" for bucket in table.lines[0].buckets)
    return ("speed", "offered/s", "attain", "requests/s", "tokens/s", *names)


def cells(line: Goodput) -> tuple[str, ...]:
    return (
        f"{line.speed:.2f}",
        f"{line.offered.mean:.2f}",
        _show(line.attained, _percent),
        _show(line.requests, lambda value: f"{value:.2f}"),
        _show(line.tokens, lambda value: f"{value:.0f}"),
        *(_show(bucket.attained, _percent) for bucket in line.buckets),
    )


def told(gain: Gain) -> str:
    """One sentence."""
    parts = [f"requests {_relative(gain.requests)}", f"tokens {_relative(gain.tokens)}"]
    parts += [f"{each.name} {_points(each)}" for each in gain.buckets]
    return f"{gain.name} over {gain.against}: {', '.join(parts)}"


def unserved(found: Sequence[Unservable]) -> str:
    total = sum(each.requests for each in found)
    if not total:
        return "an idle cluster could serve every request in time"
    parts = ", ".join(f"{each.requests} of {each.of} of {each.name} tokens" for each in found if each.requests)
    return f"no idle cluster could serve these in time, whatever its policies; they count as offered: {total} ({parts})"


def contest_page(report: ContestReport) -> str:
    """One self-contained file."""
    parts = []
    for table in report.tables:
        names = legend([(line.name, at) for at, line in enumerate(_shown(table))])
        said = "".join(f'<p class="soft">{escape(told(gain))}</p>' for gain in table.gains)
        parts.append(section(table.title, table.note, names + _charts(table) + said + _rows(table)))
    return document("Moonpool: goodput", (*report.facts, unserved(report.unservable)), parts)


MOST_DRAWN = 8
"""As many as there are colours; the lines that are best come first."""


def _shown(table: Table) -> Sequence[Goodput]:
    return table.lines[:MOST_DRAWN]


def _charts(table: Table) -> str:
    lines = _shown(table)
    buckets = [bucket.name for bucket in lines[0].buckets]
    attained = [
        Line(line.name, (), [bucket.attained.mean for bucket in line.buckets], at) for at, line in enumerate(lines)
    ]
    requests = [Line(line.name, (), [line.requests.mean], at) for at, line in enumerate(lines)]
    tokens = [Line(line.name, (), [line.tokens.mean], at) for at, line in enumerate(lines)]
    return panels_of(
        [
            ("Requests", bar_chart(["all"], requests, Axes("", "requests/s within the limits"))),
            ("Tokens", bar_chart(["all"], tokens, Axes("", "tokens/s within the limits"))),
            (
                "Attainment",
                bar_chart(buckets, attained, Axes("prompt length (tokens)", "share", y_most=1.0, percent=True)),
            ),
        ]
    )


def _rows(table: Table) -> str:
    heads = "".join(f"<th>{escape(name)}</th>" for name in ("", *headings(table)))
    body = "\n".join(
        f"<tr><td>{escape(line.name)}</td>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells(line)) + "</tr>"
        for line in table.lines
    )
    return f'<div class="wide"><table><thead><tr>{heads}</tr></thead><tbody>\n{body}\n</tbody></table></div>'


def _show(found: Estimate, form: Callable[[float], str]) -> str:
    return form(found.mean) + ("" if found.half_width is None else f" ± {form(found.half_width)}")


def _percent(value: float) -> str:
    return f"{value:.1%}"


def _relative(found: Estimate) -> str:
    text = f"{found.mean:+.1%}" + ("" if found.half_width is None else f" ± {found.half_width:.1%}")
    return f"[{text}]" if found.half_width is not None and not found.is_clear else text


def _points(share: Share) -> str:
    found = share.attained
    half = "" if found.half_width is None else f" ± {100 * found.half_width:.1f}"
    return f"{100 * found.mean:+.1f}{half} points"
