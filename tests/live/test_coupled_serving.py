"""Coupled workers live: the tokens of `generate`, in steps that mix prompts with decode, also when one is killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from moonpool.bench.cluster import RunningCluster, running_cluster
from moonpool.engine.timed import reference_tokens
from tests.exactness import Reference
from tests.live.kit import (
    BLOCK,
    HANG,
    Stream,
    audit,
    cached_tokens,
    complete,
    counters,
    eventually,
    output_ids,
    pid_of,
    random_prompt,
    total,
)

CHUNK = 48
"""Less than a block, so that chunks end anywhere."""

pytestmark = pytest.mark.live


@pytest.fixture(scope="module")
def cluster(smollm2: Path) -> Iterator[RunningCluster]:
    with running_cluster("--coupled", "2", "--prefill-chunk", str(CHUNK)) as c:
        yield c
        audit(c)


@pytest.fixture(scope="module")
def reference(smollm2: Path) -> Reference:
    return Reference(smollm2)


@pytest.mark.timeout(900)
def test_greedy_tokens_equal_generate_in_mixed_steps(cluster: RunningCluster, reference: Reference) -> None:
    lengths = [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * CHUNK, 300, 129, 200]
    prompts = [random_prompt(length, seed=length) for length in lengths]
    with ThreadPoolExecutor(8) as pool:
        for is_warm in (False, True):
            answers = list(pool.map(lambda p: complete(cluster, p, 24, ignore_eos=True), prompts))
            ties = sum(reference.check(p, output_ids(a)).ties for p, a in zip(prompts, answers, strict=True))
            assert all(len(output_ids(a)) == 24 for a in answers)
            assert ties <= 4
            if is_warm:
                expected = [(length - 1) // BLOCK * BLOCK for length in lengths]
                assert [cached_tokens(a) for a in answers] == expected, "both workers share their node's blocks"
    assert total(cluster, "mixed_steps") > 0, "no step held chunks and decode tokens together"
    assert total(cluster, "rooms") == 0


def test_a_killed_worker_is_replaced_without_a_wrong_token(cluster: RunningCluster, reference: Reference) -> None:
    prompts = [random_prompt(150 + n, seed=40 + n) for n in range(2)]
    streams = [Stream(cluster, prompt, 80) for prompt in prompts]
    for stream in streams:
        assert stream.first.wait(HANG)
    victim = pid_of(cluster, "coupled-0")
    os.kill(victim, signal.SIGKILL)
    for prompt, stream in zip(prompts, streams, strict=True):
        ids = stream.result()
        assert stream.error is None
        assert len(ids) == 80, "a token was lost or repeated"
        reference.check(prompt, ids)
    until = time.monotonic() + HANG
    while pid_of(cluster, "coupled-0") == victim and time.monotonic() < until:
        time.sleep(0.1)


@pytest.mark.parametrize("mode", ["prefill-first", "one-at-a-time", "chunked"])
def test_requests_for_four_times_the_pages_all_finish_in_every_mode(mode: str) -> None:
    options = ("--engine", "timed", "--coupled", "1", "--coupled-mode", mode, "--prefill-chunk", "32")
    with running_cluster(*options, "--block-size", "16", "--decode-pages", "16", "--max-batch", "8") as small:
        prompts = [random_prompt(17 + 2 * n, seed=50 + n) for n in range(16)]
        with ThreadPoolExecutor(16) as pool:
            answers = list(pool.map(lambda p: complete(small, p, 64 - len(p), ignore_eos=True), prompts))
        for prompt, answer in zip(prompts, answers, strict=True):
            assert output_ids(answer) == reference_tokens(prompt, 64 - len(prompt))
        assert (total(small, "mixed_steps") > 0) == (mode == "chunked")
        gone = Stream(small, random_prompt(30, seed=9), 200)
        assert gone.first.wait(HANG)
        gone.result()
        audit(small)


def test_short_prompts_are_computed_in_a_decode_batch_beside_the_pools() -> None:
    """Whoever computes them, the tokens are the same; what is stored by one is found by the other."""
    short, long = random_prompt(BLOCK, seed=1), random_prompt(3 * BLOCK, seed=2)
    options = ("--engine", "timed", "--inline", "1", "--prefill-chunk", str(BLOCK + 8), "--slo-tbt", "10s")
    with running_cluster(*options) as c:
        # Until all have joined, whoever is there takes what comes.
        eventually(lambda: len(counters(c)) >= 6, "gateway, Conductor, node and three workers")

        def computed() -> tuple[float, float]:
            found = counters(c)
            return found["coupled-0"]["computed_tokens"], found["prefill-0"]["computed_tokens"]

        def serve(prompt: list[int], inlined: int, apart: int) -> None:
            """In the end so many tokens were computed by each."""
            assert output_ids(complete(c, prompt, 8)) == reference_tokens(prompt, 8)
            eventually(lambda: computed() == (inlined, apart), f"{inlined} tokens are inlined, {apart} are not")

        serve(short, BLOCK, 0)
        serve(long, BLOCK, 3 * BLOCK)
        # All but what the prefill worker has stored; the last block has to be computed again.
        serve(long, 2 * BLOCK, 3 * BLOCK)
        audit(c)
