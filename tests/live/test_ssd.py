"""A cluster whose working set is larger than its DRAM: with an SSD tier the KVCache is still there, and exact."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.live.kit import BLOCK, audit, complete, output_ids, random_prompt, total

from moonpool.bench.cluster import RunningCluster, running_cluster
from moonpool.engine.timed import reference_tokens

pytestmark = pytest.mark.live

# One block of the timed engine is 32 KiB, so that DRAM has 32 of them.
SMALL = ("--engine", "timed", "--nodes", "2", "--dram-per-node", "1MiB", "--admission", "none")
CONVERSATIONS = 8
BLOCKS = 10
OUTPUT = 8


@dataclass
class Turns:
    answers: list[list[int]]
    computed: float
    """Tokens, in the second turns alone."""


def talk(cluster: RunningCluster) -> Turns:
    """Two turns of several conversations, each turn of all before the next: so none is in DRAM when it goes on."""
    prompts = [random_prompt(BLOCKS * BLOCK, seed=seed) for seed in range(CONVERSATIONS)]
    answers = []
    before = 0.0
    for turn in range(2):
        if turn:
            audit(cluster)
            before = total(cluster, "computed_tokens")
        for prompt in prompts:
            answer = output_ids(complete(cluster, prompt, OUTPUT))
            assert answer == reference_tokens(prompt, OUTPUT)
            answers.append(answer)
            prompt += [*answer, *random_prompt(20, seed=99)]
    audit(cluster)
    return Turns(answers, total(cluster, "computed_tokens") - before)


def test_an_ssd_tier_saves_computing(smollm2: Path, tmp_path: Path) -> None:
    ssd = ("--ssd-per-node", "16MiB", "--ssd-dir", str(tmp_path / "ssd"))
    with running_cluster(*SMALL) as cluster:
        without = talk(cluster)
    with running_cluster(*SMALL, *ssd) as cluster:
        first = talk(cluster)
        assert total(cluster, "ssd_promotions") > CONVERSATIONS * BLOCKS / 2
        assert total(cluster, "demotions") > CONVERSATIONS * BLOCKS / 2
        assert total(cluster, "ssd_checksum_failures") == total(cluster, "ssd_errors") == 0
        assert total(cluster, "ssd_capacity_bytes") == 2 * (16 << 20)
    assert first.answers == without.answers
    assert first.computed < 0.5 * without.computed
    # A cluster that is started again knows what the last one had.
    with running_cluster(*SMALL, *ssd) as cluster:
        again = talk(cluster)
        assert total(cluster, "computed_tokens") < 0.7 * (CONVERSATIONS * BLOCKS * BLOCK + again.computed)
    assert again.answers == without.answers
