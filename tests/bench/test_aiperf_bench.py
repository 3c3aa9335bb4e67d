"""`make bench-aiperf` without AIPerf: what it reads of either client's report, and what its bars say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from huggingface_hub import snapshot_download

from moonpool.bench import aiperf
from moonpool.bench.aiperf import TOKENIZER, Medians, bars, by_replay, of_export, tokenizer_cache
from moonpool.bench.peer import PeerMissingError
from moonpool.errors import MoonpoolError
from moonpool.trace.request import TraceRequest
from moonpool.trace.write import write_trace
from tests.bench.fake_endpoint import fake_endpoint_beside

EXPORT = {
    "time_to_first_token": {"unit": "ms", "avg": 900.0, "p50": 712.5},
    "inter_token_latency": {"unit": "ms", "avg": 41.0, "p50": 40.0},
    "input_sequence_length": {"avg": 300.5},
    "output_sequence_length": {"avg": 32.0},
    "request_count": {"avg": 40.0},
}
OURS = Medians(0.7, 0.04, 300.0, 32.0, 40)


def test_aiperfs_report_is_in_milliseconds() -> None:
    assert of_export(EXPORT) == Medians(0.7125, 0.04, 300.5, 32.0, 40)
    with pytest.raises(MoonpoolError, match="no 'time_to_first_token': did every request fail"):
        of_export({"request_count": {"avg": 0.0}})


def test_medians_may_be_a_tenth_or_five_milliseconds_apart() -> None:
    near = Medians(0.76, 0.0445, 300.0, 32.0, 40)
    assert [each["holds"] for each in bars(near, OURS, 40)] == [True, True, True]
    far = Medians(0.78, 0.0455, 300.0, 32.0, 39)
    assert [each["holds"] for each in bars(far, OURS, 40)] == [False, False, False]
    assert [each["holds"] for each in bars(None, None, 40, "not installed")] == [None, None, None]


def test_replay_is_run_as_a_user_runs_it(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    write_trace(trace, [TraceRequest(0.05 * at, 20 + at, 5, (at,)) for at in range(4)])
    with fake_endpoint_beside() as endpoint:
        found = by_replay(trace, endpoint.url, tmp_path)
    assert (found.requests, found.prompt_tokens, found.answer_tokens) == (4, 21.5, 5.0)
    assert 0.0 < found.first < 5.0


def test_the_tokenizer_is_found_in_the_cache_without_a_hub(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (model / name).write_text("{}")
    home = tokenizer_cache(model, tmp_path / "home")
    found = snapshot_download(TOKENIZER, cache_dir=home / "hub", local_files_only=True)
    assert (Path(found) / "tokenizer.json").resolve() == model / "tokenizer.json"


def test_a_client_that_fails_is_told_with_its_words(tmp_path: Path) -> None:
    with pytest.raises(MoonpoolError, match=r"moonpool replay ended with \d+\n.*absent\.jsonl"):
        by_replay(tmp_path / "absent.jsonl", "http://127.0.0.1:9", tmp_path)


def test_where_it_cannot_be_installed_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(console: object) -> None:
        raise PeerMissingError("no network")

    monkeypatch.setattr(aiperf, "set_up", missing)
    monkeypatch.setattr("sys.argv", ["aiperf"])
    assert aiperf.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "left out: AIPerf cannot be installed here: no network"
    assert all(each["holds"] is None for each in json.loads(lines[-1].removeprefix("RESULT "))["bars"])
