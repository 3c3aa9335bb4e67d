"""Greedy tokens equal transformers' `generate` in fp32, whatever the chunks, the batch and the pages."""

from __future__ import annotations

import random

import pytest
import torch

from moonpool.engine.engine import Row
from moonpool.engine.local import generate
from moonpool.engine.runner import TorchEngine
from moonpool.wire.messages import Sampling
from tests.exactness import EPSILON, Reference

BLOCK = 64
GREEDY = Sampling(seed=0, temperature=0.0, max_tokens=4, ignore_eos=True)


def prompt_of(length: int) -> list[int]:
    rng = random.Random(length)
    return [rng.randrange(100, 40_000) for _ in range(length)]


def check(
    engine: TorchEngine, reference: Reference, lengths: list[int], chunk: int, sampling: Sampling = GREEDY
) -> None:
    prompts = [prompt_of(length) for length in lengths]
    outputs = generate(engine, prompts, [sampling] * len(prompts), chunk)
    verdicts = [reference.check(prompt, output) for prompt, output in zip(prompts, outputs, strict=True)]
    assert all(len(output) == sampling.max_tokens for output in outputs)
    assert sum(verdict.ties for verdict in verdicts) <= 1


@pytest.mark.parametrize("chunk", [1000, 64, 50])
def test_around_block_borders(engine: TorchEngine, reference: Reference, chunk: int) -> None:
    check(engine, reference, [1, 2, 63, 64, 65, 127, 128, 129], chunk)


@pytest.mark.parametrize("length", [1, 64, 129])
def test_alone(engine: TorchEngine, reference: Reference, length: int) -> None:
    check(engine, reference, [length], 64)


def test_chunks_of_one_token_are_decode_steps(engine: TorchEngine, reference: Reference) -> None:
    check(engine, reference, [9], chunk=1)


def test_a_decode_batch_of_mixed_lengths(engine: TorchEngine, reference: Reference) -> None:
    check(engine, reference, [1, 5, 63, 64, 65, 130, 300, 500], 256, GREEDY)


def test_chunks_of_several_prompts_and_decodes_in_one_batch(engine: TorchEngine, reference: Reference) -> None:
    """What `generate` never does: two chunks that begin in the middle, between two decode tokens."""
    block = engine.space.block_tokens
    lengths, chunk = [70, 100, 40, 129], 33
    prompts = [prompt_of(length) for length in lengths]
    tables = [list(range(4 * i, 4 * i + 4)) for i in range(4)]
    for page in range(16):
        engine.clear(page)
    assert block == BLOCK
    done = [37, 64, 39, 128]
    for prompt, pages, end in zip(prompts, tables, done, strict=True):
        engine.step([Row(prompt, len(prompt), 0, end, pages)])
    counts = [chunk, 36, 1, 1]
    rows = [
        Row(prompt, len(prompt), start, count, pages, GREEDY)
        for prompt, start, count, pages in zip(prompts, done, counts, tables, strict=True)
    ]
    for prompt, drawn in zip(prompts, engine.step(rows), strict=True):
        assert drawn is not None
        reference.check(prompt, [drawn.token])


def test_the_checker_itself_agrees_with_generate_and_refuses_a_wrong_token(reference: Reference) -> None:
    prompt = prompt_of(40)
    right = reference.generate(prompt, 8)
    assert reference.check(prompt, right).ties == 0
    wrong = [*right[:5], (right[5] + 1) % 49_000, *right[6:]]
    with pytest.raises(AssertionError, match="output position 5"):
        reference.check(prompt, wrong)


def test_epsilon_is_far_above_the_numeric_difference(engine: TorchEngine, reference: Reference) -> None:
    """Chunked, paged logits against one plain forward pass."""
    prompt = prompt_of(200)
    for page in range(4):
        engine.clear(page)
    pages = [3, 0, 2, 1]
    engine.step([Row(prompt, 200, 0, 90, pages)])
    ours = engine.logits([Row(prompt, 200, 90, 110, pages, GREEDY)])[0]
    theirs = reference.logits(prompt, [0])[0]
    assert float((ours - theirs).abs().max()) < EPSILON / 4


def test_poisoned_free_pages_change_no_output(engine: TorchEngine, reference: Reference) -> None:
    """All pages but the nine in use are NaN; the shorter row of the decode batch is padded, page 0 is not in use."""
    for page in range(engine.page_count):
        engine.poison_page(page)
    lengths, tables = (240, 300), ([5, 60, 2, 41], [90, 17, 33, 1, 80])
    prompts = [prompt_of(length) for length in lengths]
    for prompt, pages in zip(prompts, tables, strict=True):
        for page in pages:
            engine.clear(page)
        engine.step([Row(prompt, len(prompt), 0, len(prompt), pages)])
    for _ in range(4):
        rows = [
            Row(prompt, 1, len(prompt) - 1, 1, pages, GREEDY) for prompt, pages in zip(prompts, tables, strict=True)
        ]
        for prompt, drawn in zip(prompts, engine.step(rows), strict=True):
            assert drawn is not None
            prompt.append(drawn.token)
    for prompt, length in zip(prompts, lengths, strict=True):
        reference.check(prompt[:length], prompt[length:])


def test_poison_shows_where_a_page_is_read_that_nobody_wrote(engine: TorchEngine) -> None:
    prompt = prompt_of(70)
    engine.poison_page(7)
    engine.clear(8)
    engine.step([Row(prompt, 70, 64, 5, [7, 8])])
    assert bool(torch.isnan(engine.logits([Row(prompt, 70, 69, 1, [7, 8], GREEDY)])).any())
    engine.clear(8)
