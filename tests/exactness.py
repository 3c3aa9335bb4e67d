"""Is an output what transformers' `generate` gives, greedily? Used by tests of the engine and of live clusters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

EPSILON = 1e-3
"""Logits. Two orders of computing the same fp32 logits differ by some 1e-5 here (logits reach 30); where the
reference's best logit leads the drawn token's by less than this, either is a right answer: a tie."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """`ties`: positions where the output took another token than the reference, within EPSILON of the best."""

    ties: int
    compared: int


class Reference:
    """transformers' own model and attention, fp32. One forward pass checks a whole output (teacher forcing).

    Each position is judged after the *given* output up to it, so after a tie the comparison goes on from the token
    that was taken, which is as right as the other.
    """

    def __init__(self, path: Path) -> None:
        logging.disable_progress_bar()
        self._verdicts: dict[tuple[tuple[int, ...], tuple[int, ...]], Verdict] = {}
        """A cold and a warm answer are the same question."""
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True).eval()

    def logits(self, prompt: Sequence[int], output: Sequence[int]) -> torch.Tensor:
        """[len(output), vocabulary]: what each token of `output` is drawn from."""
        ids = torch.tensor([[*prompt, *output[:-1]]])
        with torch.inference_mode():
            logits: torch.Tensor = self.model(input_ids=ids, use_cache=False, logits_to_keep=len(output)).logits[0]
        return logits.float()

    def check(self, prompt: Sequence[int], output: Sequence[int]) -> Verdict:
        """Raises AssertionError at the first token that is neither the reference's nor a tie with it."""
        question = tuple(prompt), tuple(output)
        if question not in self._verdicts:
            self._verdicts[question] = self._check(prompt, output)
        return self._verdicts[question]

    def _check(self, prompt: Sequence[int], output: Sequence[int]) -> Verdict:
        assert output, "an empty output proves nothing"
        logits = self.logits(prompt, output)
        best = logits.max(-1)
        taken = logits[torch.arange(len(output)), torch.tensor(output)]
        ties = 0
        for position, token in enumerate(output):
            if token == int(best.indices[position]):
                continue
            gap = float(best.values[position] - taken[position])
            assert gap <= EPSILON, (
                f"output position {position} after {len(prompt)} prompt tokens: got {token}, the reference has "
                f"{int(best.indices[position])}, whose logit leads by {gap:.4g}"
            )
            ties += 1
        return Verdict(ties, len(output))

    def generate(self, prompt: Sequence[int], count: int) -> list[int]:
        """`count` greedy tokens of transformers' own `generate`, end tokens ignored."""
        ids = torch.tensor([list(prompt)])
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=count,
            min_new_tokens=count,
            eos_token_id=-1,
            pad_token_id=0,
        )
        tokens: list[int] = out[0, len(prompt) :].tolist()
        return tokens
