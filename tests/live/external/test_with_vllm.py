"""Two real vLLM servers with the connector, one node, the gateway before them: `make test-vllm`.

They compute greedily in float32, so that whoever serves a prompt gives the same tokens.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from moonpool.bench.cluster import RunningCluster
from moonpool.bench.peer import Peer
from moonpool.bench.vllm_server import EXTERNAL_HITS, metric
from moonpool.bench.vllm_stand import Stand, parts, until

from ..kit import Stream, cached_tokens, complete, output_ids, random_prompt

pytestmark = [
    pytest.mark.live,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not os.environ.get("MOONPOOL_VLLM"), reason="vLLM's start takes a minute: make test-vllm"),
]

SIZE = 128
"""vLLM's blocks on CPU."""
SECONDS = 120.0


@pytest.fixture(scope="module")
def stand(smollm2: Path, vllm: Peer) -> Iterator[Stand]:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mp-")))
        run_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mp-")))
        yield Stand(folder, run_dir, smollm2, vllm, stack)


@pytest.mark.core
def test_what_one_server_has_is_a_hit_there_and_from_the_pool_elsewhere(stand: Stand) -> None:
    """Also what others sent to it: its KV events tell. And a prefill server's blocks reach decode through the pool."""
    prompt = random_prompt(3 * SIZE + 40, 1)
    with stand.gateway("both", "both") as gateway:
        until(lambda: _followed(gateway), "KV events are followed")
        # Past the gateway, to one of them.
        reference = _ask_server(stand.urls[1], prompt, 8)
        until(lambda: blocks(gateway, "vllm-1.cache") >= 3, "its events tell of the blocks")
        assert blocks(gateway, "vllm-0.cache") == 0
        answer = complete(gateway, prompt, 8, ignore_eos=True)
        assert output_ids(answer) == reference
        assert cached_tokens(answer) == 3 * SIZE
        assert blocks(gateway, "vllm-0.cache") == 0
        state = {part["id"]: part for part in parts(gateway)}
        assert state["vllm-1.cache"]["index"] == "exact"
    with stand.gateway("prefill", "decode") as gateway:
        fresh = random_prompt(2 * SIZE + 60, 2)
        before = metric(stand.urls[1], EXTERNAL_HITS)
        first = complete(gateway, fresh, 6, ignore_eos=True)
        # What prefill computed, decode found: all of its whole blocks.
        assert metric(stand.urls[1], EXTERNAL_HITS) - before == 2 * SIZE
        assert cached_tokens(first) == 0
        turn = [*fresh, *output_ids(first), *random_prompt(40, 3)]
        second = complete(gateway, turn, 4, ignore_eos=True)
        assert cached_tokens(second) >= 2 * SIZE
        assert output_ids(second) == _ask_server(stand.urls[0], turn, 4)


def test_a_server_killed_in_a_stream_is_gone_on_from_elsewhere(stand: Stand) -> None:
    """The last one here: one server is dead after it."""
    prompt = random_prompt(2 * SIZE + 30, 5)
    reference = _ask_server(stand.urls[0], prompt, 40)
    with stand.gateway("both", "both") as gateway:
        streams = [Stream(gateway, prompt, 40)]
        until(lambda: len(streams[0].ids) >= 5, "it streams")
        running = {part["id"]: part.get("assigned", 0) for part in parts(gateway)}
        at = 0 if running["vllm-0"] else 1
        stand.servers[at].kill()
        assert streams[0].result() == reference
        assert streams[0].error is None
        until(lambda: f"vllm-{at}" not in {part["id"] for part in parts(gateway)}, "it is out")
        assert "placed again" in stand.log("conductor")


def blocks(gateway: RunningCluster, node: str) -> int:
    return next((part["blocks"]["dram"] for part in parts(gateway) if part["id"] == node), -1)


def _followed(gateway: RunningCluster) -> bool:
    counters: dict[str, dict[str, float]] = gateway.describe()["counters"]  # type: ignore[assignment]
    return all(counters.get(f"vllm-{at}.cache", {}).get("follows_kv_events") for at in range(2))


def _ask_server(url: str, prompt: list[int], tokens: int) -> list[int]:
    body = {"model": "smollm2", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    data = json.dumps({**body, "return_token_ids": True}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=SECONDS) as response:
        ids: list[int] = json.load(response)["choices"][0]["token_ids"]
    return ids
