"""What live tests share: prompts, requests that return token ids, and waiting for a cluster to come to rest."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

import httpx

from moonpool.bench.cluster import RunningCluster

HANG = 300.0
BLOCK = 64
REST_SECONDS = 30.0


def random_prompt(tokens: int, seed: int, vocabulary: int = 40_000) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(100, vocabulary) for _ in range(tokens)]


def complete(cluster: RunningCluster, prompt: Sequence[int] | str, tokens: int, **fields: object) -> dict[str, Any]:
    """A greedy, unstreamed completion; asserts that it is served."""
    body = {
        "model": "smollm2",
        "prompt": prompt if isinstance(prompt, str) else list(prompt),
        "max_tokens": tokens,
        "temperature": 0,
        "return_token_ids": True,
        **fields,
    }
    response = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=HANG)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def output_ids(answer: dict[str, Any]) -> list[int]:
    ids: list[int] = answer["choices"][0]["token_ids"]
    return ids


def cached_tokens(answer: dict[str, Any]) -> int:
    cached: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


def counters(cluster: RunningCluster) -> dict[str, dict[str, float]]:
    """The latest counters of every part, by part id."""
    found: dict[str, dict[str, float]] = cluster.describe()["counters"]  # type: ignore[assignment]
    return found


def total(cluster: RunningCluster, name: str) -> float:
    """One counter summed over all parts that have it."""
    return sum(values.get(name, 0.0) for values in counters(cluster).values())


IN_USE = ("pages_used", "jobs", "rooms", "leases")


def wait_at_rest(cluster: RunningCluster) -> dict[str, float]:
    """Until no part holds a page, a job, a room or a lease; returns what is still held after REST_SECONDS."""
    deadline = time.monotonic() + REST_SECONDS
    while True:
        held = {name: total(cluster, name) for name in IN_USE}
        if not any(held.values()) or time.monotonic() > deadline:
            return held
        time.sleep(0.2)
