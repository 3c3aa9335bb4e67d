"""A cluster of parts that were started one by one, without a supervisor: the test starts, kills and reports them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from moonpool.bench.cluster import RunningCluster, free_port
from moonpool.core.events import Lost
from moonpool.core.vocabulary import Incarnation, PartId, Peer
from moonpool.wire.link import Link

END_SECONDS = 20.0


class Parts(RunningCluster):
    """The processes by part id. The Conductor keeps its address over its lives."""

    def __init__(self, folder: Path, config: dict[str, object]) -> None:
        self._config = folder / "cluster.yaml"
        self._config.write_text(json.dumps(config))
        self._out = (folder / "parts.log").open("ab")
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self._address = f"127.0.0.1:{free_port()}"
        self.start("conductor", "conductor", "--control-port", self._address.rpartition(":")[2])
        port = free_port()
        gateway = self.start("gateway", "gateway-0", "--conductor", self._address, "--port", str(port))
        super().__init__(gateway, f"http://127.0.0.1:{port}", folder / "parts.log")

    def start(self, kind: str, part: str, *own: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", "-m", "moonpool", kind, "--id", part, "--config", str(self._config), *own]
        process = subprocess.Popen(command, stdout=self._out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        self.running[part] = process
        return process

    def start_conductor(self) -> None:
        self.start("conductor", "conductor", "--control-port", self._address.rpartition(":")[2])

    def start_node(self, part: str) -> None:
        self.start("node", part, "--conductor", self._address)

    def start_worker(self, kind: str, part: str, node: str) -> None:
        self.start(kind, part, "--conductor", self._address, "--node", node)

    def kill(self, part: str) -> None:
        """`kill -9`."""
        process = self.running.pop(part)
        process.send_signal(signal.SIGKILL)
        process.wait(END_SECONDS)

    def report_lost(self, part: str) -> None:
        """What a supervisor does for its children."""
        incarnation = re.findall(rf"{part} registered \((\w+)\)", self.log())[-1]

        async def tell() -> None:
            link = Link(PartId("supervisor"), "127.0.0.1", 0, None)
            try:
                lost = Lost(PartId(part), Incarnation(incarnation), "killed")
                await link.send(Peer(PartId("conductor"), Incarnation(""), f"tcp://{self._address}"), lost)
                await asyncio.sleep(0.2)  # the link's end takes along what it has not sent yet
            finally:
                link.close()

        asyncio.run(tell())

    def end(self) -> None:
        for process in self.running.values():
            process.send_signal(signal.SIGINT)
        for process in self.running.values():
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._out.close()


@contextlib.contextmanager
def separate_parts(config: dict[str, object]) -> Iterator[Parts]:
    """A Conductor and a gateway; the rest is the test's to start. `config`: keys of the configuration file."""
    with tempfile.TemporaryDirectory(prefix="moonpool-parts-") as folder:
        parts = Parts(Path(folder), config)
        try:
            yield parts
        finally:
            parts.end()
