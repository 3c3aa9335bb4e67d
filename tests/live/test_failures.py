"""Killed workers, vanished clients, too few pages: right text or a clean error, and nothing left behind."""

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

from moonpool.bench.cluster import RunningCluster, running_cluster
from tests.exactness import Reference
from tests.live.kit import HANG, Stream, audit, complete, counters, output_ids, pid_of, random_prompt, total

pytestmark = pytest.mark.live


@pytest.fixture(scope="module")
def cluster(smollm2: Path) -> Iterator[RunningCluster]:
    with running_cluster("--prefill", "1", "--decode", "1", "--prefill-chunk", "64") as c:
        yield c


@pytest.fixture(scope="module")
def reference(smollm2: Path) -> Reference:
    return Reference(smollm2)


def test_a_decode_worker_killed_mid_stream_is_replaced_without_a_wrong_token(
    cluster: RunningCluster, reference: Reference
) -> None:
    prompt = random_prompt(150, seed=1)
    stream = Stream(cluster, prompt, 120)
    assert stream.first.wait(HANG)
    while len(stream.ids) < 10:
        time.sleep(0.01)
    victim = pid_of(cluster, "decode-0")
    os.kill(victim, signal.SIGKILL)
    ids = stream.result()
    assert stream.error is None
    assert len(ids) == 120, "a token was lost or repeated"
    reference.check(prompt, ids)
    assert pid_of(cluster, "decode-0") != victim
    audit(cluster)


def test_a_prefill_worker_killed_mid_prompt_is_replaced(cluster: RunningCluster, reference: Reference) -> None:
    prompt = random_prompt(1500, seed=2)
    stream = Stream(cluster, prompt, 8)
    before = counters(cluster)["prefill-0"]["steps"]
    deadline = time.monotonic() + HANG
    while counters(cluster)["prefill-0"]["steps"] == before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not stream.ids, "the prompt was done before the kill: make it longer"
    victim = pid_of(cluster, "prefill-0")
    os.kill(victim, signal.SIGKILL)
    ids = stream.result()
    assert stream.error is None
    assert len(ids) == 8
    reference.check(prompt, ids)
    assert pid_of(cluster, "prefill-0") != victim
    audit(cluster)


def test_requests_for_four_times_the_decode_pages_all_finish_exactly(smollm2: Path, reference: Reference) -> None:
    """Each of 16 requests needs a quarter of the pages at its end, so they must take turns."""
    block, limit = 16, 64
    options = ("--block-size", str(block), "--decode-pages", "16", "--prefill-pages", "16", "--max-batch", "8")
    with running_cluster(*options) as small:
        prompts = [random_prompt(17 + 2 * n, seed=50 + n) for n in range(16)]
        with ThreadPoolExecutor(16) as pool:
            answers = list(pool.map(lambda p: complete(small, p, limit - len(p), ignore_eos=True), prompts))
        assert total(small, "preempted") > 0, "they never ran out of pages"
        ties = sum(reference.check(p, output_ids(a)).ties for p, a in zip(prompts, answers, strict=True))
        tokens = sum(len(output_ids(a)) for a in answers)
        assert tokens == sum(limit - len(p) for p in prompts)
        assert ties <= 0.02 * tokens
        audit(small)


def test_mixed_requests_with_random_disconnects_leave_nothing(smollm2: Path) -> None:
    """500 requests on the timed engine, a third of which hang up at a random moment."""
    with running_cluster("--engine", "timed", "--nodes", "2", "--prefill", "2", "--decode", "2") as c:
        rng = random.Random(5)
        plans = [
            (rng.choice((1, 30, 64, 65, 200, 500, 900)), rng.randrange(1, 40), rng.random() < 0.33, rng.random())
            for _ in range(500)
        ]
        outcomes: list[str] = []

        def one(n: int) -> None:
            length, tokens, hangs_up, patience = plans[n]
            body = {
                "model": "smollm2",
                "prompt": random_prompt(length, seed=n % 60),
                "max_tokens": tokens,
                "ignore_eos": True,
                "stream": n % 2 == 0,
            }
            timeout = patience * 0.5 if hangs_up else HANG
            try:
                response = httpx.post(f"{c.url}/v1/completions", json=body, timeout=timeout)
            except httpx.TimeoutException:
                outcomes.append("hung up")
            else:
                outcomes.append(str(response.status_code))

        with ThreadPoolExecutor(24) as pool:
            list(pool.map(one, range(500)))
        assert set(outcomes) <= {"200", "hung up"}, {o: outcomes.count(o) for o in set(outcomes)}
        assert outcomes.count("200") >= 300
        assert outcomes.count("hung up") >= 10
        audit(c)
