"""The copy that decode steps through torch read goes with the pages, whoever writes them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moonpool.engine import attention
from moonpool.engine.contexts import Contexts
from moonpool.engine.engine import Row
from moonpool.engine.runner import TorchEngine
from moonpool.wire.messages import Sampling
from tests.engine.test_against_generate import prompt_of
from tests.exactness import EPSILON, Reference

GREEDY = Sampling(seed=0, temperature=0.0, max_tokens=64, ignore_eos=True)


@pytest.fixture
def roomy(smollm2: Path) -> TorchEngine:
    return TorchEngine(smollm2, page_count=24, poison=True, kernels=False)


def prefill(engine: TorchEngine, length: int, pages: list[int], seed: int = 0) -> list[int]:
    """A prompt and its first token."""
    prompt = prompt_of(length + 1000 * seed)[:length]
    for page in pages:
        engine.clear(page)
    drawn = engine.step([Row(prompt, length, 0, length, pages, GREEDY)])[0]
    assert drawn is not None
    return [*prompt, drawn.token]


def decode(engine: TorchEngine, rows: list[tuple[list[int], list[int]]], count: int = 1) -> None:
    for _ in range(count):
        batch = [Row(tokens, 1, len(tokens) - 1, 1, pages, GREEDY) for tokens, pages in rows]
        for (tokens, _), drawn in zip(rows, engine.step(batch), strict=True):
            assert drawn is not None
            tokens.append(drawn.token)


def check(reference: Reference, tokens: list[int], prompt: int) -> None:
    reference.check(tokens[:prompt], tokens[prompt:])


def test_rows_that_join_leave_and_change_places(roomy: TorchEngine, reference: Reference) -> None:
    lengths = [20, 90, 64, 150]
    rows = [
        (prefill(roomy, n, pages), pages) for n, pages in zip(lengths, ([0, 1], [2, 3], [4, 5], [6, 7, 8]), strict=True)
    ]
    decode(roomy, rows, 2)
    decode(roomy, [rows[3], rows[1]], 2)
    decode(roomy, [rows[1], rows[0], rows[3]], 1)
    decode(roomy, list(reversed(rows)), 2)
    for length, (tokens, _) in zip(lengths, rows, strict=True):
        check(reference, tokens, length)


def test_pages_that_got_another_owner(roomy: TorchEngine, reference: Reference) -> None:
    """Same pages, same length, other tokens: computed here, or copied in as a worker does."""
    first = prefill(roomy, 70, [0, 1])
    decode(roomy, [(first, [0, 1])], 3)
    elsewhere = prefill(roomy, 73, [4, 5], seed=1)
    for layer in range(roomy.space.runs):
        for source, page in ((4, 0), (5, 1)):
            roomy.run(layer, page)[:] = roomy.run(layer, source)
    tokens = elsewhere[:74]
    decode(roomy, [(tokens, [0, 1])], 3)
    check(reference, tokens, 73)
    again = prefill(roomy, 76, [0, 1], seed=2)
    decode(roomy, [(again, [0, 1])], 3)
    check(reference, again, 76)


def test_a_row_that_goes_on_is_not_copied_again(roomy: TorchEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    filled: list[int] = []
    fill = Contexts._fill
    monkeypatch.setattr(Contexts, "_fill", lambda self, row, seat: (filled.append(seat), fill(self, row, seat))[1])
    rows = [(prefill(roomy, n, pages), pages) for n, pages in ((60, [0, 1]), (90, [2, 3]))]
    decode(roomy, rows, 1)
    assert filled == [0, 1]
    decode(roomy, rows, 3)
    roomy.clear(1)  # as a worker does before the row reaches the page
    decode(roomy, rows, 4)
    assert filled == [0, 1]
    roomy.run(0, 2)
    decode(roomy, rows, 1)
    assert filled == [0, 1, 1], "who asks for a view may write to it"


def test_a_chunk_beside_running_rows(roomy: TorchEngine, reference: Reference) -> None:
    rows = [(prefill(roomy, n, pages), pages) for n, pages in ((20, [0]), (90, [2, 3]))]
    prompt = prompt_of(100)
    for page in (9, 10):
        roomy.clear(page)
    for start in (0, 50):
        batch = [Row(tokens, 1, len(tokens) - 1, 1, pages, GREEDY) for tokens, pages in rows]
        batch.insert(1, Row(prompt, 100, start, 50, [9, 10], GREEDY))
        draws = roomy.step(batch)
        for (tokens, _), drawn in zip(rows, (draws[0], draws[2]), strict=True):
            assert drawn is not None
            tokens.append(drawn.token)
    assert draws[1] is not None
    reference.check(prompt, [draws[1].token])
    for length, (tokens, _) in zip((20, 90), rows, strict=True):
        check(reference, tokens, length)


@pytest.mark.parametrize("limit", [0.5, 100.0])
def test_uneven_rows_padded_and_one_by_one(
    roomy: TorchEngine, reference: Reference, monkeypatch: pytest.MonkeyPatch, limit: float
) -> None:
    monkeypatch.setattr(attention, "PAD_LIMIT", limit)
    rows = [(prefill(roomy, n, pages), pages) for n, pages in ((5, [0]), (180, [2, 3, 4]))]
    decode(roomy, rows, 3)
    decode(roomy, rows[1:] + rows[:1], 1)
    for length, (tokens, _) in zip((5, 180), rows, strict=True):
        check(reference, tokens, length)


def test_a_batch_beyond_the_memory_gathers_its_pages(smollm2: Path, reference: Reference) -> None:
    """Two rows that share most pages are longer together than all pages."""
    engine = TorchEngine(smollm2, page_count=4, poison=True)
    first = prefill(engine, 130, [0, 1, 2])
    second = first[:129]
    engine.clear(3)
    engine.step([Row(second, 129, 128, 1, [0, 1, 3])])
    second.append(first[129])
    rows = [(first, [0, 1, 2]), (second, [0, 1, 3])]
    before = engine.logits([Row(tokens, 1, len(tokens) - 1, 1, pages, GREEDY) for tokens, pages in rows])
    for row, (tokens, _) in enumerate(rows):
        theirs = reference.logits(tokens, [0])[0]
        assert float((before[row] - theirs).abs().max()) < EPSILON
    assert bool(torch.isfinite(before).all())


def test_a_context_that_comes_layer_by_layer(roomy: TorchEngine, reference: Reference) -> None:
    """One token is left to compute, and each layer of the prefix is there only when `on_layer` has waited for it."""
    prompt = prompt_of(129)
    for page in (0, 1, 2, 4, 5):
        roomy.clear(page)
    roomy.step([Row(prompt, 129, 0, 128, [4, 5])])

    def on_layer(layer: int) -> None:
        for source, page in ((4, 0), (5, 1)):
            roomy.run(layer, page)[:] = roomy.run(layer, source)

    drawn = roomy.step([Row(prompt, 129, 128, 1, [0, 1, 2], GREEDY)], on_layer)[0]
    assert drawn is not None
    check(reference, [*prompt, drawn.token], 129)
