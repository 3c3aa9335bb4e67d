"""Pipelines of prefill workers over real processes: right tokens, by shared memory and sockets, and after a kill."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from moonpool.bench.cluster import running_cluster
from moonpool.engine.timed import reference_tokens
from tests.exactness import Reference
from tests.live.kit import (
    BLOCK,
    Stream,
    audit,
    cached_tokens,
    complete,
    counters,
    eventually,
    output_ids,
    part_state,
    pid_of,
    random_prompt,
    total,
)
from tests.live.parts import Parts, separate_parts
from tests.soak import SOAK

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]

TOKENS = 6
LENGTHS = [1, 17, 63, 64, 65, 129, 300, 700] if SOAK else [1, 64, 65, 300]
PIPELINES = (
    [(stages, chunk, nodes) for stages in (2, 3) for chunk in (16, 64, 100, 128, 512) for nodes in (1, 2)]
    if SOAK
    else [(2, 100, 1), (3, 64, 2)]
)
TIMED_LENGTHS = [1, 64, 65, 300, 900]


@pytest.fixture(scope="module")
def reference(smollm2: Path) -> Reference:
    return Reference(smollm2)


@pytest.mark.parametrize(("stages", "chunk", "nodes"), PIPELINES)
def test_greedy_tokens_equal_generate_cold_and_warm(stages: int, chunk: int, nodes: int, reference: Reference) -> None:
    options = ("--prefill", str(stages), "--pipeline", str(stages), "--pipeline-chunk", str(chunk))
    with running_cluster(*options, "--nodes", str(nodes)) as c:
        prompts = [random_prompt(length, seed=length + stages) for length in LENGTHS]
        for prompt in prompts:
            for warm in (False, True):
                answer = complete(c, prompt, TOKENS, ignore_eos=True)
                reference.check(prompt, output_ids(answer))
                if warm:
                    assert cached_tokens(answer) == (len(prompt) - 1) // BLOCK * BLOCK
        others = [random_prompt(length, seed=99 + length) for length in (5, 200, 330, 64)]
        with ThreadPoolExecutor(4) as pool:
            for prompt, answer in zip(others, pool.map(lambda p: complete(c, p, TOKENS), others), strict=True):
                reference.check(prompt, output_ids(answer))
        audit(c)

        def steps() -> list[float]:
            return [values["steps"] for part, values in counters(c).items() if part.startswith("prefill")]

        assert len(steps()) == stages
        eventually(lambda: max(steps()) == min(steps()) > 0, "every step goes through every stage")
        assert part_state(c, "prefill-0")["stages"] == stages
        assert part_state(c, f"prefill-0.{stages - 1}")["layers"][1] == 30


def test_several_groups_serve_many_at_once(smollm2: Path) -> None:
    options = ("--engine", "timed", "--prefill", "4", "--pipeline", "2", "--nodes", "2", "--decode", "2")
    with running_cluster(*options) as c:
        prompts = [random_prompt(length, seed=n % 12) for n, length in enumerate(TIMED_LENGTHS * (20 if SOAK else 6))]
        with ThreadPoolExecutor(12) as pool:
            answers = pool.map(lambda p: complete(c, p, 5, ignore_eos=True), prompts)
            for prompt, answer in zip(prompts, answers, strict=True):
                assert output_ids(answer) == reference_tokens(prompt, 5)
        audit(c)

        def computed() -> bool:
            parts = ("prefill-0", "prefill-0.1", "prefill-1", "prefill-1.1")
            return all(counters(c)[part]["steps"] > 0 for part in parts)

        eventually(computed, "both groups have computed, and said so")


@pytest.fixture
def far() -> Iterator[Parts]:
    """Two stages on different nodes, which share no memory; decode on the second stage's node."""
    config = {"engine": "timed", "pipeline": 2, "pipeline-chunk": 100, "journal": "off", "dram-per-node": "64MiB"}
    with separate_parts(config) as parts:
        parts.start_node("node-0")
        parts.start_node("node-1")
        parts.start("prefill", "prefill-0", "--conductor", parts._address, "--node", "node-0")
        parts.start(
            "prefill", "stage-1", "--conductor", parts._address, "--node", "node-1",
            "--stage", "1", "--leader", "prefill-0",
        )  # fmt: skip
        yield parts


