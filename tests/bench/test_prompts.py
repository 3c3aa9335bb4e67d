"""Prompts of a replay: equal exactly where the trace's ids are, of exact lengths, repeatable."""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from moonpool.bench.prompts import ID_RANGE, Prompts, ids_below, text_words
from moonpool.errors import ConfigError
from moonpool.trace.request import TraceRequest

BLOCK = 16


def made(prompts: Prompts, tokens: int, *blocks: int, number: int = 0) -> list[int]:
    request = TraceRequest(0.0, tokens, 1, blocks)
    ids: list[int] = json.loads(b"[" + asyncio.run(prompts.prompt(number, request)) + b"]")
    return ids


def shared(a: list[int], b: list[int]) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def test_prompts_share_whole_blocks_exactly_where_their_ids_are_equal() -> None:
    prompts = Prompts(ids_below(), BLOCK, seed=0)
    one = made(prompts, 60, 1, 2, 3, 4)
    assert len(one) == 60
    assert all(ID_RANGE[0] <= token < ID_RANGE[1] for token in one)
    assert made(prompts, 64, 1, 2, 3, 4)[:60] == one, "the same blocks, longer"
    for blocks, whole in (((1, 2, 3, 5), 3), ((1, 2, 7, 4), 2), ((9, 2, 3, 4), 0)):
        common = shared(one, made(prompts, 60, *blocks))
        assert common // BLOCK == whole, blocks
        assert common < whole * BLOCK + 5, "blocks differ within their first few tokens"


def test_no_two_ids_have_the_same_beginning() -> None:
    """In few words a beginning is longer; 30,000 blocks of 8 bits a token would collide by chance in 2 tokens."""
    prompts = Prompts(ids_below(600), BLOCK, seed=3)
    found = {tuple(prompts.numbers(id_, 8)) for id_ in (*range(-15_000, 15_000), 2**63 - 1, -(2**63))}
    assert len(found) == 30_002


def test_what_the_trace_has_no_ids_for_nobody_shares() -> None:
    prompts = Prompts(ids_below(), BLOCK, seed=0)
    assert shared(made(prompts, 50, number=1), made(prompts, 50, number=2)) < 5
    partly = made(prompts, 50, 1, number=1), made(prompts, 50, 1, number=2)
    assert BLOCK <= shared(*partly) < BLOCK + 5
    assert len(made(prompts, 50, 1, 2, 3, 4, 5, 6)) == 50, "more ids than tokens"


def test_a_seed_repeats_and_another_shares_nothing() -> None:
    one, again, other = (Prompts(ids_below(), BLOCK, seed) for seed in (7, 7, 8))
    assert made(one, 100, *range(7)) == made(again, 100, *range(7))
    assert shared(made(one, 100, *range(7)), made(other, 100, *range(7))) < 5


@pytest.mark.parametrize("extra", [1, 20])
def test_tokens_that_the_endpoint_adds_are_taken_off_the_first_blocks(extra: int) -> None:
    """What stands behind them is where the trace has it: every later block at its own place."""
    plain, less = Prompts(ids_below(), BLOCK, 0), Prompts(ids_below(), BLOCK, 0, extra)
    whole, cut = made(plain, 64, 1, 2, 3, 4), made(less, 64, 1, 2, 3, 4)
    assert len(cut) == 64 - extra
    assert cut[-32:] == whole[-32:]
    assert len(made(less, extra, 1)) == 1, "a prompt has a token at least"


def test_text_has_as_many_tokens_as_were_asked_for(smollm2: Path) -> None:
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    words = text_words(tokenizer)
    assert len(words.pieces) > 4000
    prompts = Prompts(words, BLOCK, seed=1)
    for number, tokens in enumerate((1, 17, 700)):
        text = json.loads(b'"' + asyncio.run(prompts.prompt(number, TraceRequest(0.0, tokens, 1))) + b'"')
        assert len(tokenizer.encode(text, add_special_tokens=False).ids) == tokens


def test_a_vocabulary_of_a_few_ids_is_refused() -> None:
    assert len(ids_below(512).pieces) == 384
    with pytest.raises(ConfigError, match="--vocabulary 100"):
        ids_below(100)
