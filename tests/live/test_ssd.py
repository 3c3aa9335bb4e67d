"""A cluster whose working set is larger than its DRAM: with an SSD tier the KVCache is still there, and exact."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from moonpool.bench.cluster import RunningCluster, running_cluster
from moonpool.engine.timed import reference_tokens
from tests.live.kit import (
    BLOCK,
    HANG,
    Stream,
    audit,
    complete,
    counters,
    eventually,
    output_ids,
    part_state,
    pid_of,
    random_prompt,
    total,
)

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


def test_a_killed_nodes_streams_go_on_and_its_ssd_is_hit_when_it_returns(smollm2: Path, tmp_path: Path) -> None:
    """`lmetric` counts requests: of those that come at once each decode worker gets as many, however fast it seems."""
    ssd = ("--ssd-per-node", "16MiB", "--ssd-dir", str(tmp_path / "ssd"), "--decode", "2", "--max-batch", "32")
    prompts = [random_prompt(8 * BLOCK, seed=seed) for seed in range(6)]
    with running_cluster(*SMALL, *ssd, "--placement", "lmetric") as cluster, ThreadPoolExecutor(len(prompts)) as pool:

        def ask() -> None:
            answers = pool.map(lambda prompt: complete(cluster, prompt, OUTPUT), prompts)
            assert [output_ids(a) for a in answers] == [reference_tokens(p, OUTPUT) for p in prompts]

        ask()
        audit(cluster)
        streams = [Stream(cluster, [*prompt[: 3 * BLOCK], 7], 60) for prompt in prompts]
        eventually(lambda: all(len(s.ids) >= 5 for s in streams), "all streams run")
        kept = part_state(cluster, "node-1")
        assert kept["blocks"]["ssd"] >= 4
        assert part_state(cluster, "decode-0")["assigned"] > 0, "none of them is at the node that dies"
        os.kill(pid_of(cluster, "node-1"), signal.SIGKILL)
        for stream, prompt in zip(streams, prompts, strict=True):
            assert stream.result() == reference_tokens([*prompt[: 3 * BLOCK], 7], 60)
            assert stream.error is None
        eventually(lambda: part_state(cluster, "node-1").get("index") == "exact", "the node is announced")
        back = part_state(cluster, "node-1")
        assert back["incarnation"] != kept["incarnation"]
        assert back["blocks"]["ssd"] >= kept["blocks"]["ssd"] / 2, "what was on its SSD is announced again"
        before = counters(cluster)["node-1"]["ssd_promotions"]
        for round_ in range(20):
            # Each time others are decoded there, and it may be those whose blocks were not demoted there.
            random.Random(round_).shuffle(prompts)
            ask()
            if counters(cluster)["node-1"]["ssd_promotions"] > before:
                break
        else:
            raise AssertionError("it is not hit")
        audit(cluster)


def test_a_node_whose_ssd_is_gone_when_it_is_started_again_goes_on_with_dram(smollm2: Path, tmp_path: Path) -> None:
    directory = tmp_path / "ssd"
    ssd = ("--ssd-per-node", "16MiB", "--ssd-dir", str(directory))
    with running_cluster("--engine", "timed", "--dram-per-node", "1MiB", *ssd) as cluster:
        prompt = random_prompt(3 * BLOCK, seed=1)
        before = output_ids(complete(cluster, prompt, OUTPUT))
        (directory / "node-0").rename(tmp_path / "away")
        (directory / "node-0").touch()
        os.kill(pid_of(cluster, "node-0"), signal.SIGKILL)
        deadline = time.monotonic() + HANG
        while not lost_volumes(cluster):
            assert cluster.process.poll() is None, cluster.log()[-4000:]
            assert time.monotonic() < deadline, cluster.log()[-4000:]
            time.sleep(0.2)
        cluster.wait_ready()
        assert output_ids(complete(cluster, prompt, OUTPUT)) == before
        assert "is given up until this node restarts" in cluster.log()
        assert "did not come up" not in cluster.log()


def lost_volumes(cluster: RunningCluster) -> float:
    with contextlib.suppress(OSError):
        return total(cluster, "ssd_lost_volumes")
    return 0.0
