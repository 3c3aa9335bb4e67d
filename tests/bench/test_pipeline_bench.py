"""What `make bench-pipeline` makes of its measurements, and that the simulator's prediction can be had."""

from __future__ import annotations

from pathlib import Path

import pytest

import moonpool
from moonpool.bench import pipeline
from moonpool.bench.pipeline import ONE, PIPELINE, SHOWN, Measured, bars, predicted, table


def test_bars_compare_pairs_and_not_medians_of_different_moments() -> None:
    results = {
        (ONE, 2048): Measured([10.0, 30.0, 10.0], {"prefill-0": [10.0, 30.0, 10.0]}),
        (PIPELINE, 2048): Measured([5.0, 15.0, 10.0], {"prefill-0": [4.0, 12.0, 8.0], "prefill-0.1": [5.0, 15.0, 5.0]}),
    }
    found = bars(results)
    assert [b["value"] for b in found] == [2.0, None], "4096 tokens were not measured"
    assert [b["holds"] for b in found] == [True, None]


def test_the_table_says_how_long_each_stage_was_idle() -> None:
    results = {(name, 1024): Measured([2.0], {"prefill-0": [1.0], "prefill-0.1": [1.5]}) for name in SHOWN}
    shown = table(results, [1024])
    assert list(shown.columns[5].cells) == ["prefill-0 50%, prefill-0.1 25%"] * len(SHOWN)


def test_the_simulator_foretells_a_long_prompt() -> None:
    profile = Path(moonpool.__file__).parent / "sim" / "profiles" / f"{pipeline.PROFILE}.yaml"
    one, two = (predicted(131_000, stages, profile) for stages in (1, 2))
    assert one / two == pytest.approx(1.9, abs=0.1)
