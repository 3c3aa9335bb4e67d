"""Prefix reuse counted in tokens, and numbers that add up over gateway, Conductor, workers and nodes."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moonpool.bench.cluster import RunningCluster, running_cluster
from tests.live.kit import BLOCK, cached_tokens, complete, counters, output_ids, random_prompt, total, wait_at_rest

pytestmark = pytest.mark.live


@pytest.fixture(scope="module")
def cluster(smollm2: Path) -> Iterator[RunningCluster]:
    # The default keeps hand-over within a node where it can; here bytes are to cross.
    with running_cluster("--nodes", "2", "--prefill", "2", "--decode", "2", "--placement", "algorithm-1") as c:
        yield c


def settled(cluster: RunningCluster) -> dict[str, dict[str, float]]:
    """Counters once nothing runs and a fresh report has come from everybody."""
    held = wait_at_rest(cluster)
    assert not any(held.values()), held
    time.sleep(2.5)  # counters travel once a second
    return counters(cluster)


def test_only_what_is_new_is_computed_wherever_it_lands(cluster: RunningCluster) -> None:
    prefix = random_prompt(10 * BLOCK, seed=3)
    before = total(cluster, "computed_tokens")
    complete(cluster, [*prefix, *random_prompt(20, seed=4)], 4)
    settled(cluster)
    cold = total(cluster, "computed_tokens") - before
    assert cold == 10 * BLOCK + 20
    for n in range(4):
        answer = complete(cluster, [*prefix, *random_prompt(20, seed=10 + n)], 4)
        assert cached_tokens(answer) == 10 * BLOCK
    settled(cluster)
    assert total(cluster, "computed_tokens") - before == cold + 4 * 20


def test_the_numbers_reconcile(cluster: RunningCluster) -> None:
    start = settled(cluster)
    prompts = [random_prompt(100 + 50 * n, seed=200 + n) for n in range(8)]
    answers = [complete(cluster, p, 10, ignore_eos=True) for p in (*prompts, *prompts)]
    end = settled(cluster)

    def grown(name: str, kind: str = "") -> float:
        return sum(
            values.get(name, 0.0) - start[part].get(name, 0.0) for part, values in end.items() if part.startswith(kind)
        )

    prompt_tokens = sum(a["usage"]["prompt_tokens"] for a in answers)
    cached = sum(cached_tokens(a) for a in answers)
    assert prompt_tokens == 2 * sum(len(p) for p in prompts)
    assert grown("computed_tokens", "prefill") + grown("cached_tokens", "prefill") == prompt_tokens
    assert grown("cached_tokens", "prefill") == cached > 0
    assert grown("generated_tokens", "decode") + grown("prompts", "prefill") == sum(len(output_ids(a)) for a in answers)
    assert grown("messenger_bytes_sent", "prefill") + grown("bytes_out", "node") == grown("bytes_in", "node") > 0

    state = cluster.describe()
    held = {part: values["blocks"] for part, values in end.items() if part.startswith("node")}
    parts: list[dict[str, Any]] = state["parts"]  # type: ignore[assignment]
    assert {p["id"]: p["blocks"]["dram"] for p in parts if p["kind"] == "node"} == held
    metrics = cluster.get("/metrics").decode()
    for part, blocks in held.items():
        shown = re.search(rf'^moonpool:node_blocks{{node="{part}"}} (\S+)$', metrics, re.M)
        assert shown is not None, metrics
        assert float(shown[1]) == blocks
