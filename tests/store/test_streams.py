"""A prompt's blocks come into a node layer after layer: from DRAM, SSD and another node; or damaged, or not at all."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from moonpool.core.vocabulary import BlockKey, NodePeer
from moonpool.errors import PoolError
from moonpool.store.client import NodeClient
from moonpool.store.views import Stream

from ..messenger.kit import MemoryStore, serving
from ..messenger.proxy import proxy
from .kit import BLOCK, SECONDS, SPACE, Conductor, bytes_of, eventually, keys_of, put

Join = Callable[..., NodeClient]


class Watched:
    """A stream, and how many layers were there each time it said something; what is there is right at that time."""

    def __init__(self, stream: Stream, keys: list[BlockKey]) -> None:
        self.stream = stream
        self.steps: list[int] = []
        self._keys = keys
        self._over: Future[None] = Future()
        self._lock = threading.Lock()
        stream.tell(self._changed)

    def _changed(self) -> None:
        with self._lock:
            runs, is_over = self.stream.runs, self.stream.is_over
            self.steps.append(runs)
            for key, view in zip(self._keys, self.stream.views, strict=False):
                end = runs * SPACE.run_bytes
                if not np.array_equal(view[:end], bytes_of(key)[:end]) and not self._over.done():
                    self._over.set_exception(AssertionError(f"{runs} layers were not there"))
            if is_over and not self._over.done():
                self._over.set_result(None)

    def wait(self) -> Stream:
        self._over.result(SECONDS)
        return self.stream


def stored(client: NodeClient, keys: list[BlockKey]) -> None:
    """Its node has them, also for those that come by another way."""
    put(client, keys)
    client.stats().result(SECONDS)


def stream(
    client: NodeClient, keys: list[BlockKey], source: NodePeer | None = None, fetched: int = 0, time_left: float = 60.0
) -> Watched:
    return Watched(client.stream(SPACE, keys, source, fetched, time_left).result(SECONDS), keys)


def test_what_is_in_dram_is_there_at_once(node: NodePeer, join: Join) -> None:
    keys = keys_of("a", 5)
    client = join(node)
    put(client, keys[:3])
    with stream(client, keys).wait() as found:
        assert (len(found.views), found.runs, found.whole) == (3, SPACE.runs, 3)
    with stream(client, keys_of("b", 2)).wait() as found:
        assert (len(found.views), found.whole) == (0, 0)


def test_layers_from_another_node_are_told_of_in_order_and_stay_here(conductor: Conductor, join: Join) -> None:
    near, far = conductor.start_node("node-0"), conductor.start_node("node-1")
    keys = keys_of("a", 6)
    here, there = join(near), join(far)
    put(here, keys[:2])
    stored(there, keys)
    watched = stream(here, keys, far, 5)
    with watched.wait() as found:
        assert (len(found.views), found.runs, found.whole) == (5, SPACE.runs, 5)
        assert watched.steps == sorted(watched.steps)
    with here.lease(SPACE, keys).result(SECONDS) as lease:
        assert lease.count == 5


def test_from_itself_or_after_its_time_nothing_is_fetched(conductor: Conductor, join: Join) -> None:
    near, far = conductor.start_node("node-0"), conductor.start_node("node-1")
    keys = keys_of("a", 3)
    here, there = join(near), join(far)
    stored(there, keys)
    for source, time_left in ((near, 60.0), (far, 0.0)):
        with stream(here, keys, source, 3, time_left).wait() as found:
            assert len(found.views) == 0


def test_a_source_that_lacks_some_or_is_gone_ends_the_stream_with_what_is_whole(
    conductor: Conductor, join: Join
) -> None:
    near, far = conductor.start_node("node-0"), conductor.start_node("node-1")
    keys = keys_of("a", 6)
    here, there = join(near), join(far)
    put(here, keys[:1])
    stored(there, keys[:4])
    with stream(here, keys, far, 6).wait() as found:
        assert (len(found.views), found.whole, found.runs) == (4, 4, SPACE.runs)
    lost = replace(far, data_address="127.0.0.1:9")
    with stream(here, keys, lost, 6).wait() as found:
        assert (len(found.views), found.whole) == (4, 4)


def test_blocks_that_go_after_the_source_has_said_it_has_them_end_the_stream_with_what_is_whole(
    node: NodePeer, join: Join, by_layers: None
) -> None:
    client, keys, store = join(node), keys_of("a", 6), MemoryStore(BLOCK, SPACE.runs)
    store.put(keys)
    put(client, keys[:1])
    depart = store.depart

    def forgets(*args: object) -> object:
        store.blocks.pop(keys[4], None)
        return depart(*args)  # type: ignore[arg-type]

    store.depart = forgets  # type: ignore[method-assign, assignment]
    with serving(store) as server:
        source = replace(node, data_address=server.address)
        with client.stream(SPACE, keys, source, 6, 60.0).result(SECONDS) as found:
            eventually(lambda: found.is_over, "it is over")
            assert (len(found.views), found.whole, found.runs) == (6, 4, 0)


@pytest.mark.parametrize("cut_after", [None, 30_000])
def test_layers_that_come_late_and_out_of_order_over_connections_that_break(
    conductor: Conductor, join: Join, monkeypatch: pytest.MonkeyPatch, cut_after: int | None
) -> None:
    """Each layer of a few blocks is a transfer of its own, and each piece of it is late for as long as chance will."""
    monkeypatch.setattr("moonpool.store.streaming.FETCH_BYTES", SPACE.run_bytes)
    near, far = conductor.start_node("node-0"), conductor.start_node("node-1")
    here, there = join(near), join(far)
    rng = random.Random(4)
    with proxy(far.data_address, cut_back_after=cut_after, delay=lambda: rng.uniform(0, 0.02)) as p:
        source = replace(far, data_address=p.address)
        for turn in range(3):
            keys = keys_of(f"a{turn}", 6)
            stored(there, keys)
            watched = stream(here, keys, source, 6)
            with watched.wait() as found:
                assert (len(found.views), found.runs, found.whole) == (6, SPACE.runs, 6)
            assert watched.steps == sorted(watched.steps)


def test_a_block_that_is_damaged_at_its_source_is_not_whole_here(conductor: Conductor, join: Join) -> None:
    near, far = conductor.start_node("node-0"), conductor.start_node("node-1")
    keys = keys_of("a", 3)
    here, there = join(near), join(far)
    stored(there, keys)
    with there.lease(SPACE, keys).result(SECONDS) as lease:
        there.arena[lease.offsets[1] + 5] ^= 1
    found = here.stream(SPACE, keys, far, 3, 60.0).result(SECONDS)
    eventually(lambda: found.is_over, "it is over")
    assert (found.runs, found.whole) == (0, 1)
    found.close()
    assert here.stats().result(SECONDS)["checksum_failures"] >= 1


def test_layers_come_from_an_ssd(conductor: Conductor, join: Join, tmp_path: Path) -> None:
    node = conductor.start_node("node-0", 16 * BLOCK, ssd_bytes=256 * BLOCK, ssd_dirs=(str(tmp_path),))
    client = join(node)
    keys = keys_of("a", 8)
    for name in ("a", "b", "c"):
        for start in range(0, 8, 2):
            put(client, keys_of(name, 8)[start : start + 2])
            eventually(lambda: _is_saved(client), "the reserve is saved")
    before = client.stats().result(SECONDS)["ssd_promotions"]
    with stream(client, keys).wait() as found:
        assert (len(found.views), found.runs, found.whole) == (8, SPACE.runs, 8)
    assert client.stats().result(SECONDS)["ssd_promotions"] > before
    client.audit().result(SECONDS)


def _is_saved(client: NodeClient) -> bool:
    now = client.stats().result(SECONDS)
    return bool(now["capacity_bytes"] - now["used_bytes"] + (now["ssd_saves"] - now["demotions"]) * BLOCK >= 8 * BLOCK)


def test_a_client_that_leaves_in_the_middle_holds_nothing(conductor: Conductor, join: Join) -> None:
    near, far = conductor.start_node("node-0"), conductor.start_node("node-1")
    keys = keys_of("a", 12)
    here, there, third = join(near), join(far), join(near)
    stored(there, keys)
    for _ in range(5):
        here.stream(SPACE, keys, far, 12, 60.0).result(SECONDS).close()
        here.stream(SPACE, keys, far, 12, 60.0).result(SECONDS)
    here.close()
    eventually(lambda: third.stats().result(SECONDS)["rooms"] == 0, "all rooms are gone")
    third.audit().result(SECONDS)


def test_a_stream_counts_in_a_clients_quota(conductor: Conductor, join: Join) -> None:
    node = conductor.start_node("node-0", client_quota=3 * BLOCK)
    keys = keys_of("a", 4)
    client = join(node)
    put(client, keys[:2])
    put(client, keys[2:])
    with pytest.raises(PoolError, match="a stream of"):
        client.stream(SPACE, keys, None, 0, 1.0).result(SECONDS)
    with stream(client, keys[:3]).wait() as found:
        assert found.whole == 3
    eventually(lambda: client.stats().result(SECONDS)["rooms"] == 0, "its room is gone")


def test_a_dead_node_ends_its_streams(conductor: Conductor, join: Join) -> None:
    far = conductor.start_node("node-1")
    store = MemoryStore(BLOCK, SPACE.runs)
    store.put(keys_of("a", 4))
    store.gate.clear()
    with conductor.process_node("node-9") as (node, process), serving(store) as server:
        client = NodeClient.connect(node.socket_path, name="client", incarnation="1")
        put(client, keys_of("a", 2))
        silent = replace(far, data_address=server.address)
        found = client.stream(SPACE, keys_of("a", 4), silent, 4, 60.0).result(SECONDS)
        assert (found.whole, found.is_over) == (2, False)
        process.kill()
        eventually(lambda: found.is_over, "the stream ends")
        client.close()
    for path in conductor.run_dir.glob("node-9.*"):
        path.rename(path.with_name(f"dead-{path.name}"))


MANY = replace(SPACE, runs=16, run_bytes=SPACE.run_bytes // 4)


@pytest.fixture
def by_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer is a transfer of its own."""
    monkeypatch.setattr("moonpool.store.streaming.FETCH_BYTES", 1)


