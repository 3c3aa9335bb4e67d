"""One gateway with hundreds of streams at once, and then with as many requests as it takes; thousands in a soak."""

from __future__ import annotations

from pathlib import Path

import pytest

from moonpool.bench.streams import measure
from tests.soak import SOAK

STREAMS, QUEUED = (2000, 10_000) if SOAK else (200, 600)

pytestmark = pytest.mark.live


@pytest.mark.timeout(900)
def test_none_is_lost_none_mixed_up_and_those_that_wait_take_little_memory(smollm2: Path) -> None:
    bars = measure(STREAMS, QUEUED, seed=3)
    assert len(bars) == 9
    assert all(bar["holds"] for bar in bars), [bar for bar in bars if not bar["holds"]]
