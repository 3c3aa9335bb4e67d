"""Real vLLM servers with the connector, one node, the gateway before them: `make test-vllm`.

They compute greedily in float32, so that whoever serves a prompt gives the same tokens. What is expected is computed by
one of them under a salt of its own: from nothing, without the pool.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from moonpool.bench.cluster import RunningCluster, free_port
from moonpool.bench.peer import Peer
from moonpool.bench.vllm_server import EXTERNAL_HITS, metric
from moonpool.bench.vllm_stand import Stand, parts, until
from moonpool.store.client import NodeClient

from ..kit import Stream, cached_tokens, complete, counters, output_ids, random_prompt, shown_blocks
from ..kv_events.example import example
from ..kv_events.kit import quiet_port
from .relay import Relay

pytestmark = [
    pytest.mark.live,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not os.environ.get("MOONPOOL_VLLM"), reason="vLLM's start takes a minute: make test-vllm"),
]

SIZE = 128
"""vLLM's blocks on CPU."""
SECONDS = 120.0
SALTS = itertools.count()
RUNNING = "vllm:num_requests_running"
FAULTS = "vllm:moonpool_faults_total"


@pytest.fixture(scope="module")
def ports() -> tuple[int, int]:
    """Of the Conductor's KV events, and of replays."""
    return quiet_port(), quiet_port()


@pytest.fixture(scope="module")
def stand(smollm2: Path, vllm: Peer, ports: tuple[int, int]) -> Iterator[Stand]:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mp-")))
        run_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mp-")))
        events = ("--kv-events-port", str(ports[0]), "--kv-events-replay-port", str(ports[1]))
        yield Stand(folder, run_dir, smollm2, vllm, stack, conductor=events)


@pytest.fixture(autouse=True)
def nothing_is_left(stand: Stand) -> Iterator[None]:
    """Nothing of the pool is held after a test, and the servers that it has not killed are well."""
    yield
    with NodeClient.connect(str(stand.node_socket), name="test", incarnation="0") as client:
        until(lambda: not held(client), "nothing is held")
        client.audit().result(SECONDS)
    for server in stand.servers:
        if (ended := server.process.poll()) is not None:
            assert ended == -9, server.log.read_text()[-4000:]
            continue
        assert server.metric(FAULTS) == 0
        computed(server.url, [1000], 1)


def held(client: NodeClient) -> float:
    """Leases and rooms."""
    stats = client.stats().result(SECONDS)
    return stats["leases"] + stats["rooms"]


@pytest.mark.core
def test_what_one_server_has_is_a_hit_there_and_from_the_pool_elsewhere(stand: Stand) -> None:
    """Also what others sent to it: its KV events tell. And a prefill server's blocks reach decode through the pool."""
    prompt = random_prompt(3 * SIZE + 40, 1)
    with stand.gateway("both", "both") as gateway:
        until(lambda: is_followed(gateway), "KV events are followed")
        # Past the gateway, to one of them.
        reference = ask(stand.urls[1], prompt, 8)
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
        assert output_ids(second) == computed(stand.urls[0], turn, 4)


def test_a_second_turn_is_a_hit_wherever_it_lands(stand: Stand) -> None:
    """Behind gateways that have just started, and know what nodes and servers tell them."""
    first = random_prompt(2 * SIZE + 50, 11)
    with stand.gateway("both") as gateway:
        answer = complete(gateway, first, 90, ignore_eos=True)
    turn = [*first, *output_ids(answer), *random_prompt(30, 12)]
    reference = computed(stand.urls[0], turn, 8)
    for roles, loaded in (((None, "both"), 3 * SIZE), (("both",), 0)):
        with stand.gateway(*roles) as gateway:
            server = stand.urls[len(roles) - 1]
            before = metric(server, EXTERNAL_HITS)
            second = complete(gateway, turn, 8, ignore_eos=True)
            assert metric(server, EXTERNAL_HITS) - before == loaded
            assert cached_tokens(second) == 3 * SIZE, "of the prompt and of its answer"
            assert output_ids(second) == reference


def test_whoever_follows_the_pool_s_events_has_the_blocks_that_the_cluster_shows(
    stand: Stand, ports: tuple[int, int], tmp_path: Path
) -> None:
    addresses = [f"tcp://127.0.0.1:{port}" for port in ports]
    with example(tmp_path, *addresses) as follower, stand.gateway("both") as gateway:
        before = in_pool(gateway)
        complete(gateway, random_prompt(4 * SIZE + 5, 14), 2, ignore_eos=True)
        until(lambda: len(in_pool(gateway) - before) == 4, "its blocks are shown")
        until(lambda: follower.blocks() == in_pool(gateway), "they are all told")


