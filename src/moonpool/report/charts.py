"""Small charts as inline SVG: lines, stacked areas and bars, with axes, grid, legend and a tooltip at every place.

A chart is text. Colours are classes (`c0` …) that the page's style sheet defines for light and dark; a line's dash
tells it from others without colour. Decision 0007 says why no library draws them.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from html import escape

from msgspec import Struct

WIDTH, HEIGHT = 560, 250
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 12, 42
STRIPS = 80
"""Places along the x axis that have a tooltip."""
COLOURS = 8
LOG_SPAN = 500.0
"""From the least to the most that a logarithmic axis shows; what is less stands at its beginning."""


class Line(Struct, frozen=True):
    """`xs` ascend; as many `ys`."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    colour: int = 0


class Limit(Struct, frozen=True):
    """A value to be told from: drawn across the chart."""

    name: str
    value: float
    upright: bool = False


class Axes(Struct, frozen=True):
    """What stands at the axes, with units. `y_most`: None for what the lines reach."""

    x: str
    y: str
    log_x: bool = False
    y_most: float | None = None
    percent: bool = False


class _Scale(Struct, frozen=True):
    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        if self.log:
            value = math.log10(max(value, self.low))
            low, high = math.log10(self.low), math.log10(self.high)
        else:
            low, high = self.low, self.high
        share = (value - low) / (high - low)
        return self.start + min(max(share, 0.0), 1.0) * (self.end - self.start)

    def ticks(self) -> list[float]:
        if not self.log:
            return nice_ticks(self.low, self.high)
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        factors = (1, 2, 5) if len(decades) < 5 else (1,)
        ticks = [factor * 10.0**power for power in decades for factor in factors]
        return [tick for tick in ticks if self.low * (1 - 1e-9) <= tick <= self.high * (1 + 1e-9)]


def line_chart(lines: Sequence[Line], axes: Axes, limits: Sequence[Limit] = ()) -> str:
    """Lines over one another."""
    x, y = _scales(lines, axes, limits)
    drawn = [_polyline(line, x, y) for line in lines if line.xs]
    return _svg(_frame(x, y, axes), *drawn, *(_limit(limit, x, y) for limit in limits), _strips(lines, x, axes))


def area_chart(lines: Sequence[Line], axes: Axes) -> str:
    """Lines upon one another, of the same `xs`; the first is the lowest."""
    total = [0.0] * (len(lines[0].xs) if lines else 0)
    layers = []
    for line in lines:
        top = [below + value for below, value in zip(total, line.ys, strict=True)]
        layers.append((line, total, top))
        total = top
    x, y = _scales([Line("", lines[0].xs if lines else (), total)], axes, ())
    drawn = []
    for line, low, high in layers:
        if line.xs:
            forth = [f"{x(a):.1f},{y(b):.1f}" for a, b in zip(line.xs, high, strict=True)]
            back = [f"{x(a):.1f},{y(b):.1f}" for a, b in zip(line.xs, low, strict=True)][::-1]
            drawn.append(
                f'<polygon class="area c{line.colour % COLOURS}" points="{" ".join([*forth, *back])}">'
                f"<title>{escape(line.name)}</title></polygon>"
            )
    return _svg(_frame(x, y, axes), *drawn, _strips(lines, x, axes))


def bar_chart(groups: Sequence[str], series: Sequence[Line], axes: Axes) -> str:
    """For each group a bar of each of the series; `ys` are in the order of `groups`, `xs` is not looked at."""
    most = axes.y_most or max((value for line in series for value in line.ys), default=0.0) or 1.0
    y = _Scale(0.0, most, HEIGHT - BOTTOM, TOP)
    width = (WIDTH - LEFT - RIGHT) / max(len(groups), 1)
    bar = width * 0.8 / max(len(series), 1)
    parts = [_y_axis(y, axes)]
    for at, group in enumerate(groups):
        begin = LEFT + at * width
        parts.append(
            f'<text class="tick" x="{begin + width / 2:.1f}" y="{HEIGHT - BOTTOM + 15}">{escape(group)}</text>'
        )
        for number, line in enumerate(series):
            top = y(line.ys[at])
            parts.append(
                f'<rect class="bar c{line.colour % COLOURS}" x="{begin + width * 0.1 + number * bar:.1f}" '
                f'y="{top:.1f}" '
                f'width="{max(bar - 1, 1):.1f}" height="{HEIGHT - BOTTOM - top:.1f}"><title>{escape(group)}: '
                f"{escape(line.name)} {label(line.ys[at], axes.percent)}</title></rect>"
            )
    parts.append(_axis_name(axes.x))
    return _svg(*parts)


def legend(names: Sequence[tuple[str, int]]) -> str:
    """(name, colour) of what a chart, or several beside each other, show."""
    entries = [
        f'<span class="key"><svg width="26" height="10" aria-hidden="true">'
        f'<line class="line c{colour % COLOURS}" x1="1" y1="5" x2="25" y2="5"/></svg>{escape(name)}</span>'
        for name, colour in names
    ]
    return f'<p class="legend">{"".join(entries)}</p>'


