"""Real processes that hold blocks for too long: which of them a node kills, and what it frees when.

This process stands in for the supervisor: it starts the node and the clients, and holds the pipe that its children
are given.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from moonpool.core.events import RoomConfirmed
from moonpool.core.vocabulary import NodePeer, RequestId
from moonpool.store.client import NodeClient
from moonpool.store.holder import Holder

from .kit import BLOCK, SECONDS, SPACE, ClientProcess, Conductor, eventually, keys_of, put

Join = Callable[..., NodeClient]
R = RequestId("r-1")
SHORT = {"lease_seconds": 0.6, "grace": 0.3}


@pytest.fixture
def life() -> Iterator[int]:
    """The read end of the supervisor's pipe."""
    read, write = os.pipe()
    yield read
    os.close(read)
    os.close(write)


@pytest.fixture
def supervised_node(conductor: Conductor, life: int) -> Iterator[NodePeer]:
    with conductor.process_node("node-0", life_fd=life, **SHORT) as (node, process):
        yield node
        with NodeClient.connect(node.socket_path, name="auditor", incarnation="0") as auditor:
            auditor.audit().result(SECONDS)
        process.send_signal(signal.SIGINT)
        process.wait(SECONDS)


def stats(client: NodeClient) -> dict[str, float]:
    return client.stats().result(SECONDS)


def was_killed(client: ClientProcess) -> bool:
    return client.process.wait(SECONDS) == -signal.SIGKILL


@pytest.mark.parametrize("role", ["reader", "cacher"])
def test_a_stopped_worker_is_killed_after_its_time_and_what_it_held_is_free(
    supervised_node: NodePeer, join: Join, life: int, role: str
) -> None:
    client = join(supervised_node)
    keys = keys_of("a", 4)
    put(client, keys)
    worker = ClientProcess(supervised_node, role, keys if role == "reader" else keys_of("b", 4), [life])
    try:
        assert stats(client)["supervised_clients"] == 1
        worker.stop()
        assert was_killed(worker)
        eventually(lambda: stats(client)["evictable_bytes"] == stats(client)["used_bytes"] == 4 * BLOCK, "it is free")
        held = stats(client)
        assert (held["leases"], held["rooms"], held["killed_holders"]) == (0, 0, 1)
    finally:
        worker.kill()


def test_a_stopped_writer_of_a_room_is_killed_after_the_requests_deadline(
    conductor: Conductor, supervised_node: NodePeer, join: Join, life: int
) -> None:
    client = join(supervised_node)
    began = time.monotonic()
    assert isinstance(conductor.reserve(supervised_node, R, keys_of("p", 2), time_left=3.0), RoomConfirmed)
    writer = ClientProcess(supervised_node, "writer", pass_fds=[life])
    try:
        writer.stop()
        assert was_killed(writer)
        assert time.monotonic() - began > 3.0
        eventually(lambda: stats(client)["used_bytes"] == 0, "the room is free")
    finally:
        writer.kill()


@pytest.mark.parametrize("why", ["no pipe", "another parent"])
def test_a_program_that_the_supervisor_did_not_start_keeps_its_lease(
    supervised_node: NodePeer, join: Join, life: int, why: str
) -> None:
    client = join(supervised_node)
    keys = keys_of("a", 4)
    put(client, keys)
    stranger: ClientProcess
    if why == "no pipe":
        stranger = ClientProcess(supervised_node, "reader", keys)
    else:
        stranger = GrandchildProcess(supervised_node, keys, life)
    stranger.stop()
    worker = ClientProcess(supervised_node, "reader", keys_of("a", 1), [life])
    try:
        worker.stop()
        assert was_killed(worker), "and so the older lease was judged as well"
        eventually(lambda: stats(client)["leases"] == 1, "the worker's lease ends")
        for name in "bcdefg":
            put(client, keys_of(name, 30))
        with client.lease(SPACE, keys).result(SECONDS) as lease:
            assert lease.count == 4
        assert stats(client)["killed_holders"] == 1
        assert stranger.process.poll() is None
    finally:
        worker.kill()
        stranger.kill()
    eventually(lambda: stats(client)["leases"] == 0, "the lease ends with the process")


class GrandchildProcess(ClientProcess):
    """It has the supervisor's pipe, but a worker started it, not the supervisor."""

    def __init__(self, node: NodePeer, keys: list[bytes], life: int) -> None:
        start = "import subprocess, sys; sys.exit(subprocess.call(sys.argv[2:], pass_fds=[int(sys.argv[1])]))"
        script = __file__.replace("test_holders", "client_process")
        inner = [sys.executable, script, node.socket_path, "reader", *(key.hex() for key in keys)]
        self.process = subprocess.Popen(
            [sys.executable, "-c", start, str(life), *inner],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[life],
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"ready\n"

    def kill(self) -> None:
        # The grandchild ends with its standard input; a stopped starter cannot see that, but it need not.
        self.process.send_signal(signal.SIGCONT)
        self.process.communicate(timeout=SECONDS)


def test_a_node_without_a_supervisor_kills_nobody(conductor: Conductor, join: Join, life: int) -> None:
    node = conductor.start_node("node-0", **SHORT)
    client = join(node)
    put(client, keys_of("a", 1))
    reader = ClientProcess(node, "reader", keys_of("a", 1), [life])
    try:
        time.sleep(2.0)  # a supervised one would be dead three times over
        assert reader.process.poll() is None
        assert (stats(client)["leases"], stats(client)["supervised_clients"]) == (1, 0)
    finally:
        reader.kill()


def test_a_client_beyond_its_quota_gets_no_more(conductor: Conductor, join: Join) -> None:
    node = conductor.start_node("node-0", client_quota=5 * BLOCK)
    client = join(node)
    keys = keys_of("a", 2)
    put(client, keys)
    hoarder = ClientProcess(node, "hoarder", keys)
    try:
        assert hoarder.answer.startswith(f"2 leases, then: a lease of {2 * BLOCK} bytes on top of {4 * BLOCK} bytes")
        assert "--client-quota" in hoarder.answer
    finally:
        hoarder.kill()
    eventually(lambda: stats(client)["leases"] == 0, "the leases end")
    with client.lease(SPACE, keys).result(SECONDS) as lease:
        assert lease.count == 2


def test_a_caching_room_takes_no_more_than_the_quota(conductor: Conductor, join: Join) -> None:
    node = conductor.start_node("node-0", client_quota=5 * BLOCK)
    cacher = ClientProcess(node, "cacher", keys_of("a", 9))
    try:
        assert cacher.answer == "ready, 5 blocks"
        assert stats(join(node))["used_bytes"] == 5 * BLOCK
    finally:
        cacher.kill()


def test_a_worker_has_no_quota(conductor: Conductor, life: int, join: Join) -> None:
    with conductor.process_node("node-0", life_fd=life, client_quota=5 * BLOCK) as (node, process):
        cacher = ClientProcess(node, "cacher", keys_of("a", 9), [life])
        try:
            assert cacher.answer == "ready, 9 blocks"
        finally:
            cacher.kill()
            process.send_signal(signal.SIGINT)
            process.wait(SECONDS)


def test_a_process_that_hung_up_is_nobody(life: int) -> None:
    """Its number may belong to another by now."""
    ours, theirs = socket.socketpair()
    theirs.close()
    with ours:
        holder = Holder(ours, life)
        assert not holder.is_supervised
        assert not holder.is_dead
        holder.close()
