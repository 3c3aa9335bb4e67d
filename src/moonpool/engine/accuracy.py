"""What quantized weights cost: perplexity and greedy agreement beside the same model in float32, on our own text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import torch
from tokenizers import Tokenizer

from moonpool.engine.local import generate
from moonpool.engine.runner import TorchEngine
from moonpool.wire.messages import Sampling

WINDOW = 256
"""Tokens that are judged as one sequence: the logits of more would take much memory."""
PROMPT_TOKENS, OUTPUT_TOKENS = 48, 24

PERPLEXITY_LIMIT = 1.03
"""int8 may have this many times the perplexity of float32."""
AGREEMENT_LIMIT = 0.90
"""At this share of positions at least its most likely next token is the same."""


@dataclass(frozen=True, slots=True)
class Accuracy:
    """`agreement`: share of the text's positions where both have the same most likely next token.

    `greedy`: share of the tokens that float32 produces greedily after prompts from the text that the other would
    have taken too, each after float32's tokens before it.
    """

    tokens: int
    perplexity: float
    quantized_perplexity: float
    agreement: float
    greedy: float

    @property
    def ratio(self) -> float:
        return self.quantized_perplexity / self.perplexity


def passages(model: Path) -> list[int]:
    """Token ids of some 1,800 words of plain English that no model was trained on; `model` is its directory."""
    text = files("moonpool.engine").joinpath("passages.txt").read_text(encoding="utf-8")
    ids: list[int] = Tokenizer.from_file(str(model / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    return ids


def compare(exact: TorchEngine, quantized: TorchEngine, tokens: Sequence[int]) -> Accuracy:
    """Both engines on the same text. Both need pages for WINDOW tokens, and lose what is in them."""
    windows = [tokens[at : at + WINDOW] for at in range(0, len(tokens) - 1, WINDOW)]
    losses, other_losses, same, count = 0.0, 0.0, 0, 0
    for window in windows:
        right, other = exact.logits_along(window), quantized.logits_along(window)
        losses += _loss(right, window)
        other_losses += _loss(other, window)
        same += int((right.argmax(-1) == other.argmax(-1)).sum())
        count += len(window) - 1
    prompts = [list(window[:PROMPT_TOKENS]) for window in windows]
    return Accuracy(
        tokens=len(tokens),
        perplexity=math.exp(losses / count),
        quantized_perplexity=math.exp(other_losses / count),
        agreement=same / len(tokens),
        greedy=_greedy(exact, quantized, prompts),
    )


def _loss(logits: torch.Tensor, tokens: Sequence[int]) -> float:
    """Sum over all tokens but the first."""
    following = torch.tensor(tokens[1:])
    return float(torch.nn.functional.cross_entropy(logits[:-1], following, reduction="sum"))


def _greedy(exact: TorchEngine, quantized: TorchEngine, prompts: Sequence[list[int]]) -> float:
    samplings = [Sampling(seed=0, temperature=0, max_tokens=OUTPUT_TOKENS) for _ in prompts]
    same = count = 0
    for prompt, output in zip(prompts, generate(exact, prompts, samplings), strict=True):
        given = quantized.logits_along([*prompt, *output[:-1]])[len(prompt) - 1 :].argmax(-1)
        same += int((given == torch.tensor(output)).sum())
        count += len(output)
    return same / count