@pytest.mark.parametrize("decode_at", ["node-0", "node-1", "node-2"])
def test_stages_on_different_nodes_pass_everything_over_sockets(far: Parts, decode_at: str) -> None:
    if decode_at == "node-2":
        far.start_node("node-2")
    far.start_worker("decode", "decode-0", decode_at)
    far.wait_ready()
    for length in TIMED_LENGTHS:
        prompt = random_prompt(length, seed=length)
        for warm in (False, True):
            answer = complete(far, prompt, 5, ignore_eos=True)
            assert output_ids(answer) == reference_tokens(prompt, 5)
            if warm:
                assert cached_tokens(answer) == (length - 1) // BLOCK * BLOCK
    audit(far)
    assert counters(far)["prefill-0"]["messenger_bytes_sent"] > 0
    assert counters(far)["stage-1"]["messenger_bytes_sent"] > 0


@pytest.mark.parametrize("victim", ["prefill-0.1", "prefill-0"])
def test_a_stage_killed_amid_requests_costs_no_token(victim: str, smollm2: Path) -> None:
    """The rest of the group goes on with a new life; its requests are placed again."""
    options = ("--engine", "timed", "--prefill", "2", "--pipeline", "2")
    with running_cluster(*options) as c:
        prompts = [random_prompt(length, seed=length) for length in (3000, 700, 2500, 65)]
        streams = [Stream(c, prompt, 20) for prompt in prompts]
        eventually(lambda: counters(c)["prefill-0.1"]["steps"] > 0, "a step in the second stage")
        survivor = pid_of(c, "prefill-0" if victim == "prefill-0.1" else "prefill-0.1")
        os.kill(pid_of(c, victim), signal.SIGKILL)
        for prompt, stream in zip(prompts, streams, strict=True):
            assert stream.result() == reference_tokens(prompt, 20), stream.error
        assert survivor == pid_of(c, "prefill-0" if victim == "prefill-0.1" else "prefill-0.1"), "it had to end too"
        again = random_prompt(500, seed=500)
        assert output_ids(complete(c, again, 5, ignore_eos=True)) == reference_tokens(again, 5)
        audit(c)


def test_clients_that_hang_up_free_all_stages_within_a_second(smollm2: Path) -> None:
    """After the running layer: here a layer of a step of 100 tokens takes some 60 ms."""
    options = ("--engine", "timed", "--prefill", "2", "--pipeline", "2", "--pipeline-chunk", "100", "--nodes", "2")
    with running_cluster(*options) as c:
        url = f"{c.url}/v1/completions"

        def hang_up(n: int) -> None:
            body = {"model": "smollm2", "prompt": random_prompt(4000, seed=n), "max_tokens": 5, "stream": True}
            with pytest.raises(httpx.TimeoutException):
                httpx.post(url, json=body, timeout=1.0 + random.Random(n).random())

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(hang_up, range(4)))
        began = time.monotonic()
        stages = "prefill-0", "prefill-0.1"
        eventually(lambda: not any(counters(c)[part]["jobs"] for part in stages), "nothing is held in the stages")
        # A second is what they have, counters come once a second, and CI is slow; 4 prompts take 20 s to compute.
        assert time.monotonic() - began < 8
        assert counters(c)["prefill-0"]["steps"] < 80, "half of the 160 steps were computed for nobody"
        audit(c)
        prompt = random_prompt(300, seed=1)
        assert output_ids(complete(c, prompt, 5, ignore_eos=True)) == reference_tokens(prompt, 5)
        assert total(c, "failed_prompts") == 0
