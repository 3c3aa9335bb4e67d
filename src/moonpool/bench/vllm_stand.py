"""Two real vLLM servers with the connector, one node, a Conductor, and gateways before them: on this machine's CPUs."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from moonpool.bench import vllm_cpu
from moonpool.bench.cluster import RunningCluster, free_port
from moonpool.bench.peer import Peer
from moonpool.bench.process import running
from moonpool.bench.vllm_server import CONTEXT_TOKENS, KV_BYTES_PER_TOKEN, MODEL, start_server
from moonpool.errors import MoonpoolError

SECONDS = 120.0


class Stand:
    """The servers `vllm-0` and `vllm-1`, up. All processes end with `stack`."""

    def __init__(
        self,
        folder: Path,
        run_dir: Path,
        model: Path,
        peer: Peer,
        stack: contextlib.ExitStack,
        *,
        context_tokens: int = CONTEXT_TOKENS,
        dram: str = "1GiB",
        options: Sequence[str] = (),
    ) -> None:
        """`folder`: for logs; `run_dir`: for sockets, a short path; `options`: of the servers, more of them.

        Raises MoonpoolError, PeerMissingError.
        """
        self._folder = folder
        self._model = model
        self._control = free_port()
        for name, flags in (
            ("conductor", ("--control-port", str(self._control), "--journal", "off")),
            ("node", (*self._joins, "--run-dir", str(run_dir), "--dram-per-node", dram)),
        ):
            stack.enter_context(running(_moonpool(name, *flags), folder / f"{name}.log"))
        path = vllm_cpu.connector_path(peer, folder)
        self._events = [f"ipc://{run_dir}/{at}.kv" for at in range(2)]
        servers = [
            start_server(
                *(folder / f"vllm-{at}.log", peer, model, stack, (*_connected(run_dir, events), *options)),
                context_tokens=context_tokens,
                python_path=path,
            )
            for at, events in enumerate(self._events)
        ]
        for server in servers:
            server.wait_well()
        self._servers = servers

    @property
    def urls(self) -> list[str]:
        return [server.url for server in self._servers]

    @property
    def servers(self) -> list[subprocess.Popen[str]]:
        return [server.process for server in self._servers]

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
        of_model = {"model": MODEL, "tokenizer": str(self._model), "kv-bytes-per-token": KV_BYTES_PER_TOKEN}
        file.write_text(yaml.safe_dump({**of_model, "instances": served}))
        command = _moonpool("gateway", *self._joins, "--instances", str(file), "--port", str(port))
        log = self._folder / "gateway.log"
        with running(command, log) as process:
            url = f"http://127.0.0.1:{port}"
            gateway = RunningCluster(process, url, log)
            gateway.wait_ready()
            ids = {f"vllm-{at}" for at in range(len(roles))}
            until(lambda: ids <= {part["id"] for part in parts(gateway)}, "all instances are there")
            yield gateway


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


def _connected(run_dir: Path, events: str) -> tuple[str, ...]:
    """A server's options: the connector on this host's node, and KV events."""
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
    return "--kv-transfer-config", json.dumps(connector), "--kv-events-config", json.dumps(published)


def _moonpool(*arguments: str) -> list[str]:
    return [sys.executable, "-P", "-m", "moonpool", *arguments]
