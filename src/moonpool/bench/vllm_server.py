"""Real vLLM servers on this machine's CPUs: processes of vLLM's own environment, a thread each."""

from __future__ import annotations

import contextlib
import subprocess
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from moonpool.bench import vllm_cpu
from moonpool.bench.cluster import free_port
from moonpool.bench.peer import Peer
from moonpool.bench.process import running, wait_until

MODEL = "smollm2"
"""The name under which they serve it."""
VOCABULARY = 49_152
KV_BYTES_PER_TOKEN = 30 * 2 * 3 * 64 * 4
"""Of SmolLM2-135M in float32: layers, keys and values, heads, entries a head, bytes."""
CONTEXT_TOKENS = 2048
START_SECONDS = 500.0
"""A hang guard: vLLM starts in half a minute where nothing else runs."""
EXTERNAL_HITS = "vllm:external_prefix_cache_hits_total"
"""Tokens that came from a connector, as vLLM counts them."""


@dataclass(frozen=True, slots=True)
class VllmServer:
    url: str
    process: subprocess.Popen[str]
    log: Path

    def wait_well(self) -> None:
        """Raises MoonpoolError where it ends before it is, or takes START_SECONDS."""
        wait_until(partial(_is_well, self.url), self.process, self.log, START_SECONDS)

    def metric(self, name: str) -> float:
        return metric(self.url, name)


def start_server(
    log: Path,
    peer: Peer,
    model: Path,
    stack: contextlib.ExitStack,
    options: Sequence[str] = (),
    *,
    context_tokens: int = CONTEXT_TOKENS,
    python_path: str = "",
    port: int = 0,
) -> VllmServer:
    """Not yet well; it ends with `stack`. `python_path`: what else it can import; `port`: 0 is any."""
    port = port or free_port()
    command = [
        *(str(peer.python), "-P", "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
        *("--served-model-name", MODEL, "--dtype", "float32", "--enforce-eager"),
        *("--max-model-len", str(context_tokens), "--host", "127.0.0.1", "--port", str(port)),
        *("--enable-prompt-tokens-details", *options),
    ]
    environment = {
        **vllm_cpu.environment(peer, 1),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": python_path,
    }
    return VllmServer(f"http://127.0.0.1:{port}", stack.enter_context(running(command, log, environment)), log)


def metric(url: str, name: str) -> float:
    """Of a server's /metrics, over all labels; 0 where it has none of that name."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name + "{"))


def _is_well(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False
