"""A cluster whose Conductor is a process of its own, under the supervisor of `moonpool serve`: each part may be killed.

As a program it is that supervisor: `python supervised.py CONFIGURATION-FILE NODES`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from msgspec import structs

from moonpool.bench.cluster import RunningCluster, free_port
from moonpool.command.serve import plan_parts
from moonpool.config import Config, FleetConfig
from moonpool.core.vocabulary import PartId
from moonpool.live.process import log_to_stderr
from moonpool.live.rundir import create_run_directory
from moonpool.live.supervisor import PartPlan, Supervisor

CONDUCTOR = PartId("conductor")


@contextlib.contextmanager
def supervised_cluster(folder: Path, nodes: int, config: dict[str, object]) -> Iterator[RunningCluster]:
    """On each of so many nodes one prefill and one decode worker. `config`: keys of the configuration file.

    The log stays in `folder`.
    """
    port = free_port()
    file, log = folder / "cluster.yaml", folder / "cluster.log"
    file.write_text(json.dumps(config | {"port": port}))
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-P", __file__, str(file), str(nodes)],
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )
    cluster = RunningCluster(process, f"http://127.0.0.1:{port}", log)
    try:
        cluster.wait_ready()
        yield cluster
    finally:
        cluster.stop()


def plans(file: Path, nodes: int, run_dir: Path) -> list[PartPlan]:
    fleet = FleetConfig(prefill=nodes, decode=nodes, nodes=nodes)
    front, *others = plan_parts(Config(fleet=fleet), file, run_dir)
    conductor = PartPlan(CONDUCTOR, ("conductor", "--id", CONDUCTOR, "--config", str(file)), conducts=True)
    return [conductor, structs.replace(front, after=(CONDUCTOR,), conducts=False), *others]


async def supervise(file: Path, nodes: int) -> None:
    directory = create_run_directory()
    try:
        supervisor = Supervisor(
            plans(file, nodes, directory.path),
            secrets.token_urlsafe(32),
            [directory.lock_fd],
            lambda progress: print(progress, flush=True),
        )
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, supervisor.stop)
        await supervisor.run()
    finally:
        directory.remove()


if __name__ == "__main__":
    log_to_stderr("supervisor", "info", False)
    asyncio.run(supervise(Path(sys.argv[1]), int(sys.argv[2])))
