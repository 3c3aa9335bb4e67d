"""What live tests share: prompts, requests that return token ids, and waiting for a cluster to come to rest."""

from __future__ import annotations

import contextlib
import json
import random
import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import msgspec
import psutil

from moonpool.bench.cluster import RunningCluster
from moonpool.core.vocabulary import KeySpace
from moonpool.store.client import NodeClient

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


def node_client(cluster: RunningCluster, node: str) -> NodeClient:
    """A client of our own at one of the cluster's nodes; its socket is named in the log."""
    found = re.search(rf"node {node}: .* (/\S+\.sock),", cluster.log())
    assert found is not None, cluster.log()[-2000:]
    return NodeClient.connect(found[1], name="test", incarnation="test")


def pids(cluster: RunningCluster) -> dict[str, int]:
    """The processes of all parts that run: the supervisor's children that were started under these names."""
    found = {}
    for child in psutil.Process(cluster.process.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            words = child.cmdline()
            if "--id" in words:
                found[words[words.index("--id") + 1]] = child.pid
    return found


def pid_of(cluster: RunningCluster, part: str) -> int:
    found = pids(cluster)
    assert part in found, f"{part} does not run"
    return found[part]


def shown_blocks(cluster: RunningCluster) -> list[dict[str, Any]]:
    """All pages of /cluster/blocks."""
    found: list[dict[str, Any]] = []
    after: str | None = ""
    while after is not None:
        page = json.loads(cluster.get(f"/cluster/blocks?after={after}"))
        found += page["blocks"]
        after = page["next"]
    return found


def key_space_of(cluster: RunningCluster) -> KeySpace:
    parts: list[dict[str, Any]] = cluster.describe()["parts"]  # type: ignore[assignment]
    return next(msgspec.convert(p["space"], KeySpace) for p in parts if p["kind"] == "prefill")


def audit(cluster: RunningCluster) -> None:
    """Nothing is held anywhere, and the books of every process balance."""
    held = wait_at_rest(cluster)
    assert not any(held.values()), held
    assert total(cluster, "integrity_failures") == 0
    for part in counters(cluster):
        if part.startswith("node"):
            with node_client(cluster, part) as client:
                client.audit().result(HANG)


def part_state(cluster: RunningCluster, part: str) -> dict[str, Any]:
    """One part as the Conductor sees it; empty while it does not."""
    parts: list[dict[str, Any]] = cluster.describe()["parts"]  # type: ignore[assignment]
    return next((state for state in parts if state["id"] == part), {})


def eventually(condition: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + HANG
    while not condition():
        assert time.monotonic() < until, f"never happened: {what}"
        time.sleep(0.02)


IN_USE = ("pages_used", "jobs", "rooms", "leases")


def wait_at_rest(cluster: RunningCluster) -> dict[str, float]:
    """Until no part holds a page, a job, a room or a lease; returns what is still held after REST_SECONDS."""
    deadline = time.monotonic() + REST_SECONDS
    while True:
        held = {name: total(cluster, name) for name in IN_USE}
        if not any(held.values()) or time.monotonic() > deadline:
            return held
        time.sleep(0.2)


class Stream:
    """A completion stream read in the background."""

    def __init__(self, cluster: RunningCluster, prompt: list[int], tokens: int) -> None:
        self._url = cluster.url
        self._body = {
            "model": "smollm2",
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        self.ids: list[int] = []
        """Token ids so far."""
        self.error: str | None = None
        self.first = threading.Event()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        with httpx.stream("POST", f"{self._url}/v1/completions", json=self._body, timeout=HANG) as response:
            if response.status_code != 200:
                self.error = response.read().decode()
                self.first.set()
                return
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    self.error = str(event)
                for choice in event.get("choices", ()):
                    self.ids += choice.get("token_ids") or ()
                self.first.set()

    def result(self) -> list[int]:
        self._thread.join(HANG)
        assert not self._thread.is_alive()
        return self.ids
