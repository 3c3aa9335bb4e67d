"""`moonpool serve`: look before starting, then a supervisor, then tell the user how to talk to the cluster."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import yaml

from moonpool.command import machine
from moonpool.command.screen import Screen, reachable
from moonpool.config import Config, as_flat
from moonpool.core.vocabulary import PartId
from moonpool.engine.model import PULLABLE
from moonpool.errors import ConfigError, ModelError
from moonpool.gateway.keys.file import check_keys
from moonpool.live.process import log_to_stderr
from moonpool.live.rundir import RunDirectory, create_run_directory
from moonpool.live.supervisor import PartPlan, Supervisor

CHECK_SECONDS = 120.0
READY_POLL_SECONDS = 0.2
READY_CALL_SECONDS = 2.0
NOT_YOURS = {"id", "node", "conductor", "run-dir", "control-port", "stage", "leader"}
"""Keys that each part gets by itself."""


def serve(config: Config, token: str | None, find_model: Callable[[Config], Path]) -> int:
    """Run a whole cluster on this machine until it is told to stop; the exit status.

    `find_model` gives the model's directory, perhaps after a download. Raises before anything has started.
    """
    log_to_stderr("supervisor", config.log.log_level, config.log.log_json)
    machine.check_packages()
    check_keys(config.front.keys, config.front.host)
    port = free_port(config.front.host, config.front.port)
    config = msgspec.structs.replace(config, front=msgspec.structs.replace(config.front, port=port))
    check_pipeline(config)
    model = find_model(config)
    is_checked = config.model.model in PULLABLE and config.model.quantize == "none"
    if config.model.engine == "torch" and not is_checked:
        check_model(model, config.model.dtype, config.model.quantize)
    machine.check_memory(config, model if config.model.engine == "torch" else None)
    machine.check_ssd(config)
    named = msgspec.structs.replace(config.model, model=str(model), served_model_name=config.served_name)
    config = msgspec.structs.replace(config, model=named)
    directory = create_run_directory()
    try:
        plans = plan_parts(config, _write_config(config, directory), directory.path)
        return asyncio.run(_supervise(config, plans, token or secrets.token_urlsafe(32), directory))
    finally:
        directory.remove()


def plan_parts(config: Config, file: Path, run_dir: Path) -> list[PartPlan]:
    """The front first, then the nodes, then the workers, spread over the nodes; a pipeline's stages share one."""
    shared = ("--config", str(file))
    front = PartId("gateway-0")
    nodes = [PartId(f"node-{i}") for i in range(config.fleet.nodes)]
    plans = [PartPlan(front, ("gateway", "--id", front, *shared), conducts=True)]
    plans += [PartPlan(n, ("node", "--id", n, "--run-dir", str(run_dir), *shared), after=(front,)) for n in nodes]
    fleet = config.fleet
    stages = config.batch.pipeline
    kinds = ["coupled"] * fleet.coupled or ["prefill"] * (fleet.prefill // stages) + ["decode"] * fleet.decode
    kinds += ["coupled"] * fleet.inline
    counts = dict.fromkeys(kinds, 0)
    for kind in kinds:
        # Prefill workers fill the nodes from the first on, decode workers from the last: with two nodes KV crosses.
        index = counts[kind]
        node = nodes[-1 - index % len(nodes)] if kind == "decode" else nodes[index % len(nodes)]
        worker = PartId(f"{kind}-{index}")
        arguments = (kind, "--id", worker, "--node", node, *shared)
        plans.append(PartPlan(worker, arguments, after=(front, node), ends_with=node))
        for stage in range(1, stages if kind == "prefill" else 1):
            id_ = PartId(f"{worker}.{stage}")
            own = ("prefill", "--id", id_, "--node", node, "--stage", str(stage), "--leader", worker, *shared)
            plans.append(PartPlan(id_, own, after=(front, node), ends_with=node))
        counts[kind] += 1
    return plans


def check_pipeline(config: Config) -> None:
    """Raises ConfigError where the prefill workers do not make whole pipelines."""
    workers, stages = config.fleet.prefill, config.batch.pipeline
    if workers % stages and not config.fleet.coupled:
        raise ConfigError(
            f"--prefill {workers} workers do not make pipelines of --pipeline {stages}: "
            f"take a multiple of {stages}, such as --prefill {max(stages, workers // stages * stages)}"
        )


def check_model(model: Path, dtype: str, quantize: str) -> None:
    """Raises ModelError for a kind of model that the engine does not compute. In its own process: torch is large."""
    command = [sys.executable, "-P", "-m", "moonpool", "check-model", str(model)]
    command += ["--dtype", dtype, "--quantize", quantize]
    try:
        checked = subprocess.run(command, capture_output=True, text=True, timeout=CHECK_SECONDS)
    except subprocess.TimeoutExpired:
        raise ModelError(f"{model} was not read within {CHECK_SECONDS:g} s: is its disk slow?") from None
    if checked.returncode:
        lines = checked.stderr.strip().splitlines() or [f"reading it ended with {checked.returncode}"]
        raise ModelError(lines[-1].removeprefix("moonpool: "))


def free_port(host: str, port: int) -> int:
    """`port`, or any free one for 0. Raises ConfigError where nothing can listen there."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
            0
        ]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
            return int(probe.getsockname()[1])
    except socket.gaierror as e:
        raise ConfigError(f"--host {host}: {e.strerror}") from None
    except OSError as e:
        if e.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} on {host} is taken: stop what listens there, or choose another with --port"
            ) from None
        raise ConfigError(f"cannot listen on {host}:{port}: {e.strerror}") from None


def _write_config(config: Config, directory: RunDirectory) -> Path:
    """What the parts read; their own keys come as flags."""
    file = directory.path / "cluster.yaml"
    flat = {key: value for key, value in as_flat(config).items() if key not in NOT_YOURS}
    try:
        file.write_text(yaml.safe_dump(flat, sort_keys=False))
    except OSError as e:
        raise ConfigError(f"cannot write {file}: {e.strerror}") from None
    return file


async def _supervise(config: Config, plans: list[PartPlan], token: str, directory: RunDirectory) -> int:
    screen = Screen(config)
    supervisor = Supervisor(plans, token, [directory.lock_fd], screen.show)

    def stop() -> None:
        screen.stopping()
        supervisor.stop()

    loop = asyncio.get_running_loop()
    for sign in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(sign, stop)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as under nohup
        loop.add_signal_handler(signal.SIGHUP, stop)
    greeting = asyncio.create_task(_greet(supervisor, screen, config))
    try:
        await supervisor.run()
    finally:
        greeting.cancel()
    return 0


async def _greet(supervisor: Supervisor, screen: Screen, config: Config) -> None:
    await supervisor.all_up()
    while True:
        if await _is_ready(config.front.host, config.front.port):
            return screen.ready()
        await asyncio.sleep(READY_POLL_SECONDS)


async def _is_ready(host: str, port: int) -> bool:
    """Whether GET /ready answers 200."""
    with contextlib.suppress(OSError, TimeoutError, ValueError):
        async with asyncio.timeout(READY_CALL_SECONDS):
            reader, writer = await asyncio.open_connection(reachable(host), port)
            try:
                writer.write(
                    f"GET /ready HTTP/1.1\r\nHost: {reachable(host)}:{port}\r\nConnection: close\r\n\r\n".encode()
                )
                status = await reader.readline()
                return status.split()[1:2] == [b"200"]
            finally:
                writer.close()
    return False
