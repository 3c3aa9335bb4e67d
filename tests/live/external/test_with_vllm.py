"""Two real vLLM servers with the connector, one node, the gateway before them: `make test-vllm`.

They compute greedily in float32, so that whoever serves a prompt gives the same tokens.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from moonpool.bench import vllm_cpu
from moonpool.bench.cluster import RunningCluster, free_port
from moonpool.bench.peer import Peer, PeerMissingError

from ..kit import Stream, cached_tokens, complete, output_ids, random_prompt

pytestmark = [
    pytest.mark.live,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not os.environ.get("MOONPOOL_VLLM"), reason="vLLM's start takes a minute: make test-vllm"),
]

SIZE = 128
"""vLLM's blocks on CPU."""
START_SECONDS = 500.0
SECONDS = 120.0


class Stand:
    """The servers `vllm-0` and `vllm-1`, and a node; gateways come and go before them."""

    def __init__(self, folder: Path, run_dir: Path, model: Path, peer: Peer, stack: contextlib.ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self._model = model
        self._control = free_port()
        self._run("conductor", "conductor", "--control-port", str(self._control), "--journal", "off")
        joined = ("--conductor", self.conductor)
        self._run("node", "node", *joined, "--id", "node-0", "--run-dir", str(run_dir), "--dram-per-node", "1GiB")
        self.urls: list[str] = []
        self.servers: list[subprocess.Popen[bytes]] = []
        self.events: list[str] = []
        package = folder / "package"
        package.mkdir()
        for name in vllm_cpu.CONNECTOR_NEEDS:
            (package / name).symlink_to(vllm_cpu.connector_needs(peer) / name)
        source = Path(vllm_cpu.__file__).parents[2]
        for at in range(2):
            self._start_server(at, peer, f"{source}:{package}", run_dir / "node-0.sock")
        for at, url in enumerate(self.urls):
            until(lambda url=url: _is_well(url), f"vllm-{at} is up", START_SECONDS, self.servers[at])

    @property
    def conductor(self) -> str:
        return f"127.0.0.1:{self._control}"

    def log(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text(errors="replace")

    @contextlib.contextmanager
    def gateway(self, *roles: str) -> Iterator[RunningCluster]:
        """The servers in these roles."""
        port = free_port()
        file = self._folder / f"{'-'.join(roles)}.yaml"
        served = [
            {"url": url, "role": role, "kv-events": events, "pool": True}
            for url, role, events in zip(self.urls, roles, self.events, strict=True)
        ]
        file.write_text(yaml.safe_dump({"model": "smollm2", "tokenizer": str(self._model), "instances": served}))
        process = self._start(
            "gateway", "gateway", "--conductor", self.conductor, "--instances", str(file), "--port", str(port)
        )
        gateway = RunningCluster(process, f"http://127.0.0.1:{port}", self._folder / "gateway.log")
        try:
            gateway.wait_ready()
            ids = {f"vllm-{at}" for at in range(len(roles))}
            until(lambda: ids <= {part["id"] for part in parts(gateway)}, "all instances are there")
            yield gateway
        finally:
            gateway.stop()

    def _run(self, name: str, *arguments: str) -> None:
        process = self._start(name, *arguments)
        self._stack.callback(_end, process)

    def _start(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        with (self._folder / f"{name}.log").open("ab") as out:
            return subprocess.Popen(
                [sys.executable, "-P", "-m", "moonpool", *arguments], stdout=out, stderr=out, stdin=subprocess.DEVNULL
            )

    def _start_server(self, at: int, peer: Peer, path: str, socket: Path) -> None:
        port, events = free_port(), f"ipc://{socket.parent}/{at}.kv"
        connector = {
            "kv_connector": "MoonpoolConnector",
            "kv_connector_module_path": "moonpool.connectors.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            # Patient, for a machine that does something else as well.
            "kv_connector_extra_config": {
                "node": str(socket),
                "lookup_seconds": 2.0,
                "load_seconds": 10.0,
                "save_seconds": 10.0,
            },
        }
        published = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": events}
        command = [
            *(str(peer.python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(self._model)),
            *("--served-model-name", "smollm2", "--dtype", "float32", "--enforce-eager", "--max-model-len", "2048"),
            *("--host", "127.0.0.1", "--port", str(port), "--enable-prompt-tokens-details"),
            *("--kv-transfer-config", json.dumps(connector), "--kv-events-config", json.dumps(published)),
        ]
        environment = {
            **vllm_cpu.environment(peer, 1),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": path,
        }
        with (self._folder / f"vllm-{at}.log").open("wb") as out:
            process = subprocess.Popen(
                command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, env=environment, cwd=self._folder
            )
        self._stack.callback(_end, process)
        self.servers.append(process)
        self.urls.append(f"http://127.0.0.1:{port}")
        self.events.append(events)


@pytest.fixture(scope="module")
def stand(smollm2: Path) -> Iterator[Stand]:
    try:
        peer = vllm_cpu.set_up(Console())
        vllm_cpu.connector_needs(peer)
    except PeerMissingError as e:
        pytest.skip(f"vLLM cannot be installed here: {e}")
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mp-")))
        run_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mp-")))
        yield Stand(folder, run_dir, smollm2, peer, stack)


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
        before = _metric(stand.urls[1], "vllm:external_prefix_cache_hits_total")
        first = complete(gateway, fresh, 6, ignore_eos=True)
        # What prefill computed, decode found: all of its whole blocks.
        assert _metric(stand.urls[1], "vllm:external_prefix_cache_hits_total") - before == 2 * SIZE
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


def parts(gateway: RunningCluster) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = gateway.describe()["parts"]  # type: ignore[assignment]
    return found


def blocks(gateway: RunningCluster, node: str) -> int:
    return next((part["blocks"]["dram"] for part in parts(gateway) if part["id"] == node), -1)


def until(is_so: Callable[[], bool], what: str, seconds: float = SECONDS, of: Any = None) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, f"never happened: {what}"
        assert of is None or of.poll() is None, f"its process has ended before: {what}"
        time.sleep(0.1)


def _followed(gateway: RunningCluster) -> bool:
    counters: dict[str, dict[str, float]] = gateway.describe()["counters"]  # type: ignore[assignment]
    return all(counters.get(f"vllm-{at}.cache", {}).get("follows_kv_events") for at in range(2))


def _is_well(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def _metric(url: str, name: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name + "{"))


def _ask_server(url: str, prompt: list[int], tokens: int) -> list[int]:
    body = {"model": "smollm2", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    data = json.dumps({**body, "return_token_ids": True}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=SECONDS) as response:
        ids: list[int] = json.load(response)["choices"][0]["token_ids"]
    return ids


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
