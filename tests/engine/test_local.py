"""The offline driver: order, page limits, chunks."""

from __future__ import annotations

import pytest

from moonpool.core.cost import DecodeCoefficients, PrefillCoefficients
from moonpool.engine.local import generate
from moonpool.engine.timed import TimedConfig, TimedEngine, reference_tokens
from moonpool.errors import ConfigError
from moonpool.wire.messages import Sampling

FREE = TimedConfig(prefill=PrefillCoefficients(0, 0, 0), decode=DecodeCoefficients(0, 0, 0), context_tokens=100)


def test_prompts_wait_for_pages_and_come_back_in_order() -> None:
    """Six prompts of 3 pages on 7 pages: two at a time."""
    engine = TimedEngine(page_count=7, block_tokens=16, config=FREE, poison=True)
    prompts = [[n] * 38 for n in range(6)]
    samplings = [Sampling(seed=0, max_tokens=10 - n) for n in range(6)]
    seen: list[int] = []
    outputs = generate(engine, prompts, samplings, 20, lambda index, _: seen.append(index))
    assert outputs == [reference_tokens(p, s.max_tokens, FREE) for p, s in zip(prompts, samplings, strict=True)]
    assert seen.index(2) > seen.index(1) > seen.index(0)
    assert set(seen[: seen.index(2)]) == {0, 1}


@pytest.mark.parametrize(
    ("prompt", "count", "reason"),
    [
        ([1] * 91, 10, "101 tokens with output, the context is 100"),
        ([1] * 50, 40, "needs 6 pages of 4"),
        ([], 4, "must be at least 1"),
        ([1], 0, "must be at least 1"),
    ],
)
def test_what_can_never_run_is_refused_at_once(prompt: list[int], count: int, reason: str) -> None:
    engine = TimedEngine(page_count=4, block_tokens=16, config=FREE)
    with pytest.raises(ConfigError, match=reason):
        generate(engine, [[1], prompt], [Sampling(seed=0), Sampling(seed=0, max_tokens=count)])
