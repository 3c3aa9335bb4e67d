"""vLLM's words, and how fast it seems to be."""

from __future__ import annotations

import json

import pytest

from moonpool.live.external.dialect import Events, FaultError, Load, load_in, models_in, problem_in, seed_of
from moonpool.live.external.pace import Prompted, PromptPace, StepPace, Taken
from moonpool.wire.messages import Sampling


def event(**choice: object) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "token_ids": [5], **choice}]}).encode() + b"\n\n"


def test_events_come_in_any_pieces() -> None:
    data = event() + event(token_ids=[6, 7], finish_reason="stop") + b": a comment\r\n\r\ndata: [DONE]\r\n\r\n"
    for step in (1, 7, len(data)):
        events = Events(None)
        pieces = [piece for at in range(0, len(data), step) for piece in events.feed(data[at : at + step])]
        assert [[drawn.token for drawn in piece.drawn] for piece in pieces] == [[5], [6, 7], []]
        assert [piece.finish for piece in pieces] == [None, "stop", None]
        assert [piece.is_last for piece in pieces] == [False, False, True]


@pytest.mark.parametrize(
    "data",
    [
        b"data: {\n",
        b'data: {"error": {"message": "no", "code": 500}}\n',
        b'data: {"choices": [{"text": "a"}]}\n',
        event(finish_reason="abort"),
        event(logprobs={"tokens": [], "token_logprobs": [], "top_logprobs": []}),
        event(logprobs={"tokens": ["a"], "token_logprobs": [-1.0], "top_logprobs": [{" the": -1.0}]}),
        event(logprobs={"tokens": ["a"], "token_logprobs": [-1.0], "top_logprobs": [{"token_id:" + "9" * 5000: -1.0}]}),
        event(token_ids=[-1]),
        event(token_ids=[1 << 64]),
        b'data: {"usage": {"prompt_tokens_details": {"cached_tokens": -1}}}\n',
        b'data: {"deep": ' + b"[" * 100_000 + b"\n",
    ],
)
def test_what_cannot_be_read_is_a_fault(data: bytes) -> None:
    with pytest.raises(FaultError):
        list(Events(1).feed(data))


def test_of_several_engines_the_load_is_added_up() -> None:
    text = """\
vllm:num_requests_running{engine="0"} 3.0
vllm:num_requests_running{engine="1"} 4.0
vllm:num_requests_waiting{engine="0"} 1.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 1.0
vllm:kv_cache_usage_perc{engine="0"} 0.5
vllm:kv_cache_usage_perc{engine="1"} 0.25
vllm:cache_config_info{block_size="32",enable_prefix_caching="False",engine="0",num_gpu_blocks="100"} 1.0
vllm:cache_config_info{block_size="32",enable_prefix_caching="False",engine="1",num_gpu_blocks="100"} 1.0
other:metric 7
"""
    assert load_in(text) == Load(7, 1, 0.375, 200, 32, caches_prefixes=False)
    assert load_in("") == Load()


@pytest.mark.parametrize("value", ["many", "NaN", "+Inf", "-1", "1e300", "9" * 5000])
def test_a_load_that_is_no_number_is_a_fault(value: str) -> None:
    with pytest.raises(FaultError, match="/metrics: vllm:num_requests_running is"):
        load_in(f'vllm:num_requests_running{{engine="0"}} {value}')
    assert load_in(f'vllm:cache_config_info{{num_gpu_blocks="{value}"}} 1.0').blocks == 0
    assert load_in(f"other:metric {value}") == Load()


@pytest.mark.parametrize("models", [b'{"data": [{"id": "m", "max_model_len": -1}]}', b'{"x": ' + b"[" * 100_000])
def test_models_that_are_none_are_a_fault(models: bytes) -> None:
    with pytest.raises(FaultError, match="no list of models"):
        models_in(models)


def test_problems_old_and_new() -> None:
    assert problem_in(b'{"error": {"message": "too long", "code": 400}}') == "too long"
    assert problem_in(b'{"object": "error", "message": "too long", "code": 400}') == "too long"
    assert problem_in(b"<html>") == "<html>"


def test_seeds_differ_by_choice_and_beginning() -> None:
    sampling = Sampling(seed=5)
    assert seed_of(sampling, 0) == 5
    others = [seed_of(Sampling(seed=5, choice=choice), produced) for choice, produced in ((1, 0), (0, 1), (1, 1))]
    assert len({5, *others}) == 4
    assert all(0 <= seed < 1 << 63 for seed in others)


def test_prompts_in_turn_and_together() -> None:
    pace = PromptPace()
    assert pace.take([Prompted(1.0, 100, 3.0)]) == [Taken(0.0, 2.0)]
    # Sent meanwhile: it was computed from then on when the first one was done.
    assert pace.take([Prompted(2.0, 100, 4.0)]) == [Taken(1.0, 1.0)]
    assert pace.take([Prompted(4.0, 300, 8.0), Prompted(5.0, 100, 8.0)]) == [Taken(1.0, 3.0), Taken(2.0, 1.0)]


def test_steps_are_told_of_now_and_then() -> None:
    pace = StepPace()
    pace.restart(100.0)
    told = [pace.note(2, 2, is_prefilling=False, now=100.0 + 0.05 * at) for at in range(1, 30)]
    seconds = [some for some in told if some is not None]
    assert len(seconds) == 3
    assert seconds == pytest.approx([0.05] * 3)
