"""A live cluster whose weights are int8."""

from __future__ import annotations

from pathlib import Path

import pytest

from moonpool.bench.cluster import running_cluster
from tests.live.kit import BLOCK, audit, cached_tokens, complete, output_ids, random_prompt

pytestmark = pytest.mark.live


def test_it_answers_and_finds_its_blocks_again(smollm2: Path) -> None:
    with running_cluster("--quantize", "int8") as cluster:
        answer = complete(cluster, "The capital of France is", 6)
        assert "Paris" in answer["choices"][0]["text"]
        prompt = random_prompt(3 * BLOCK + 7, seed=1)
        cold, warm = (complete(cluster, prompt, 8, ignore_eos=True) for _ in range(2))
        assert output_ids(warm) == output_ids(cold)
        assert (cached_tokens(cold), cached_tokens(warm)) == (0, 3 * BLOCK)
        audit(cluster)
