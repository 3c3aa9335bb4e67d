"""Layers of a prefix that come late, out of order, in part or not at all: right tokens and KV, or computed again.

The worker, its state machine and the engine are real; the node is scripted. The matrix over chunk sizes, block borders
and ways of coming is sampled; `MOONPOOL_SOAK=1` does all of it, and more of it with the model.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest

from moonpool.core.cost import PrefillCoefficients
from moonpool.engine.engine import Bytes, Row
from moonpool.engine.runner import TorchEngine
from moonpool.engine.timed import TimedConfig, TimedEngine, reference_tokens
from moonpool.live.prefill import STALL_SECONDS, PrefillWorker
from moonpool.live.prefix import Prefix
from moonpool.messenger.transfer import TAIL
from moonpool.store.copying import copy
from tests.exactness import Reference
from tests.live.kit import BLOCK, random_prompt
from tests.live.scripted import Layers, Script, all_at_once, prefill
from tests.soak import SOAK

FAST = TimedConfig(layers=6, prefill=PrefillCoefficients(fixed=0.002, per_token=2e-5, per_token_squared=0.0))
CHUNKS = (16, 48, 64, 100, 128, 256, 512)
MOST = 5
"""Whole blocks of a prompt."""


@pytest.fixture(scope="module")
def timed() -> TimedEngine:
    return TimedEngine(page_count=2 * MOST + 4, config=FAST, poison=True)


@pytest.fixture(scope="module")
def engine(smollm2: object) -> TorchEngine:
    from moonpool.engine.model import resolve

    return TorchEngine(resolve("smollm2", progress=False), page_count=2 * MOST + 4, poison=True)


@cache
def prompt_of(tokens: int) -> tuple[tuple[int, ...], int]:
    prompt = random_prompt(tokens, seed=tokens)
    return tuple(prompt), reference_tokens(prompt, 1, FAST)[0]


def computed(engine: TimedEngine | TorchEngine, prompt: tuple[int, ...]) -> list[Bytes]:
    """The whole blocks, computed alone."""
    pages = range(-(-len(prompt) // BLOCK))
    for page in pages:
        engine.clear(page)
    engine.step([Row(list(prompt), len(prompt), 0, len(prompt), list(pages))])
    runs = range(engine.space.runs)
    return [np.concatenate([engine.run(layer, page) for layer in runs]) for page in range(len(prompt) // BLOCK)]


def out_of_order(layers: Layers) -> None:
    """Each layer of each block for itself."""
    places = [(layer, index) for layer in range(FAST.layers) for index in range(len(layers.views))]
    random.Random(7).shuffle(places)
    for layer, index in places:
        layers.comes(layer, range(index, index + 1))
    layers.ends()


def slowly(layers: Layers) -> None:
    for layer in range(FAST.layers):
        time.sleep(0.005)
        layers.comes(layer)
    layers.ends()


def only(whole: int, runs: int) -> Script:
    """So many leading blocks whole, of the others so many layers; then it ends."""

    def script(layers: Layers) -> None:
        blocks = len(layers.views)
        for layer in range(FAST.layers):
            if layer < runs:
                layers.comes(layer)
            elif min(whole, blocks):
                layers.comes(layer, range(min(whole, blocks)))
        layers.ends()

    return script


def test_every_block_border_chunk_and_way_of_coming_gives_the_same(timed: TimedEngine) -> None:
    ways: dict[str, tuple[Script, Callable[[int], int]]] = {
        "at once": (all_at_once, lambda hits: hits),
        "out of order": (out_of_order, lambda hits: hits),
        "slowly": (slowly, lambda hits: hits),
        "one whole": (only(1, 0), lambda hits: min(hits, 1)),
        "one whole, two layers of the rest": (only(1, 2), lambda hits: min(hits, 1)),
        "nothing": (only(0, 0), lambda hits: 0),
    }
    lengths = [blocks * BLOCK + more for blocks in range(1, MOST + 1) for more in (0, 1, 17)]
    cases = [
        (length, hits, chunk, way)
        for length in lengths
        for hits in range((length - 1) // BLOCK + 1)
        for chunk in CHUNKS
        for way in ways
    ]
    for length, hits, chunk, way in cases if SOAK else random.Random(1).sample(cases, 60):
        prompt, token = prompt_of(length)
        blocks = computed(timed, prompt)
        script, found = ways[way]
        answer = prefill(timed, prompt, blocks[:hits], script, chunk)
        case = f"{length} tokens, {hits} hits, chunks of {chunk}, {way}"
        assert answer.first is not None, case
        assert answer.first.token == token, case
        assert answer.first.cached_tokens == found(hits) * BLOCK, case
        assert answer.is_handed_over, case
        for index, block in enumerate(blocks):
            assert np.array_equal(answer.kv(index), block), f"block {index} of {case}"


@pytest.mark.parametrize("whole", [None, 1, 0])
def test_a_layer_that_is_late_for_its_step_costs_the_step_and_no_more(
    timed: TimedEngine, whole: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes after all, or some blocks are whole, or none is."""
    monkeypatch.setattr("moonpool.live.prefix.may_begin", lambda there, *_: there > 0)
    monkeypatch.setattr("moonpool.live.prefill.patience", lambda *_: 20.0)
    prompt, token = prompt_of(4 * BLOCK + 9)
    blocks = computed(timed, prompt)
    stumbled = threading.Event()
    has = Prefix.has

    def watched(prefix: Prefix, layer: int, until: float) -> bool:
        found = has(prefix, layer, until)
        if not found:
            stumbled.set()
        return found

    monkeypatch.setattr(Prefix, "has", watched)

    def late(layers: Layers) -> None:
        layers.comes(0)
        layers.comes(1)
        assert stumbled.wait(30)
        (all_at_once if whole is None else only(whole, 2))(layers)

    answer = prefill(timed, prompt, blocks[:3], late, chunk=64)
    assert answer.first is not None
    assert answer.first.token == token
    assert answer.first.cached_tokens == (3 if whole is None else whole) * BLOCK
    assert answer.counters["late_layers"] == 1
    assert answer.counters["stall_seconds"] >= STALL_SECONDS / 2
    for index, block in enumerate(blocks):
        assert np.array_equal(answer.kv(index), block)


