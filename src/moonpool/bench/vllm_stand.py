"""Two real vLLM servers with the connector, one node, a Conductor, and gateways before them: on this machine's CPUs."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from moonpool.bench import vllm_cpu
from moonpool.bench.cluster import RunningCluster, free_port
from moonpool.bench.peer import Peer
from moonpool.bench.process import running, wait_until
from moonpool.errors import MoonpoolError

START_SECONDS = 500.0
"""A hang guard: vLLM starts in half a minute where nothing else runs."""
SECONDS = 120.0


class Stand:
    """The servers `vllm-0` and `vllm-1`, up. All processes end with `stack`."""

    def __init__(self, folder: Path, run_dir: Path, model: Path, peer: Peer, stack: contextlib.ExitStack) -> None:
        """`folder`: for logs; `run_dir`: for sockets, a short path. Raises MoonpoolError, PeerMissingError."""
        self._folder = folder
        self._stack = stack
        self._model = model
        self._control = free_port()
        self._start("conductor", "conductor", "--control-port", str(self._control), "--journal", "off")
        self._start("node", "node", *self._joins, "--run-dir", str(run_dir), "--dram-per-node", "1GiB")
        self.urls: list[str] = []
        self.servers: list[subprocess.Popen[str]] = []
        self._events: list[str] = []
        package = folder / "package"
        package.mkdir()
        for name in vllm_cpu.CONNECTOR_NEEDS:
            (package / name).symlink_to(vllm_cpu.connector_needs(peer) / name)
        source = Path(vllm_cpu.__file__).parents[2]
        for at in range(2):
            self._start_server(at, peer, f"{source}:{package}", run_dir)
        for at, url in enumerate(self.urls):
            log = folder / f"vllm-{at}.log"
            wait_until(partial(_is_well, url), self.servers[at], log, START_SECONDS)

    @property
    def _joins(self) -> tuple[str, ...]:
        return "--conductor", f"127.0.0.1:{self._control}"

    def log(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text(errors="replace")

    @contextlib.contextmanager
    def gateway(self, *roles: str, port: int = 0) -> Iterator[RunningCluster]:
        """The servers in these roles, ready."""
        port = port or free_port()
        file = self._folder / f"{'-'.join(roles)}.yaml"
        served = [
            {"url": url, "role": role, "kv-events": events, "pool": True}
            for url, role, events in zip(self.urls, roles, self._events, strict=True)
        ]
        file.write_text(yaml.safe_dump({"model": "smollm2", "tokenizer": str(self._model), "instances": served}))
        command = _moonpool("gateway", *self._joins, "--instances", str(file), "--port", str(port))
        log = self._folder / "gateway.log"
        with running(command, log) as process:
            url = f"http://127.0.0.1:{port}"
            gateway = RunningCluster(process, url, log)
            gateway.wait_ready()
            ids = {f"vllm-{at}" for at in range(len(roles))}
            until(lambda: ids <= {part["id"] for part in parts(gateway)}, "all instances are there")
            yield gateway

    def _start(self, name: str, *arguments: str) -> None:
        self._stack.enter_context(running(_moonpool(*arguments), self._folder / f"{name}.log"))

    def _start_server(self, at: int, peer: Peer, path: str, run_dir: Path) -> None:
        port, events = free_port(), f"ipc://{run_dir}/{at}.kv"
        connector = {
            "kv_connector": "MoonpoolConnector",
            "kv_connector_module_path": "moonpool.connectors.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            # Patient, for a machine that does something else as well.
            "kv_connector_extra_config": {
                "node": str(run_dir / "node-0.sock"),
                "lookup_seconds": 2.0,
                "load_seconds": 10.0,
                "save_seconds": 10.0,
            },
        }
        published = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": events}
        command = [
            *(str(peer.python), "-P", "-m", "vllm.entrypoints.openai.api_server", "--model", str(self._model)),
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
        process = running(command, self._folder / f"vllm-{at}.log", environment)
        self.servers.append(self._stack.enter_context(process))
        self.urls.append(f"http://127.0.0.1:{port}")
        self._events.append(events)


def parts(gateway: RunningCluster) -> list[dict[str, Any]]:
    """Of /cluster."""
    found: list[dict[str, Any]] = gateway.describe()["parts"]  # type: ignore[assignment]
    return found


def until(is_so: Callable[[], bool], what: str) -> None:
    """Raises MoonpoolError where it is not so within SECONDS."""
    end = time.monotonic() + SECONDS
    while not is_so():
        if time.monotonic() > end:
            raise MoonpoolError(f"never happened: {what}")
        time.sleep(0.1)


def _moonpool(*arguments: str) -> list[str]:
    return [sys.executable, "-P", "-m", "moonpool", *arguments]


def _is_well(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False
