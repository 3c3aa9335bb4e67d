"""Pages and arenas are bounded by configuration, so no process grows with the requests that it has served."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from moonpool.bench.cluster import RunningCluster, running_cluster
from tests.live.kit import BLOCK, audit, complete, pid_of, random_prompt
from tests.soak import SOAK

AT_ONCE = 16
PARTS = ("gateway-0", "node-0", "prefill-0", "decode-0")
SLACK_BYTES = 24 << 20
"""Of heaps that are in pieces, and of logs and journals on their way."""

pytestmark = pytest.mark.live


def resident(cluster: RunningCluster) -> dict[str, int]:
    return {part: psutil.Process(pid_of(cluster, part)).memory_info().rss for part in PARTS}


def ask(cluster: RunningCluster, requests: int, seed: int) -> None:
    """Some with a prefix that is known, some new, in a soak some long."""

    def one(n: int) -> None:
        prefix = random_prompt(2 * BLOCK, seed=n % 3)
        rest = random_prompt(1900 if SOAK and n % 20 == 0 else 1 + n % 30, seed=1000 * seed + n)
        complete(cluster, [*prefix, *rest], 8, ignore_eos=True)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(one, range(requests)))


@pytest.mark.timeout(3600)
def test_no_process_grows_after_it_has_warmed_up(smollm2: Path) -> None:
    options = () if SOAK else ("--engine", "timed", "--dram-per-node", "4MiB")
    with running_cluster(*options, "--admission", "none") as cluster:
        ask(cluster, 100 if SOAK else 48, seed=1)
        before = resident(cluster)
        ask(cluster, 200 if SOAK else 96, seed=2)
        audit(cluster)
        after = resident(cluster)
        grown = {part: after[part] - before[part] for part in PARTS if after[part] > before[part] + SLACK_BYTES}
        assert not grown, f"{grown} bytes more than before; {after}"