def test_what_is_given_up_is_not_computed_while_its_layers_are_stored(
    timed: TimedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pages of such blocks are cleared for computing; their first layers may still be on their way to decode."""
    prompt, token = prompt_of(4 * BLOCK + 1)
    blocks = computed(timed, prompt)
    store, clear = PrefillWorker._store_hits, timed.clear
    storing = threading.Lock()

    def slowly_stored(*arguments: Any) -> None:
        with storing:
            time.sleep(0.1)
            store(*arguments)

    def watched(page: int) -> None:
        # The first pages are the prompt's first blocks; those that were never hits may be cleared at any time.
        assert page >= 2 or not storing.locked()
        clear(page)

    monkeypatch.setattr(PrefillWorker, "_store_hits", slowly_stored)
    monkeypatch.setattr(timed, "clear", watched)
    answer = prefill(timed, prompt, blocks[:2], only(1, 2))
    assert answer.first is not None
    assert (answer.first.token, answer.first.cached_tokens) == (token, BLOCK)
    for index, block in enumerate(blocks):
        assert np.array_equal(answer.kv(index), block)


def test_a_prefix_that_cannot_be_copied_is_computed(timed: TimedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, token = prompt_of(4 * BLOCK + 1)
    blocks = computed(timed, prompt)
    copies = []

    def fails(target: Bytes, source: Bytes) -> None:
        copies.append(source)
        if len(copies) > 3:
            raise MemoryError
        copy(target, source)

    monkeypatch.setattr("moonpool.live.prefix.copy", fails)
    answer = prefill(timed, prompt, blocks[:2])
    assert len(copies) == 4
    assert answer.first is not None
    assert (answer.first.token, answer.first.cached_tokens) == (token, 0)
    for index, block in enumerate(blocks):
        assert np.array_equal(answer.kv(index), block)


def test_what_never_comes_is_computed(timed: TimedEngine) -> None:
    prompt, token = prompt_of(2 * BLOCK + 9)
    blocks = computed(timed, prompt)
    began = time.monotonic()
    answer = prefill(timed, prompt, blocks[:2], lambda layers: None)
    assert time.monotonic() - began < 10.0
    assert answer.first is not None
    assert (answer.first.token, answer.first.cached_tokens) == (token, 0)


def test_a_request_that_is_cancelled_while_it_loads_leaves_nothing(timed: TimedEngine) -> None:
    """Before a layer is there, between layers, and when all are there."""
    prompt, _ = prompt_of(4 * BLOCK + 9)
    blocks = computed(timed, prompt)
    for runs in (0, 1, FAST.layers):
        answer = prefill(timed, prompt, blocks[:3], only(0, runs), drop=lambda layers: layers.stream.is_over)
        assert not answer.is_handed_over or runs


def test_greedy_tokens_are_generates_whatever_way_the_layers_come(engine: TorchEngine, reference: Reference) -> None:
    lengths = (BLOCK + 1, 3 * BLOCK, 4 * BLOCK + 30) if SOAK else (3 * BLOCK + 11,)
    scripts = (all_at_once, _reversed, only(1, 0)) if SOAK else (_reversed,)
    for length in lengths:
        prompt = tuple(random_prompt(length, seed=length))
        blocks = computed(engine, prompt)
        for hits in range(0 if SOAK else 2, (length - 1) // BLOCK + 1):
            for chunk in CHUNKS if SOAK else (64,):
                for script in scripts:
                    answer = prefill(engine, prompt, blocks[:hits], script, chunk)
                    assert answer.first is not None
                    reference.check(prompt, [answer.first.token])
                    for index, block in enumerate(blocks):
                        found, right = answer.kv(index).view("float32"), block.view("float32")
                        np.testing.assert_allclose(found, right, atol=2e-3)
                    assert answer.node.completed >= {(TAIL, 0)} or not length % BLOCK


def _reversed(layers: Layers) -> None:
    for layer in reversed(range(layers.runs)):
        layers.comes(layer)
    layers.ends()


@pytest.fixture(scope="module")
def reference(smollm2: object) -> Reference:
    from moonpool.engine.model import resolve

    return Reference(resolve("smollm2", progress=False))
