"""Two real vLLM servers with the connector, one node, a Conductor, and gateways before them: on this machine's CPUs."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from moonpool.bench import vllm_cpu
from moonpool.bench.cluster import RunningCluster, free_port
from moonpool.bench.peer import Peer
from moonpool.bench.process import running
from moonpool.bench.vllm_server import CONTEXT_TOKENS, KV_BYTES_PER_TOKEN, MODEL, VllmServer, start_server
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
        conductor: Sequence[str] = (),
    ) -> None:
        """`folder`: for logs; `run_dir`: for sockets, a short path; `options`: of the servers, more of them;
        `conductor`: its flags, more of them.

        Raises MoonpoolError, PeerMissingError.
        """
        self.node_socket = run_dir / "node-0.sock"
        self._folder = folder
        self._run_dir = run_dir
        self._model = model
        self._control = free_port()
        for name, flags in (
            ("conductor", ("--control-port", str(self._control), "--journal", "off", *conductor)),
            ("node", (*self._joins, "--run-dir", str(run_dir), "--dram-per-node", dram)),
        ):
            stack.enter_context(running(_moonpool(name, *flags), folder / f"{name}.log"))
        path = vllm_cpu.connector_path(peer, folder)

        def start(at: int, log: str, port: int = 0) -> VllmServer:
            flags = *self._connected(at), *options
            where = folder / f"{log}.log", peer, model, stack, flags
            return start_server(*where, context_tokens=context_tokens, python_path=path, port=port)

        self._start = start
        self.servers = [start(at, f"vllm-{at}") for at in range(2)]
        for server in self.servers:
            server.wait_well()

    @property
    def urls(self) -> list[str]:
        return [server.url for server in self.servers]

    @property
    def _joins(self) -> tuple[str, ...]:
        return "--conductor", f"127.0.0.1:{self._control}"

    def log(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text(errors="replace")

    def add(self) -> None:
        """One more server. Raises MoonpoolError."""
        at = len(self.servers)
        self.servers.append(self._start(at, f"vllm-{at}"))
        self.servers[at].wait_well()

    def restart(self, at: int) -> None:
        """A server that has ended, at the same address. Raises MoonpoolError."""
        port = int(self.urls[at].rpartition(":")[2])
        self.servers[at] = self._start(at, f"vllm-{at}-again", port)
        self.servers[at].wait_well()

    def events(self, at: int) -> str:
        """Where a server publishes its KV events; replays are at the same address with an `r` after it."""
        return f"ipc://{self._run_dir}/{at}.kv"

    @contextlib.contextmanager
    def gateway(
        self,
        *roles: str | None,
        port: int = 0,
        events: Mapping[int, str] | None = None,
    ) -> Iterator[RunningCluster]:
        """The first servers in these roles, ready; None leaves one out. `events`: where else a server's are heard."""
        port = port or free_port()
        file = self._folder / f"{'-'.join(role or 'none' for role in roles)}.yaml"
        served = [
            {
                "id": f"vllm-{at}",
                "url": self.urls[at],
                "role": role,
                "kv-events": (events or {}).get(at, self.events(at)),
                "kv-events-replay": f"{self.events(at)}r",
                "pool": True,
            }
            for at, role in enumerate(roles)
            if role is not None
        ]
        of_model = {"model": MODEL, "tokenizer": str(self._model), "kv-bytes-per-token": KV_BYTES_PER_TOKEN}
        file.write_text(yaml.safe_dump({**of_model, "instances": served}))
        command = _moonpool("gateway", *self._joins, "--instances", str(file), "--port", str(port))
        log = self._folder / "gateway.log"
        with running(command, log) as process:
            url = f"http://127.0.0.1:{port}"
            gateway = RunningCluster(process, url, log)
            gateway.wait_ready()
            ids = {str(server["id"]) for server in served}
            until(lambda: ids <= {part["id"] for part in parts(gateway)}, "all instances are there")
            yield gateway

    def _connected(self, at: int) -> tuple[str, ...]:
        """A server's options: the connector on this host's node, and KV events."""
        connector = {
            "kv_connector": "MoonpoolConnector",
            "kv_connector_module_path": "moonpool.connectors.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            # Patient, for a machine that does something else as well.
            "kv_connector_extra_config": {
                "node": str(self.node_socket),
                "lookup_seconds": 2.0,
                "load_seconds": 10.0,
                "save_seconds": 10.0,
            },
        }
        published = {"endpoint": self.events(at), "replay_endpoint": f"{self.events(at)}r"}
        events = {"enable_kv_cache_events": True, "publisher": "zmq", **published}
        return "--kv-transfer-config", json.dumps(connector), "--kv-events-config", json.dumps(events)


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
