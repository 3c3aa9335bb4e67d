"""The timed engine: the right stream whatever the paging, a wrong one for any wrong byte, and its seconds."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import numpy as np
import pytest

from moonpool.core.cost import DecodeCoefficients, PrefillCoefficients
from moonpool.engine.engine import Draw, Row
from moonpool.engine.local import generate
from moonpool.engine.timed import TimedConfig, TimedEngine, reference_tokens
from moonpool.errors import MoonpoolError
from moonpool.wire.messages import Sampling

FREE = TimedConfig(
    layers=3,
    words_per_half=2,
    vocabulary=1000,
    prefill=PrefillCoefficients(0, 0, 0),
    decode=DecodeCoefficients(0, 0, 0),
)
BLOCK = 16


def engine_of(page_count: int = 40, config: TimedConfig = FREE) -> TimedEngine:
    return TimedEngine(page_count=page_count, block_tokens=BLOCK, config=config, poison=True)


def prompt_of(length: int) -> list[int]:
    rng = random.Random(length)
    return [rng.randrange(1000) for _ in range(length)]


def next_token(engine: TimedEngine, tokens: list[int], pages: list[int]) -> int:
    drawn = engine.step([Row(tokens, 1, len(tokens) - 1, 1, pages, Sampling(seed=0))])[0]
    assert drawn is not None
    return drawn.token


@pytest.mark.parametrize("chunk", [1, 7, 16, 1000])
def test_streams_do_not_depend_on_chunks_batches_or_pages(chunk: int) -> None:
    prompts = [prompt_of(length) for length in (1, 2, 15, 16, 17, 31, 32, 33, 90)]
    outputs = generate(engine_of(), prompts, [Sampling(seed=1, max_tokens=40)] * len(prompts), chunk)
    assert outputs == [reference_tokens(prompt, 40, FREE) for prompt in prompts]
    assert len({tuple(output) for output in outputs}) == len(prompts)


def move(engine: TimedEngine, source: list[int], target: list[int], tail: int) -> None:
    """Whole pages by `run`, `tail` tokens of the last by `tail_runs`."""
    for layer in range(engine.space.runs):
        for old, new in zip(source[:-1], target[:-1], strict=True):
            assert engine.run(layer, old).nbytes == engine.space.run_bytes
            engine.run(layer, new)[:] = engine.run(layer, old).copy()
        for old_half, new_half in zip(
            engine.tail_runs(layer, source[-1], tail), engine.tail_runs(layer, target[-1], tail), strict=True
        ):
            assert old_half.nbytes * 2 == engine.space.tail_run_bytes(tail)
            new_half[:] = old_half


def flip(engine: TimedEngine) -> None:
    engine.run(2, 5)[-1] ^= 1


def swap(engine: TimedEngine) -> None:
    for layer in range(engine.space.runs):
        engine.run(layer, 5)[:], engine.run(layer, 6)[:] = engine.run(layer, 6).copy(), engine.run(layer, 5).copy()


def lose_a_layer(engine: TimedEngine) -> None:
    engine.run(1, 6)[:] = 0


def test_moved_kv_goes_on_as_if_it_had_been_computed_here() -> None:
    tokens = prompt_of(38)
    engine = engine_of()
    engine.step([Row(tokens, 38, 0, 37, [0, 1, 2])])
    move(engine, [0, 1, 2], [5, 6, 7], tail=5)
    assert next_token(engine, tokens, [5, 6, 7]) == reference_tokens(tokens, 1, FREE)[0]


@pytest.mark.parametrize("harm", [flip, swap, lose_a_layer])
@pytest.mark.parametrize("is_known", [False, True], ids=["just-loaded", "read-before"])
def test_a_wrong_block_gives_a_wrong_token(harm: Callable[[TimedEngine], None], is_known: bool) -> None:
    tokens = prompt_of(38)
    engine = engine_of()
    engine.step([Row(tokens, 38, 0, 37, [5, 6, 7])])
    right = next_token(engine, tokens, [5, 6, 7])
    if not is_known:
        engine.step([Row(tokens, 38, 0, 37, [5, 6, 7])])
    harm(engine)
    assert next_token(engine, tokens, [5, 6, 7]) != right


def test_a_page_used_again_without_clearing_is_read_anew() -> None:
    engine = engine_of()
    for length in (30, 40, 12):
        tokens = prompt_of(length)
        engine.step([Row(tokens, length, 0, length - 1, [3, 4, 5])])
        assert next_token(engine, tokens, [3, 4, 5]) == reference_tokens(tokens, 1, FREE)[0]


def test_layers_are_told_in_order_with_their_bytes_in_place() -> None:
    engine, other = engine_of(), engine_of()
    tokens = prompt_of(16)
    other.step([Row(tokens, 16, 0, 16, [0])])
    seen = []

    def on_layer(layer: int) -> None:
        assert np.array_equal(engine.run(layer, 0), other.run(layer, 0))
        seen.append(layer)

    engine.step([Row(tokens, 16, 0, 16, [0])], on_layer)
    assert seen == [0, 1, 2]


def test_a_step_takes_the_seconds_of_its_cost_model() -> None:
    costs = TimedConfig(
        prefill=PrefillCoefficients(0.05, 0.001, 0), decode=DecodeCoefficients(0.04, 0.02, 0.001), layers=2
    )
    engine = engine_of(config=costs)
    tokens = prompt_of(50)

    def seconds(*rows: Row) -> float:
        began = time.monotonic()
        engine.step(rows)
        return time.monotonic() - began

    assert seconds(Row(tokens, 50, 0, 49, [0, 1, 2, 3])) >= 0.099
    decode = Row(tokens, 50, 49, 1, [0, 1, 2, 3])
    assert seconds(decode, decode) >= 0.04 + 2 * 0.02 + 2 * 50 * 0.001


def test_a_mixed_step_takes_what_a_simulated_one_does() -> None:
    """The weights are read once for the chunk and the batch: not the sum of both steps."""
    costs = TimedConfig(prefill=PrefillCoefficients(0.3, 0.001, 0), decode=DecodeCoefficients(0.3, 0, 0), layers=2)
    engine = engine_of(config=costs)
    tokens = prompt_of(50)
    began = time.monotonic()
    engine.step([Row(tokens, 50, 0, 49, [0, 1, 2, 3]), Row(tokens, 50, 49, 1, [4, 5, 6, 7])])
    assert 0.349 <= time.monotonic() - began < 0.55


def test_end_tokens_min_tokens_and_logprobs() -> None:
    prompt = prompt_of(20)
    stream = reference_tokens(prompt, 4, FREE)
    ending = TimedConfig(**{name: getattr(FREE, name) for name in FREE.__struct_fields__} | {"end_token": stream[2]})
    engine = engine_of(config=ending)

    def run(**fields: object) -> list[int]:
        sampling = Sampling(seed=0, max_tokens=4, **fields)
        return generate(engine, [prompt], [sampling])[0]

    assert run() == stream[:3]
    assert run(ignore_eos=True) == stream
    assert run(stop_token_ids=(stream[0],)) == stream[:1]
    assert run(min_tokens=3)[2] == stream[2] + 1
    drawn = engine.step([Row(prompt, 20, 0, 20, [0, 1], Sampling(seed=0, logprobs=2))])[0]
    assert drawn is not None
    assert (drawn.logprob, drawn.top) == (0.0, [(stream[0], 0.0)])


def test_key_spaces_of_different_shapes_differ() -> None:
    spaces = {engine_of(config=config).space.id for config in (FREE, TimedConfig(), TimedConfig(layers=5))}
    assert len(spaces) == 3
    assert engine_of().space == engine_of(7).space


def test_a_row_that_cannot_be_drawn_fails_alone_and_a_failed_step_fails_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of()
    draw_it = engine._draw

    def draw_but_for_one(row: Row, sampling: Sampling) -> Draw:
        if sampling.seed == 13:
            raise RuntimeError("no luck")
        return draw_it(row, sampling)

    monkeypatch.setattr(engine, "_draw", draw_but_for_one)
    prompts = [prompt_of(length) for length in (20, 21, 22)]
    rows = [
        Row(prompt, len(prompt), 0, len(prompt), [2 * n, 2 * n + 1], Sampling(seed=12 + n))
        for n, prompt in enumerate(prompts)
    ]
    first, failed, last = engine.step(rows)
    assert first == Draw(reference_tokens(prompts[0], 1, FREE)[0])
    assert last == Draw(reference_tokens(prompts[2], 1, FREE)[0])
    assert failed is not None
    assert failed.error is not None
    assert "no luck" in failed.error

    def broken(layer: int) -> None:
        raise RuntimeError(f"layer {layer}")

    with pytest.raises(RuntimeError, match="layer 0"):
        engine.step(rows, broken)
    with pytest.raises(MoonpoolError, match="no luck"):
        generate(engine, prompts, [Sampling(seed=13)] * 3)
