"""A live cluster on the timed engine that is a hardware profile, scaled: it takes the profile's seconds."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from moonpool.bench.cluster import RunningCluster, running_cluster
from moonpool.command.hardware import hardware_profile, timed_config
from moonpool.core.cost import DecodeCost, PrefillCost
from moonpool.engine.timed import reference_tokens
from tests.live.kit import audit, cached_tokens, complete, output_ids, random_prompt

SCALE = ("a800-llama2-70b", 4.0, 5120.0)
HARDWARE = hardware_profile(*SCALE)
FLAGS = ("--engine", "timed", "--hardware", SCALE[0], "--slow-down", f"{SCALE[1]:g}", "--shrink-kv", f"{SCALE[2]:g}")
TOKENS, OUTPUT = 3000, 12

pytestmark = pytest.mark.live


@pytest.fixture(scope="module", params=[("--nodes", "2"), ("--coupled", "1", "--placement", "round-robin")])
def cluster(request: pytest.FixtureRequest) -> Iterator[RunningCluster]:
    with running_cluster(*FLAGS, "--dram-per-node", "32MiB", *request.param) as c:
        yield c
        audit(c)


def test_it_takes_the_profiles_seconds_and_moves_its_bytes(cluster: RunningCluster) -> None:
    prompt = random_prompt(TOKENS, seed=7)
    expected = PrefillCost(HARDWARE.prefill).seconds(TOKENS, 0)
    expected += (OUTPUT - 1) * DecodeCost(HARDWARE.decode).seconds(1, TOKENS)
    began = time.monotonic()
    answer = complete(cluster, prompt, OUTPUT, ignore_eos=True)
    took = time.monotonic() - began
    assert output_ids(answer) == reference_tokens(prompt, OUTPUT, timed_config(HARDWARE))
    assert expected <= took < expected + 2.0
    again = complete(cluster, prompt, OUTPUT, ignore_eos=True)
    assert cached_tokens(again) == TOKENS // 512 * 512
    assert output_ids(again) == output_ids(answer)
