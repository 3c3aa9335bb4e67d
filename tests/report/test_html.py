"""The page: it holds together, needs nothing else, and shows what the figures say."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import msgspec
import pytest

from moonpool.core.settings import Decisions
from moonpool.core.vocabulary import Slo
from moonpool.report.charts import Axes, Limit, Line, area_chart, bar_chart, label, line_chart, nice_ticks
from moonpool.report.html import Page, page
from moonpool.report.outcomes import Outcome, Outcomes
from moonpool.report.rows import Column
from moonpool.report.run import Run, Watched, run_of
from moonpool.report.samples import Sample

SLO = Slo(10.0, 0.1)
SECTIONS = (
    "How long requests wait",
    "By length of the prompt",
    "Load of both pools",
    "Where prompts come from",
    "Links between machines",
    "Replicas of the hottest prefixes",
    "Waste",
    "Figures",
)


def a_run(name: str, seed: int = 0, slower: float = 1.0) -> Run:
    outcomes = [
        Outcome(
            float(at), 500 + 90 * at, 20, True, (1 + at / 20) * slower, 0.05, 0.05, 0.06, 100, 400, fetched_tokens=50
        )
        for at in range(100)
    ]
    outcomes.append(msgspec.structs.replace(outcomes[0], arrived=99.0, completed=False, ttft=None, refusal="ttft-slo"))
    samples = [
        Sample(float(at), 3.0 + at % 7, 9.0, 0.05 + at % 5 / 100, 0.09, 4.0, 9.0, 0.1, 0.5, (2, 3)) for at in range(100)
    ]
    watched = [Watched("<first> & most", 90), Watched("second", 9)]
    return run_of(name, seed, SLO, Outcomes.of(outcomes), samples, watched, Decisions(), preemptions=0, busy=(0.5, 0.6))


class Tags(HTMLParser):
    """Every tag is closed in order, and nothing is fetched."""

    VOID = ("meta", "br")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "link", "img", "iframe")
        assert not {name for name, _ in attrs} & {"src", "href"}
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_and_needs_nothing_else() -> None:
    text = page(
        Page("A & B", ("<file>: 101 requests",), (Column("one", (a_run("one"),)), Column("t<o", (a_run("t<o"),))))
    )
    tags = Tags()
    tags.feed(text)
    assert not tags.open
    for title in SECTIONS:
        assert f"<h2>{title}</h2>" in text
    assert "A &amp; B" in text
    assert "&lt;file&gt;" in text
    assert "&lt;first&gt; &amp; most" in text
    assert "http" not in text
    assert "@import" not in text
    assert "prefers-color-scheme: dark" in text
    for chart in re.findall(r'<svg class="chart".*?</svg>', text, re.DOTALL):
        ET.fromstring(chart)
    assert page(Page("A", (), (Column("one", (a_run("one"),)),))) == page(
        Page("A", (), (Column("one", (a_run("one"),)),))
    )


def test_several_configurations_and_seeds_are_compared() -> None:
    one = Column("one", (a_run("one", 1), a_run("one", 2)))
    two = Column("two", (a_run("two", 1, 2.0), a_run("two", 2, 2.0)))
    text = page(Page("A", (), (one, two)))
    assert "Difference from one" in text
    assert "± 0.000" in text
    assert text.count("<h3>one</h3>") == text.count("<h3>two</h3>") >= 6
    with pytest.raises(ValueError, match="no run"):
        page(Page("A", (), ()))


def test_a_run_without_samples_is_drawn_too() -> None:
    bare = msgspec.structs.replace(a_run("x"), over=msgspec.structs.replace(a_run("x").over, samples=(), watched=()))
    assert "Waste" in page(Page("A", (), (Column("x", (bare,)),)))


def points(chart: str) -> list[tuple[float, float]]:
    found = re.search(r'points="([^"]*)"', chart)
    assert found
    return [(float(x), float(y)) for x, y in (pair.split(",") for pair in found[1].split())]


def test_a_line_goes_through_its_points() -> None:
    chart = line_chart([Line("a", (0.0, 5.0, 10.0), (0.0, 1.0, 2.0))], Axes("x", "y", y_most=2.0))
    (x0, y0), (x1, y1), (x2, y2) = points(chart)
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.11)
    assert y0 > y1
    assert y0 - y1 == pytest.approx(y1 - y2, abs=0.11)
    told = re.findall(r"<title>x ([\d.]+)\na: ([\d.]+)</title>", chart)
    assert all(float(value) <= float(at) / 5 + 1e-6 for at, value in told), "a tooltip tells the value reached"
    assert len(told) > 50


def test_a_logarithmic_axis_spaces_decades_evenly() -> None:
    chart = line_chart(
        [Line("a", (0.1, 1.0, 10.0), (0.1, 0.5, 1.0))], Axes("x", "y", log_x=True), [Limit("l", 1.0, True)]
    )
    (x0, _), (x1, _), (x2, _) = points(chart)
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.11)
    limit = re.search(r'class="limit" x1="([\d.]+)"', chart)
    assert limit
    assert float(limit[1]) == pytest.approx(x1, abs=0.11)


def test_areas_lie_upon_one_another_and_bars_are_as_high_as_their_values() -> None:
    lines = [Line("a", (0.0, 1.0), (1.0, 1.0)), Line("b", (0.0, 1.0), (1.0, 1.0), 1)]
    chart = area_chart(lines, Axes("x", "y", y_most=2.0))
    lower, upper = re.findall(r'<polygon class="area c\d" points="([^"]*)"', chart)
    assert lower.split()[:2] == list(reversed(upper.split()[2:]))
    bars = bar_chart(["g"], [Line("a", (), (1.0,)), Line("b", (), (2.0,), 1)], Axes("", "", y_most=2.0))
    low, high = (float(height) for height in re.findall(r'class="bar.*?height="([\d.]+)"', bars))
    assert high == pytest.approx(2 * low)


@pytest.mark.parametrize(("value", "shown"), [(0.25, "0.25"), (1500.0, "1.5k"), (2e6, "2M"), (0.0, "0")])
def test_numbers_are_short(value: float, shown: str) -> None:
    assert label(value) == shown


@pytest.mark.parametrize("high", [1e-3, 0.7, 3.0, 47.0, 12_345.0])
def test_ticks_are_few_and_within(high: float) -> None:
    ticks = nice_ticks(0.0, high)
    assert 3 <= len(ticks) <= 7
    assert ticks[0] == 0.0
    assert ticks[-1] <= high * (1 + 1e-9)
