"""The hardware profiles against what they are said to be made from."""

from __future__ import annotations

import csv
import json
import os
from collections import defaultdict
from pathlib import Path
from statistics import median

import msgspec
import pytest

from moonpool.command.hardware import hardware_profile
from moonpool.core.cost import DecodeCost, PrefillCost
from moonpool.errors import ConfigError
from moonpool.sim.profile import KV_GRAIN, Profile, load_profile, profile_names, scaled

TRACES = "MOONPOOL_TRACES"
A800 = load_profile("a800-llama2-70b")


def calibration(name: str) -> Path:
    """A file of measurements, beside the traces ($MOONPOOL_TRACES, or shared/traces beside the checkout)."""
    here = Path(__file__).resolve().parents[2]
    folder = Path(os.environ[TRACES]).parent if TRACES in os.environ else here.parent / "shared"
    file = folder / "calibration" / name
    if not file.exists():
        pytest.skip(f"no {file}; ${TRACES} names the folder beside `calibration`")
    return file


def prefill(profile: Profile, tokens: int, cached: int = 0) -> float:
    return PrefillCost(profile.prefill).seconds(tokens, cached)


def decode(profile: Profile, batch: int, context: int) -> float:
    return DecodeCost(profile.decode).seconds(batch, batch * context)


@pytest.mark.parametrize("name", profile_names())
def test_every_profile_says_where_its_numbers_are_from(name: str) -> None:
    profile = load_profile(name)
    assert profile.name == name
    assert len(profile.sources) > 100
    assert prefill(profile, 2000) < prefill(profile, 4000) < prefill(profile, 126_000)
    assert prefill(profile, 8192, 4096) < prefill(profile, 8192)
    assert decode(profile, 1, 1000) < decode(profile, 16, 1000) < decode(profile, 16, 8000)


@pytest.mark.parametrize(("name", "t8k"), [("a800-llama2-70b", 1.0), ("a800-llama2-70b-slow", 1.55)])
def test_prefill_follows_the_papers_formula(name: str, t8k: float) -> None:
    """PAPER §7: T(n) ∝ 3.891e-3·k + 3.054e-5·k², k = n/1000."""
    profile = load_profile(name)
    assert prefill(profile, 8192) == pytest.approx(t8k, rel=0.005)
    unit = prefill(profile, 8000) / (3.891e-3 * 8 + 3.054e-5 * 64)
    for k in range(1, 129):
        assert prefill(profile, 1000 * k) == pytest.approx(unit * (3.891e-3 * k + 3.054e-5 * k * k), rel=0.01)


@pytest.mark.parametrize("name", ["a800-llama2-70b", "a800-llama2-70b-slow"])
def test_decode_steps_follow_the_papers_formula(name: str) -> None:
    """PAPER §7: at 8k context step(b)/step(1) ≈ .981 + .0191 b."""
    profile = load_profile(name)
    for batch in range(1, 65):
        ratio = decode(profile, batch, 8192) / decode(profile, 1, 8192)
        assert ratio == pytest.approx(0.981 + 0.0191 * batch, rel=0.003)


def test_both_follow_the_papers_figure_2() -> None:
    figures = json.loads(calibration("paper_figures.json").read_text())
    lengths = figures["fig2_prefill"]
    longest = prefill(A800, 1000 * lengths["len_k"][-1])
    for k, seen in zip(lengths["len_k"], lengths["norm_latency"], strict=True):
        assert prefill(A800, 1000 * k) / longest == pytest.approx(seen, rel=0.016)
    batches = figures["fig2_decode_8k"]
    steps = [decode(A800, batch, 8192) for batch in batches["batch"]]
    # The figure is normalised by its own largest value: compare shapes by the least error of a common factor.
    factor = sum(batches["norm_latency"]) / sum(steps)
    for step, seen in zip(steps, batches["norm_latency"], strict=True):
        assert step * factor == pytest.approx(seen, rel=0.04)


