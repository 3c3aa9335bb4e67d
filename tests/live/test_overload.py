"""More than a cluster can take: who makes way for whom, what refusals say, and that nothing of it stays behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from moonpool.bench.cluster import RunningCluster, running_cluster
from moonpool.bench.open_loop import Answer, Asked, Client, prompt_of
from tests.live.kit import (
    HANG,
    audit,
    complete,
    counters,
    eventually,
    random_prompt,
    wait_at_rest,
)

QUEUE_BOUND = 3
CLASSES = "[{name: high, rank: 0}, {name: low, rank: 10}]"
LONG, SHORT = 6000, 300
"""Tokens of prompts: the timed engine computes the long one for some seventeen seconds, all others wait behind it."""
COUNTERS_SECONDS = 2.5
"""They travel once a second."""

pytestmark = pytest.mark.live


@pytest.fixture(scope="module")
def cluster(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    classes = tmp_path_factory.mktemp("classes") / "classes.yaml"
    classes.write_text(CLASSES)
    options = ("--engine", "timed", "--queue-bound", str(QUEUE_BOUND), "--classes", str(classes))
    with running_cluster(*options) as c:
        yield c
        audit(c)


class Waiting:
    """A client that has sent a request and reads nothing."""

    def __init__(self, cluster: RunningCluster, prompt: list[int], priority: str) -> None:
        body = json.dumps({"model": "smollm2", "prompt": prompt, "max_tokens": 4, "priority": priority}).encode()
        host, _, port = cluster.url.removeprefix("http://").partition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=HANG)
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        self._socket.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)

    def response(self) -> str:
        """What has come of it when the first bytes have."""
        return self._socket.recv(1 << 16).decode()

    def __enter__(self) -> Waiting:
        return self

    def __exit__(self, *_: object) -> None:
        """It leaves."""
        self._socket.close()


def queued(cluster: RunningCluster) -> int:
    requests: dict[str, int] = cluster.describe()["requests"]  # type: ignore[assignment]
    return requests["prefill"]


def of_class(cluster: RunningCluster, name: str) -> dict[str, int]:
    decisions: dict[str, Any] = cluster.describe()["decisions"]  # type: ignore[assignment]
    found: dict[str, int] = decisions["classes"].get(name, {})
    return found


@contextlib.contextmanager
def full_queue(cluster: RunningCluster) -> Iterator[list[Waiting]]:
    """In order of arrival."""
    with contextlib.ExitStack() as clients:
        waiting = []
        for n in range(QUEUE_BOUND):
            prompt = random_prompt(SHORT if n else LONG, seed=100 + n)
            waiting.append(clients.enter_context(Waiting(cluster, prompt, "low")))
            eventually(lambda: queued(cluster) == len(waiting), "it is in the queue")
        yield waiting


def test_queued_work_of_a_later_class_makes_way(cluster: RunningCluster) -> None:
    with full_queue(cluster) as waiting:
        _high_comes(cluster, waiting)
    assert not any(wait_at_rest(cluster).values())


def _high_comes(cluster: RunningCluster, waiting: list[Waiting]) -> None:

    body = {"model": "smollm2", "prompt": random_prompt(20, seed=3), "max_tokens": 4, "priority": "low"}
    refused = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=HANG)
    assert refused.status_code == 429
    assert refused.headers["x-moonpool-reason"] == "queue-full"
    assert int(refused.headers["retry-after"]) >= 1

    served = complete(cluster, random_prompt(20, seed=4), 4, ignore_eos=True, priority="high")
    assert served["usage"]["completion_tokens"] == 4
    displaced = waiting[-1].response()
    assert displaced.startswith("HTTP/1.1 429")
    assert "x-moonpool-reason: displaced" in displaced
    assert "retry-after: " in displaced
    assert "class high" in displaced, "it says who it made way for"
    assert of_class(cluster, "low")["displaced"] == 1
    assert of_class(cluster, "high")["finished"] == 1
    assert not of_class(cluster, "high")["rejected"]


def test_clients_that_leave_the_queue_leave_nothing_behind(cluster: RunningCluster) -> None:
    with full_queue(cluster), contextlib.ExitStack() as others:
        for n in range(20):
            others.enter_context(Waiting(cluster, random_prompt(SHORT, seed=200 + n), "low"))
    assert not any(wait_at_rest(cluster).values())
    state: dict[str, Any] = cluster.describe()
    assert state["gateway"]["seats_taken"] == state["gateway"]["running"] == state["gateway"]["waiting"] == 0
    assert complete(cluster, random_prompt(20, seed=5), 4, ignore_eos=True)["usage"]["completion_tokens"] == 4


def test_hundreds_at_once_are_served_or_told_when_to_come_again(cluster: RunningCluster) -> None:
    rng = random.Random(0)
    # Beyond the gateway's own bound as well.
    requests = [Asked(0.0, 0, prompt_of(20, rng), 4) for _ in range(600)]
    answers = asyncio.run(Client(cluster.url, "smollm2").offer(requests))
    served = [answer for answer in answers if answer.status == 200]
    assert served
    assert all(answer.completed and len(answer.intervals) == 3 for answer in served)
    refused = [answer for answer in answers if answer.status != 200]
    assert refused
    assert all(_is_sane(answer) for answer in refused), [a for a in refused if not _is_sane(a)][:3]


def _is_sane(refusal: Answer) -> bool:
    advice = refusal.retry_after
    return refusal.status == 429 and refusal.reason == "queue-full" and advice is not None and 1 <= advice <= 600


def test_prompts_that_share_a_step_share_its_time(cluster: RunningCluster) -> None:
    assert not any(wait_at_rest(cluster).values())
    before = spent(cluster)
    label = "shares-a-step"

    def ask(n: int) -> None:
        body = {"model": "smollm2", "prompt": random_prompt(30 + n, seed=20 + n), "max_tokens": 1}
        httpx.post(f"{cluster.url}/v1/completions", json=body, headers={"x-request-id": label}, timeout=HANG)

    with ThreadPoolExecutor(8) as pool:
        # As many as the queue takes: the others of them wait for the first, and then share a step.
        list(pool.map(ask, range(8)))
    stories = json.loads(cluster.get(f"/cluster/requests/{label}"))
    told = [m["facts"]["compute_seconds"] for s in stories for m in s["moments"] if m["what"] == "prefill done"]
    assert len(told) >= QUEUE_BOUND
    eventually(lambda: spent(cluster) > before, "the worker tells of its steps")
    time.sleep(COUNTERS_SECONDS)
    assert spent(cluster) - before == pytest.approx(sum(told)), "what prompts took adds up to what steps took"


def spent(cluster: RunningCluster) -> float:
    """Seconds that prefill steps have taken."""
    return counters(cluster)["prefill-0"]["step_seconds"]