def test_layers_of_two_copies_are_no_block(node: NodePeer, join: Join, by_layers: None) -> None:
    """Its source removes a block and puts it anew, with other bytes, while its layers go."""
    client, keys, store = join(node), keys_of("a", 2), MemoryStore(BLOCK, SPACE.runs)
    store.put(keys)
    depart = store.depart

    def replaced(*args: object) -> object:
        store.put(keys[1:], str(len(store.asked)))
        return depart(*args)  # type: ignore[arg-type]

    store.depart = replaced  # type: ignore[method-assign, assignment]
    with serving(store) as server:
        source = replace(node, data_address=server.address)
        with client.stream(SPACE, keys, source, 2, 60.0).result(SECONDS) as found:
            eventually(lambda: found.is_over, "it is over")
            assert found.runs <= 1, "whichever layer was read first"
        with client.lease(SPACE, keys[1:]).result(SECONDS) as lease:
            assert lease.count == 0


def test_a_source_with_another_layout_gives_nothing(
    node: NodePeer, join: Join, by_layers: None, caplog: pytest.LogCaptureFixture
) -> None:
    client, keys, store = join(node), keys_of("a", 2), MemoryStore(BLOCK, 2 * SPACE.runs)
    larger = MemoryStore(2 * BLOCK, 2 * SPACE.runs)
    for each in (store, larger):
        each.put(keys)
        with serving(each) as server:
            source = replace(node, data_address=server.address)
            assert client.fetch(source, SPACE, keys, 60.0).result(SECONDS) == 0
            with client.stream(SPACE, keys, source, 2, 60.0).result(SECONDS) as found:
                eventually(lambda: found.is_over, "it is over")
                assert (found.runs, found.whole) == (0, 0)
    assert "ERROR" not in {record.levelname for record in caplog.records}