def measured() -> dict[tuple[int, int], tuple[float, float]]:
    """(prompt tokens, batch) -> median seconds of prefill and of a token, 8 x H100."""
    rows: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    with calibration("splitwise_sim_perf_model.csv").open() as file:
        for row in csv.DictReader(file):
            if (row["model"], row["hardware"], row["tensor_parallel"]) == ("llama2-70b", "h100-80gb", "8"):
                times = float(row["prompt_time"]) / 1e3, float(row["token_time"]) / 1e3
                rows[int(row["prompt_size"]), int(row["batch_size"])].append(times)
    return {key: (median(a for a, _ in times), median(b for _, b in times)) for key, times in rows.items()}


def test_the_h100_is_what_was_measured() -> None:
    profile, found = load_profile("h100-llama2-70b"), measured()
    assert len(found) == 13
    for (tokens, batch), (prompt_seconds, token_seconds) in found.items():
        if tokens * batch >= 4096:
            together = batch * (prefill(profile, tokens) - profile.prefill.fixed) + profile.prefill.fixed
            assert together == pytest.approx(prompt_seconds, rel=0.055)
        # Half of the 128 tokens that were produced stand for all.
        assert decode(profile, batch, tokens + 64) == pytest.approx(token_seconds, rel=0.08)


def test_the_h200_decodes_faster_and_holds_more() -> None:
    h100, h200 = load_profile("h100-llama2-70b"), load_profile("h200-llama2-70b")
    assert h200.prefill == h100.prefill
    assert h200.vram_tokens > 2 * h100.vram_tokens - 1000
    ratio = h200.decode.per_context_token / h100.decode.per_context_token
    assert ratio == pytest.approx(3.35 / 4.8, rel=0.01)


def test_scaled_hardware_does_the_same_in_so_many_times_the_time() -> None:
    slow = scaled(A800, 8.0, 2560.0)
    assert prefill(slow, 20_000, 5_000) == pytest.approx(8 * prefill(A800, 20_000, 5_000))
    assert decode(slow, 30, 12_000) == pytest.approx(8 * decode(A800, 30, 12_000))
    assert slow.kv_bytes_per_token == 327_680 / 2560
    for rate in ("link_bytes_per_second", "host_bytes_per_second"):
        seconds = [profile.kv_bytes_per_token / getattr(profile, rate) for profile in (A800, slow)]
        assert seconds[1] == pytest.approx(8 * seconds[0])
    assert slow.link_latency == 8 * A800.link_latency
    for same in ("block_tokens", "chunk_tokens", "context_tokens", "vram_tokens", "dram_tokens", "slots", "layers"):
        assert getattr(slow, same) == getattr(A800, same)
    assert scaled(A800) == A800


def test_kv_shrinks_to_whole_words_and_bandwidth_with_it() -> None:
    odd = scaled(A800, 1.0, 1000.0)
    assert odd.kv_bytes_per_token == 320
    assert odd.link_bytes_per_second == pytest.approx(A800.link_bytes_per_second * 320 / 327_680)
    assert scaled(A800, 1.0, 1e6).kv_bytes_per_token == KV_GRAIN


def test_a_machine_that_was_not_measured_has_no_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONPOOL_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match=r"this machine was not measured yet .*`moonpool calibrate` does it"):
        hardware_profile("local")
    (tmp_path / "profiles").mkdir()
    own = msgspec.structs.replace(A800, name="local")
    (tmp_path / "profiles" / "local.yaml").write_bytes(msgspec.yaml.encode(own))
    assert hardware_profile("local") == own


def test_numbers_that_may_be_none_are_checked_too() -> None:
    with pytest.raises(ValueError, match="`ssd_bytes` is -1; give"):
        msgspec.structs.replace(A800, ssd_bytes=-1)
    with pytest.raises(ValueError, match="`layers` is 0; give"):
        msgspec.structs.replace(A800, layers=0)
