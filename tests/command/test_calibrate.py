"""`moonpool calibrate`: coefficients that are known come out again, and the simulator takes the profile."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moonpool.bench.calibrate import Fitted, Point, fit, measure_engine, pages_needed
from moonpool.bench.neighbours import busy_neighbours
from moonpool.cli import app
from moonpool.command.calibrate import calibrate, neighbours
from moonpool.command.hardware import hardware_profile
from moonpool.config import Config, FleetConfig, ModelConfig
from moonpool.core.cost import DecodeCoefficients, PrefillCoefficients
from moonpool.engine.engine import Draw, Row
from moonpool.engine.timed import TimedConfig, TimedEngine
from moonpool.errors import MoonpoolError

PREFILL = PrefillCoefficients(0.01, 2e-3, 3e-7)
TIMED = Config(model=ModelConfig(engine="timed"))
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
    assert calibrate(TIMED, open_engine, 0.0) == 0
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


def test_the_profile_goes_where_it_is_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MOONPOOL_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("moonpool.command.calibrate.measure_engine", _with_its_clock)
    assert calibrate(TIMED, StoppedClock, 0.0, tmp_path / "other" / "mine.yaml") == 0
    assert "mine.yaml` takes it" in capsys.readouterr().out
    assert hardware_profile(str(tmp_path / "other" / "mine.yaml")).slots == 16
    assert not (tmp_path / "home" / "profiles").exists()


def test_the_flag_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[int, Path | None]] = []

    def measured(config: Config, open_engine: object, out: Path | None) -> int:
        given.append((neighbours(config), out))
        return 0

    monkeypatch.setattr("moonpool.command.calibrate.calibrate", measured)
    runner = CliRunner()
    assert runner.invoke(app, ["calibrate", "--out", "x.yaml", "--coupled", "3"]).exit_code == 0
    assert runner.invoke(app, ["calibrate"]).exit_code == 0
    assert given == [(2, Path("x.yaml")), (1, None)]


def test_as_many_others_compute_as_serve_has_workers() -> None:
    assert neighbours(Config()) == 1
    assert neighbours(Config(fleet=FleetConfig(prefill=2, decode=3, inline=1))) == 5
    assert neighbours(Config(fleet=FleetConfig(prefill=2, decode=3, coupled=4))) == 3
    assert neighbours(TIMED) == 0


def fast_engine() -> TimedEngine:
    config = TimedConfig(1, 1, prefill=PrefillCoefficients(1e-4, 0.0, 0.0), decode=DecodeCoefficients(1e-4, 0.0, 0.0))
    return TimedEngine(page_count=pages_needed(64), config=config)


def broken_engine() -> TimedEngine:
    raise MoonpoolError("no memory")


def test_neighbours_compute_until_the_block_ends() -> None:
    before = set(multiprocessing.active_children())
    with busy_neighbours(2, fast_engine):
        ours = set(multiprocessing.active_children()) - before
        assert len(ours) == 2
        assert all(process.is_alive() for process in ours)
    assert not set(multiprocessing.active_children()) & ours


def test_a_neighbour_that_cannot_come_up_or_dies_is_told() -> None:
    with pytest.raises(MoonpoolError, match="did not come up"), busy_neighbours(1, broken_engine):
        pass
    with pytest.raises(MoonpoolError, match="ended too soon"):
        _with_a_neighbour_killed()


def _with_a_neighbour_killed() -> None:
    with busy_neighbours(1, fast_engine):
        (mine,) = multiprocessing.active_children()
        mine.kill()
        mine.join()


def _with_its_clock(engine: StoppedClock, seconds: float) -> tuple[list[Point], list[Point]]:
    return measure_engine(engine, seconds, lambda: engine.now)
