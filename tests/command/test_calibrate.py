"""`moonpool calibrate`: coefficients that are known come out again, and the simulator takes the profile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from moonpool.bench.calibrate import Fitted, Point, fit, measure_engine, pages_needed
from moonpool.command.calibrate import calibrate
from moonpool.command.hardware import hardware_profile
from moonpool.config import Config
from moonpool.core.cost import DecodeCoefficients, PrefillCoefficients
from moonpool.engine.engine import Draw, Row
from moonpool.engine.timed import TimedConfig, TimedEngine
from moonpool.errors import MoonpoolError

PREFILL = PrefillCoefficients(0.01, 2e-3, 3e-7)
DECODE = DecodeCoefficients(0.02, 4e-3, 5e-6)


class StoppedClock(TimedEngine):
    """Takes no time, but moves a clock by what its steps are to take."""

    def __init__(self, pages: int, context: int = 8192) -> None:
        config = TimedConfig(1, 1, prefill=PREFILL, decode=DECODE, context_tokens=context)
        super().__init__(page_count=pages, config=config)
        self.now = 0.0

    def step(self, rows: Sequence[Row], on_layer: Callable[[int], None] | None = None) -> list[Draw | None]:
        for row in rows:
            self._check(row)
        self.now += self._seconds(rows)
        return [None for _ in rows]


def test_known_costs_are_found_again() -> None:
    engine = StoppedClock(pages_needed(64))
    rounds: list[int] = []
    prefill, decode = measure_engine(engine, 1000.0, lambda: engine.now, rounds.append)
    assert engine.now >= 1000.0
    assert rounds == list(range(1, len(rounds) + 1))
    for points, known in ((prefill, PREFILL), (decode, DECODE)):
        fitted = fit(points)
        values = [getattr(known, name) for name in known.__struct_fields__]
        assert fitted.coefficients == pytest.approx(values, rel=1e-6)
        assert fitted.largest_error < 1e-6
    assert len(prefill) == 9
    assert len(decode) == 11, "16 x 1024 tokens are too many pages"


def test_an_engine_that_is_too_small_is_refused() -> None:
    with pytest.raises(MoonpoolError, match=r"the engine's 8 pages of 64 tokens, .* are too small to be measured; 144"):
        measure_engine(StoppedClock(8), 0.0)
    small = StoppedClock(pages_needed(64), context=1024)
    prefill, _ = measure_engine(small, 0.0, lambda: small.now)
    assert len(prefill) == 6, "what fits is measured"


def test_no_coefficient_is_negative() -> None:
    """The best line through these falls below 0 at 0."""
    fitted: Fitted = fit([Point("", (1.0, x, x * x), x * x) for x in (1.0, 2.0, 3.0)])
    assert fitted.coefficients == pytest.approx((0.0, 0.0, 1.0), abs=1e-9)
    falling = fit([Point("", (1.0, x, 0.0), 4.0 - x) for x in (1.0, 2.0, 3.0)])
    assert min(falling.coefficients) >= 0.0
    assert falling.largest_error > 0.3


def test_the_profile_is_written_and_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MOONPOOL_HOME", str(tmp_path))
    engines: list[StoppedClock] = []

    def open_engine(pages: int) -> StoppedClock:
        engines.append(StoppedClock(pages))
        return engines[-1]

    monkeypatch.setattr("moonpool.command.calibrate.measure_engine", _with_its_clock)
    assert calibrate(Config(), open_engine, 0.0) == 0
    out = capsys.readouterr().out
    assert "512 tokens after 1536" in out
    assert "0.0%" in out
    profile = hardware_profile("local")
    assert profile.prefill.per_token == pytest.approx(PREFILL.per_token)
    assert profile.decode.per_request == pytest.approx(DECODE.per_request)
    assert profile.kv_bytes_per_token == engines[0].space.run_bytes // 64
    assert (profile.block_tokens, profile.vram_tokens, profile.slots) == (64, 136 * 64, 16)
    assert profile.link_bytes_per_second > 1e7
    assert profile.ssd_read_bytes_per_second > 1e6
    assert 0 < profile.link_latency < 1.0
    assert sorted(file.name for file in (tmp_path / "profiles").iterdir()) == ["local.yaml"]


def _with_its_clock(engine: StoppedClock, seconds: float) -> tuple[list[Point], list[Point]]:
    return measure_engine(engine, seconds, lambda: engine.now)