def test_a_stream_of_events_that_was_cut_is_caught_up_with(stand: Stand) -> None:
    prompts = (random_prompt(3 * SIZE + 40, seed) for seed in itertools.count(100))
    with tempfile.TemporaryDirectory(prefix="mp-") as folder:
        relay = Relay(Path(folder) / "cut", stand.events(1))
        with stand.gateway("both", "both", events={1: relay.address}) as gateway:

            def known() -> int:
                return blocks(gateway, "vllm-1.cache")

            def comes_to(count: int) -> bool:
                """So many blocks are known of, after one more prompt: a gap is seen by what comes after it."""
                ask(stand.urls[1], next(prompts), 1)
                end = time.monotonic() + 3.0
                while known() != count and time.monotonic() < end:
                    time.sleep(0.1)
                return known() == count

            until(lambda: comes_to(known() + 3), "its events come through")
            before = known()
            relay.cut()
            prompt = next(prompts)
            ask(stand.urls[1], prompt, 1)
            answer = complete(gateway, prompt, 8, ignore_eos=True)
            assert output_ids(answer) == computed(stand.urls[0], prompt, 8)
            assert known() == before
            relay.mend()
            counts = itertools.count(before + 3 + 3, 3)
            until(lambda: comes_to(next(counts)), "it asks for what it has missed")
            assert counters(gateway)["vllm-1.cache"]["kv_event_gaps"] == 0
        relay.cut()


def test_a_gateway_that_is_killed_in_a_stream_leaves_nothing_running(stand: Stand) -> None:
    prompt, port = random_prompt(2 * SIZE + 20, 16), free_port()
    reference = computed(stand.urls[0], prompt, 12)
    body = {"model": "smollm2", "prompt": prompt, "max_tokens": 1000, "ignore_eos": True, "stream": True}
    with stand.gateway("prefill", "decode", port=port) as gateway:

        def read() -> None:
            url, came = f"{gateway.url}/v1/completions", 0
            with httpx.stream("POST", url, json=body, timeout=SECONDS) as response:
                for line in response.iter_lines():
                    came += line.startswith("data: {")
                    if came == 3:
                        gateway.process.kill()

        with pytest.raises(httpx.TransportError):
            read()
    until(lambda: not sum(metric(server, RUNNING) for server in stand.urls), "vLLM has dropped it")
    with stand.gateway("prefill", "decode", port=port) as gateway:
        again = complete(gateway, prompt, 12, ignore_eos=True)
        assert (output_ids(again), cached_tokens(again)) == (reference, 2 * SIZE)


def test_a_server_that_is_killed_costs_no_answer(stand: Stand) -> None:
    """Prefill in the midst of a prompt, decode in the midst of a stream. The last one here: one is dead after it."""
    stand.add()
    prompt = random_prompt(10 * SIZE + 30, 21)
    with (
        stand.gateway("prefill", "decode", "both") as gateway,
        NodeClient.connect(str(stand.node_socket), name="test", incarnation="0") as client,
    ):
        stream = Stream(gateway, prompt, 6)
        until(lambda: client.stats().result(SECONDS)["rooms"] > 0, "it is being computed and stored")
        kill(stand, 0)
        assert (stream.result(), stream.error) == (computed(stand.urls[1], prompt, 6), None)
        until(lambda: not is_there(gateway, "vllm-0"), "it is out")
        stand.restart(0)
        until(lambda: is_there(gateway, "vllm-0"), "it is in again")
        # With what it had in the pool before.
        before = metric(stand.urls[0], EXTERNAL_HITS)
        ask(stand.urls[0], prompt, 1)
        assert metric(stand.urls[0], EXTERNAL_HITS) - before == 10 * SIZE

        prompt = random_prompt(2 * SIZE + 30, 22)
        reference = computed(stand.urls[0], prompt, 80)
        stream = Stream(gateway, prompt, 80)
        until(lambda: len(stream.ids) >= 5, "it streams")
        assert next(part["assigned"] for part in parts(gateway) if part["id"] == "vllm-1")
        kill(stand, 1)
        assert (stream.result(), stream.error) == (reference, None)
        until(lambda: not is_there(gateway, "vllm-1"), "it is out")
    assert stand.log("conductor").count("placed again") >= 2


def kill(stand: Stand, at: int) -> None:
    """Its engine's process as well, as where a machine dies: it would outlive the server for ever."""
    process = stand.servers[at].process
    engines = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait(SECONDS)
    for engine in engines:
        with contextlib.suppress(psutil.NoSuchProcess):
            engine.kill()


def is_there(gateway: RunningCluster, part: str) -> bool:
    return part in {each["id"] for each in parts(gateway)}


def blocks(gateway: RunningCluster, node: str) -> int:
    return next((part["blocks"]["dram"] for part in parts(gateway) if part["id"] == node), -1)


def in_pool(gateway: RunningCluster) -> set[tuple[str, int]]:
    """As (medium, hash); what vLLM's own caches have beside is theirs to tell."""
    return {("CPU", block["hash"]) for block in shown_blocks(gateway) if "node-0" in block["dram"]}


def is_followed(gateway: RunningCluster) -> bool:
    known = counters(gateway)
    return all(known.get(f"vllm-{at}.cache", {}).get("follows_kv_events") for at in range(2))


def computed(url: str, prompt: list[int], tokens: int) -> list[int]:
    """By a server that has nothing of it and loads nothing of it."""
    return ask(url, prompt, tokens, cache_salt=f"computed {next(SALTS)}")


def ask(url: str, prompt: list[int], tokens: int, **fields: object) -> list[int]:
    """A server itself."""
    body = {"model": "smollm2", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    data = json.dumps({**body, "return_token_ids": True, **fields}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=SECONDS) as response:
        ids: list[int] = json.load(response)["choices"][0]["token_ids"]
    return ids
