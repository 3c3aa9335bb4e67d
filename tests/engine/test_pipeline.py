"""A model divided over stages computes what it computes whole, and each stage has only its own part."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.core.cost import DecodeCoefficients, PrefillCoefficients
from moonpool.core.vocabulary import KeySpace
from moonpool.engine.engine import Bytes, Draw, Row
from moonpool.engine.local import generate
from moonpool.engine.pipeline import StageEngine, split_layers
from moonpool.engine.runner import TorchEngine
from moonpool.engine.timed import TimedConfig, TimedEngine, reference_tokens
from moonpool.errors import ModelError
from moonpool.wire.messages import Sampling
from tests.engine.test_families import FAMILIES, prompts_of, save
from tests.exactness import Reference
from tests.soak import SOAK


class Chain:
    """Stages of one process, one after another, as an engine."""

    def __init__(self, stages: Sequence[StageEngine]) -> None:
        self.stages = stages
        self.space: KeySpace = stages[0].space
        self.layers = range(stages[-1].layers.stop)
        self.page_count = stages[0].page_count
        self.context_tokens = stages[0].context_tokens

    def clear(self, page: int) -> None:
        for stage in self.stages:
            stage.clear(page)

    def holder(self, layer: int) -> StageEngine:
        return next(stage for stage in self.stages if layer in stage.layers)

    def run(self, layer: int, page: int) -> Bytes:
        return self.holder(layer).run(layer, page)

    def tail_runs(self, layer: int, page: int, tokens: int) -> tuple[Bytes, Bytes]:
        return self.holder(layer).tail_runs(layer, page, tokens)

    def step(self, rows: Sequence[Row], on_layer: Callable[[int], None] | None = None) -> list[Draw | None]:
        seen: list[int] = []
        out: Bytes | list[Draw | None] | None = None
        for stage in self.stages:
            assert out is None or not isinstance(out, list)
            out = stage.stage(rows, out, seen.append)
            if not isinstance(out, list):
                assert out.nbytes <= stage.hidden_bytes(sum(row.count for row in rows), len(rows))
        assert seen == list(self.layers)
        assert isinstance(out, list)
        return out


@pytest.mark.parametrize("name", FAMILIES)
def test_stages_of_every_family_draw_what_the_whole_model_draws(name: str, tmp_path: Path) -> None:
    path = save(FAMILIES[name](), tmp_path)
    reference = Reference(path)
    chain = Chain([TorchEngine(path, block_tokens=16, page_count=40, poison=True, stage=(n, 3)) for n in range(3)])
    prompts = prompts_of((1, 17, 33, 70))
    sampling = Sampling(seed=0, temperature=0.0, max_tokens=8, ignore_eos=True)
    for prompt, output in zip(prompts, generate(chain, prompts, [sampling] * len(prompts), 23), strict=True):
        wanted = reference.generate(prompt, 8)
        if output != wanted:
            assert reference.check(prompt, output).ties > 0


@pytest.mark.parametrize("stages", [2, 3])
def test_stages_of_the_real_model(stages: int, smollm2: Path, reference: Reference) -> None:
    chain = Chain([TorchEngine(smollm2, page_count=16, poison=True, stage=(n, stages)) for n in range(stages)])
    rng = random.Random(stages)
    prompts = [[rng.randrange(100, 40_000) for _ in range(length)] for length in (1, 130, 300)]
    sampling = Sampling(seed=0, temperature=0.0, max_tokens=6, ignore_eos=True)
    for chunk in (16, 100, 512) if SOAK else (100,):
        for prompt, output in zip(prompts, generate(chain, prompts, [sampling] * 3, chunk), strict=True):
            reference.check(prompt, output)


def test_a_stage_holds_only_its_own_weights_and_pages(smollm2: Path, engine: TorchEngine) -> None:
    parts = [TorchEngine(smollm2, page_count=4, stage=(n, 3)) for n in range(3)]
    whole = sum(p.numel() for p in engine._model.model.layers.parameters())
    own = [sum(p.numel() for p in part._model.model.layers.parameters()) for part in parts]
    assert sum(own) == whole
    assert max(own) <= whole / 2
    assert [list(part._model.lm_head.parameters()) != [] for part in parts] == [False, False, True]
    assert [list(part._model.model.embed_tokens.parameters()) != [] for part in parts] == [True, False, False]
    assert [part.layers for part in parts] == split_layers(30, 3, 0.06)
    assert all(part.space == engine.space for part in parts), "stages fill the blocks of one key space"


FREE = TimedConfig(
    layers=5,
    words_per_half=2,
    vocabulary=1 << 40,
    prefill=PrefillCoefficients(0, 0, 0),
    decode=DecodeCoefficients(0, 0, 0),
)


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_timed_stages_draw_the_reference_tokens(stages: int) -> None:
    engines = [
        TimedEngine(page_count=40, block_tokens=16, config=FREE, poison=True, stage=(n, stages)) for n in range(stages)
    ]
    prompts = [[n * 7 for n in range(length)] for length in (1, 16, 33, 90)]
    outputs = generate(Chain(engines), prompts, [Sampling(seed=1, max_tokens=20)] * len(prompts), 23)
    assert outputs == [reference_tokens(prompt, 20, FREE) for prompt in prompts]


def test_a_wrong_byte_in_any_stage_gives_another_token() -> None:
    engines = [TimedEngine(page_count=4, block_tokens=16, config=FREE, stage=(n, 3)) for n in range(3)]
    chain, prompt = Chain(engines), list(range(20))
    chain.step([Row(prompt, 20, 0, 19, (0, 1))])
    last = Row(prompt, 20, 19, 1, (0, 1), Sampling(seed=0))
    right = chain.step([last])[0]
    for layer in range(5):
        page = chain.run(layer, 0)
        page[20] ^= 1
        wrong = chain.step([last])[0]
        chain.run(layer, 0)[20] ^= 1
        assert right is not None
        assert wrong is not None
        assert wrong.token != right.token, f"layer {layer} is not read"


@given(st.integers(1, 60), st.integers(1, 12), st.floats(0, 5))
def test_no_other_division_of_the_layers_is_faster(layers: int, stages: int, head: float) -> None:
    if stages > layers:
        with pytest.raises(ModelError, match="layers to divide"):
            split_layers(layers, stages, head)
        return
    parts = split_layers(layers, stages, head)
    assert [layer for part in parts for layer in part] == list(range(layers))
    assert all(parts)
    slowest = max(len(part) + (head if part is parts[-1] else 0) for part in parts)
    for last in range(1, layers - stages + 2):
        other = max(-(-(layers - last) // (stages - 1)) if stages > 1 else 0, last + head)
        assert slowest <= other or stages == 1