def test_a_source_that_says_nothing_keeps_no_space(
    node: NodePeer, join: Join, by_layers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moonpool.messenger.pace.STALL_SECONDS", 0.3)
    client, keys, store = join(node), keys_of("a", 2), MemoryStore(BLOCK, SPACE.runs)
    store.put(keys)
    with serving(store) as server:
        store.gate.clear()
        source = replace(node, data_address=server.address)
        with client.stream(SPACE, keys, source, 2, 600.0).result(SECONDS) as found:
            eventually(lambda: found.is_over, "it is over")
        eventually(lambda: client.stats().result(SECONDS)["used_bytes"] == 0, "its space is free")


def test_a_reader_that_leaves_ends_its_reads(node: NodePeer, join: Join, by_layers: None) -> None:
    client, keys, store = join(node), keys_of("a", 2), MemoryStore(BLOCK, MANY.runs)
    store.put(keys)
    with serving(store) as server:
        store.gate.clear()
        source = replace(node, data_address=server.address)
        client.stream(MANY, keys, source, 2, 600.0).result(SECONDS).close()
        client.stats().result(SECONDS)
        store.gate.set()
        eventually(lambda: client.stats().result(SECONDS)["used_bytes"] == 0, "its space is free")
        assert len(store.asked) < MANY.runs / 2


def test_what_is_refused_or_cannot_come_costs_no_blocks(conductor: Conductor, join: Join) -> None:
    node = conductor.start_node("node-0", 16 * BLOCK, client_quota=8 * BLOCK)
    client, keys, nowhere = join(node), keys_of("a", 16), replace(node, data_address="127.0.0.1:9")
    for start in range(0, 16, 8):
        put(client, keys[start : start + 8])
    with pytest.raises(PoolError, match="a stream of"):
        client.stream(SPACE, keys_of("b", 9), nowhere, 9, 60.0).result(SECONDS)
    assert client.fetch(nowhere, SPACE, keys_of("b", 16), 60.0).result(SECONDS) == 0
    with socket.create_server(("127.0.0.1", 0)) as listening:
        mute = replace(node, data_address=f"127.0.0.1:{listening.getsockname()[1]}")
        for source in (nowhere, mute):
            with client.stream(SPACE, keys_of("b", 8), source, 8, 60.0).result(SECONDS) as found:
                assert (len(found.views), found.is_over) == (0, True)
    assert client.stats().result(SECONDS)["blocks"] == 16
