"""A live cluster whose weights are int8."""

from __future__ import annotations

from pathlib import Path

import pytest

from moonpool.bench.cluster import running_cluster
from tests.live.kit import BLOCK, audit, cached_tokens, complete

pytestmark = pytest.mark.live

PROMPT = (
    "Many countries have a capital in which their government meets. The capital of Germany is Berlin, that of Italy is "
    "Rome, and that of Spain is Madrid. Some are the largest city of their country, others are not. "
) * 4 + "The capital of France is"


def test_it_answers_and_finds_its_blocks_again(smollm2: Path) -> None:
    """Tokens may differ between cold and warm where two are nearly as likely: rounding depends on the shapes."""
    with running_cluster("--quantize", "int8") as cluster:
        cold, warm = (complete(cluster, PROMPT, 4) for _ in range(2))
        for answer in (cold, warm):
            assert "Paris" in answer["choices"][0]["text"]
        whole = (cold["usage"]["prompt_tokens"] - 1) // BLOCK * BLOCK
        assert (cached_tokens(cold), cached_tokens(warm)) == (0, whole)
        assert whole > 0
        audit(cluster)
