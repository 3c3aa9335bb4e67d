"""What the workers of a cluster hold beside their pages and arenas does not grow with the requests that they serve."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from moonpool.bench.cluster import RunningCluster, running_cluster
from moonpool.bench.process import anonymous_bytes
from tests.live.kit import audit, complete, pids, random_prompt
from tests.soak import SOAK

pytestmark = pytest.mark.live

BATCH = 16
LONG, WARM, MEASURED = 2000, 176, 200
"""Warm after 9 to 11 batches: until then the code that oneDNN keeps for products of some shapes fills its place
(`engine.loading.bound_caches`), some 50 MiB of a prefill worker; in the 8 batches after that it grew by 4."""
GROWTH_BYTES = 24 << 20
"""A fiftieth of what a worker holds: allocators do not give all back."""


def held(cluster: RunningCluster) -> dict[str, int]:
    """Bytes of anonymous memory, by part. Not of the arena: pages of it that only one part has touched yet are in what
    it has for itself (USS), and they become more until the arena is full."""
    return {part: anonymous_bytes(pid) for part, pid in pids(cluster).items()}


@pytest.mark.timeout(1800)
@pytest.mark.skipif(not SOAK, reason="MOONPOOL_SOAK=1: some minutes")
def test_memory_does_not_grow_with_requests(smollm2: Path) -> None:
    """Batches of short prompts of all lengths, one long prompt among each."""
    with running_cluster("--dram-per-node", "256MiB") as cluster, ThreadPoolExecutor(BATCH) as pool:

        def serve(first: int, count: int) -> None:
            lengths = [LONG if n % BATCH == 0 else 20 + 13 * n % 200 for n in range(first, first + count)]
            prompts = [random_prompt(length, seed=first + n) for n, length in enumerate(lengths)]
            list(pool.map(lambda prompt: complete(cluster, prompt, 12, ignore_eos=True), prompts))
            audit(cluster)

        serve(0, WARM)
        before = held(cluster)
        serve(WARM, MEASURED)
        after = held(cluster)
        assert len(before) > 3
        grown = {part: after[part] - before[part] for part in before}
        assert max(grown.values()) < GROWTH_BYTES, f"bytes more than after {WARM} requests: {grown}"