def nice_ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers from `low` to `high`, some `about` of them."""
    raw = (high - low) / about
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= raw)
    first = math.ceil(low / step - 1e-9)
    return [at * step for at in range(first, math.floor(high / step + 1e-9) + 1)]


def label(value: float, percent: bool = False) -> str:
    """`1.5k`, `0.25`, `37%`."""
    if percent:
        return f"{value * 100:.3g}%"
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def _scales(lines: Sequence[Line], axes: Axes, limits: Sequence[Limit]) -> tuple[_Scale, _Scale]:
    xs = [value for line in lines for value in (*line.xs[:1], *line.xs[-1:])]
    xs += [limit.value for limit in limits if limit.upright]
    ys = [value for line in lines for value in line.ys] + [limit.value for limit in limits if not limit.upright]
    low, high = 0.0, max(xs, default=0.0) or 1.0
    if axes.log_x:
        low = min(max(min(xs, default=0.0), high / LOG_SPAN), high / 2)
    most = axes.y_most if axes.y_most is not None else max(ys, default=1.0) * 1.05
    return _Scale(low, high, LEFT, WIDTH - RIGHT, axes.log_x), _Scale(0.0, most or 1.0, HEIGHT - BOTTOM, TOP)


def _polyline(line: Line, x: _Scale, y: _Scale) -> str:
    points = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in zip(line.xs, line.ys, strict=True))
    name = f"<title>{escape(line.name)}</title>"
    return f'<polyline class="line c{line.colour % COLOURS}" points="{points}">{name}</polyline>'


def _limit(limit: Limit, x: _Scale, y: _Scale) -> str:
    if limit.upright:
        at = x(limit.value)
        line = f'x1="{at:.1f}" y1="{TOP}" x2="{at:.1f}" y2="{HEIGHT - BOTTOM}"'
        text = f'x="{at - 4:.1f}" y="{HEIGHT - BOTTOM - 6}" text-anchor="end"'
    else:
        at = y(limit.value)
        line = f'x1="{LEFT}" y1="{at:.1f}" x2="{WIDTH - RIGHT}" y2="{at:.1f}"'
        text = f'x="{WIDTH - RIGHT - 4}" y="{at - 4:.1f}" text-anchor="end"'
    return f'<line class="limit" {line}/><text class="limit-name" {text}>{escape(limit.name)}</text>'


def _strips(lines: Sequence[Line], x: _Scale, axes: Axes) -> str:
    """Invisible columns whose tooltip gives all values there."""
    shown = [line for line in lines if line.xs]
    if not shown:
        return ""
    width = (x.end - x.start) / STRIPS
    parts = []
    for strip in range(STRIPS):
        begin = x.start + strip * width
        told = [
            f"{line.name}: {label(found, axes.percent)}"
            for line in shown
            if (found := _at(line, x, begin + width / 2)) is not None
        ]
        if told:
            where = f"{axes.x} {label(_value(x, begin + width / 2))}"
            parts.append(
                f'<rect class="strip" x="{begin:.1f}" y="{TOP}" width="{width:.1f}" height="{HEIGHT - TOP - BOTTOM}">'
                f"<title>{escape(chr(10).join([where, *told]))}</title></rect>"
            )
    return "".join(parts)


def _value(x: _Scale, place: float) -> float:
    share = (place - x.start) / (x.end - x.start)
    if x.log:
        return x.low * math.pow(x.high / x.low, share)
    return x.low + share * (x.high - x.low)


def _at(line: Line, x: _Scale, place: float) -> float | None:
    """The line's last value at or before this place."""
    found = bisect_right(line.xs, _value(x, place))
    return line.ys[found - 1] if found else None


def _frame(x: _Scale, y: _Scale, axes: Axes) -> str:
    parts = [_y_axis(y, axes), _axis_name(axes.x)]
    for tick in x.ticks():
        at = x(tick)
        parts.append(f'<line class="grid" x1="{at:.1f}" y1="{TOP}" x2="{at:.1f}" y2="{HEIGHT - BOTTOM}"/>')
        parts.append(f'<text class="tick" x="{at:.1f}" y="{HEIGHT - BOTTOM + 15}">{label(tick)}</text>')
    return "".join(parts)


def _y_axis(y: _Scale, axes: Axes) -> str:
    parts = []
    for tick in y.ticks():
        at = y(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" y1="{at:.1f}" x2="{WIDTH - RIGHT}" y2="{at:.1f}"/>')
        parts.append(f'<text class="tick y" x="{LEFT - 6}" y="{at + 4:.1f}">{label(tick, axes.percent)}</text>')
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(f'<text class="name" transform="translate(13 {middle}) rotate(-90)">{escape(axes.y)}</text>')
    return "".join(parts)


def _axis_name(name: str) -> str:
    return f'<text class="name" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}">{escape(name)}</text>'


def _svg(*parts: str) -> str:
    return f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(parts)}</svg>'
