from __future__ import annotations

import contextlib
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from moonpool.core.vocabulary import NodePeer
from moonpool.store import Client
from moonpool.store.client import NodeClient

from .kit import SECONDS, Conductor, DecidingConductor

C = TypeVar("C", bound=Conductor)


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """Short (pytest's own folders are too long for a Unix socket), and empty again when all is over."""
    with tempfile.TemporaryDirectory(prefix="mp-") as folder:
        yield Path(folder)


@pytest.fixture
def conductor(run_dir: Path) -> Iterator[Conductor]:
    with clean(Conductor(run_dir)) as conductor:
        yield conductor


@pytest.fixture
def deciding(run_dir: Path) -> Iterator[DecidingConductor]:
    with clean(DecidingConductor(run_dir)) as conductor:
        yield conductor


@contextlib.contextmanager
def clean(conductor: C) -> Iterator[C]:
    """Nothing is left of it afterwards, and the books of its nodes are right."""
    run_dir, before = conductor.run_dir, conductor.before
    try:
        yield conductor
        for node in conductor.nodes.values():
            try:
                auditor = NodeClient.connect(node.socket_path, name="auditor", incarnation="0", timeout=0)
            except Exception:
                continue
            with auditor:
                auditor.audit().result(SECONDS)
    finally:
        conductor.close()
    until = time.monotonic() + SECONDS
    while (left := set(threading.enumerate()) - before) and time.monotonic() < until:
        time.sleep(0.01)
    assert not left, "threads are left"
    left_files = [path.name for path in run_dir.iterdir() if not path.name.startswith("dead-")]
    assert not left_files, "files are left in the run directory"


@pytest.fixture
def node(conductor: Conductor) -> NodePeer:
    return conductor.start_node("node-0")


@pytest.fixture
def join(conductor: Conductor) -> Iterator[Callable[..., NodeClient]]:
    """Connect clients that are closed at the end of the test."""
    clients: list[NodeClient] = []

    def connect(node: NodePeer, name: str = "client") -> NodeClient:
        client = NodeClient.connect(node.socket_path, name=name, incarnation=f"{len(clients)}")
        clients.append(client)
        return client

    yield connect
    for client in clients:
        client.close()


@pytest.fixture
def connect() -> Iterator[Callable[..., Client]]:
    """Clients of the pool, `near` or `far`, that are closed at the end of the test."""
    clients: list[Client] = []

    def connect(node: NodePeer, way: str, **options: Any) -> Client:
        address = node.socket_path if way == "near" else node.data_address
        clients.append(Client.connect(address, **{"timeout": SECONDS, **options}))
        return clients[-1]

    yield connect
    for client in clients:
        client.close()
