"""Nodes with an SSD tier: what DRAM gives up is there again, exactly, also after a restart."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from moonpool.core.actions import SendSnapshot
from moonpool.core.events import BlocksRemoved, BlocksStored, RoomConfirmed, Snapshot
from moonpool.core.vocabulary import BlockKey, PartId, RequestId, Tier
from moonpool.errors import ConfigError
from moonpool.store.client import NodeClient
from moonpool.store.node import NodeConfig, run_node
from moonpool.wire.link import Link

from .kit import BLOCK, SECONDS, SPACE, ClientProcess, Conductor, bytes_of, eventually, keys_of, put

Join = Callable[..., NodeClient]
DRAM = 16
"""Blocks."""
R = RequestId("r-1")


def ssd(*directories: Path, blocks: int = 256) -> dict[str, object]:
    return {"ssd_bytes": blocks * BLOCK, "ssd_dirs": tuple(str(directory) for directory in directories)}


def stats(client: NodeClient) -> dict[str, float]:
    return client.stats().result(SECONDS)


def put_gently(client: NodeClient, keys: list[BlockKey]) -> None:
    """A few at a time, so that the disk keeps up and nothing is lost."""
    reserve = DRAM // 2
    for start in range(0, len(keys), 2):
        put(client, keys[start : start + 2])
        eventually(lambda: saved_enough(stats(client), reserve), "the reserve is saved")


def saved_enough(now: dict[str, float], reserve: int) -> bool:
    free = now["capacity_bytes"] - now["used_bytes"]
    saved_in_dram = now["ssd_saves"] * BLOCK - now["demotions"] * BLOCK
    return free + saved_in_dram >= reserve * BLOCK


def assert_served(client: NodeClient, keys: list[BlockKey]) -> None:
    """Each by itself: a prompt that is larger than DRAM cannot be held at once."""
    for key in keys:
        with client.lease(SPACE, [key]).result(SECONDS) as lease:
            assert lease.count == 1
            assert np.array_equal(lease.views[0], bytes_of(key))


@pytest.mark.parametrize("directories", [1, 2])
def test_a_working_set_beyond_dram_is_served_exactly(
    conductor: Conductor, join: Join, tmp_path: Path, directories: int
) -> None:
    folders = [tmp_path / f"disk-{number}" for number in range(directories)]
    client = join(conductor.start_node("node-0", DRAM * BLOCK, **ssd(*folders)))
    keys = keys_of("a", 4 * DRAM)
    put_gently(client, keys)
    now = stats(client)
    assert now["demotions"] == now["evictions"] >= 3 * DRAM
    assert now["blocks"] <= DRAM
    assert_served(client, keys)
    assert_served(client, keys[::-1])
    now = stats(client)
    assert now["ssd_promotions"] >= 6 * DRAM
    assert (now["ssd_checksum_failures"], now["ssd_errors"], now["leases"], now["rooms"]) == (0, 0, 0, 0)
    for folder in folders:
        assert (folder / "node-0" / "slab").stat().st_size == 256 * BLOCK // directories


def test_a_prompt_partly_on_ssd_is_leased_whole(conductor: Conductor, join: Join, tmp_path: Path) -> None:
    client = join(conductor.start_node("node-0", DRAM * BLOCK, **ssd(tmp_path)))
    keys = keys_of("a", 8)
    put_gently(client, keys)
    put_gently(client, keys_of("b", 12))
    assert stats(client)["demotions"] >= 4
    with client.lease(SPACE, [*keys, *keys_of("c", 1)]).result(SECONDS) as lease:
        assert lease.count == 8
        assert [bytes(view) for view in lease.views] == [bytes(bytes_of(key)) for key in keys]


def test_without_an_ssd_the_same_is_lost(conductor: Conductor, join: Join) -> None:
    client = join(conductor.start_node("node-0", DRAM * BLOCK))
    for name in "abcd":
        put(client, keys_of(name, DRAM))
    assert client.lease(SPACE, keys_of("a", 1)).result(SECONDS).count == 0
    assert (stats(client)["demotions"], stats(client)["ssd_capacity_bytes"]) == (0, 0)


def test_a_room_counts_what_is_on_ssd_as_held(conductor: Conductor, join: Join, tmp_path: Path) -> None:
    node = conductor.start_node("node-0", DRAM * BLOCK, **ssd(tmp_path))
    client = join(node)
    keys = keys_of("p", 4)
    put_gently(client, keys)
    put_gently(client, keys_of("b", 2 * DRAM))
    answer = conductor.reserve(node, R, [*keys, *keys_of("q", 1)])
    assert isinstance(answer, RoomConfirmed)
    assert answer.lacking == (4,)
    conductor.release(node, R)
    eventually(lambda: stats(client)["rooms"] == 0, "the room ends")


def test_another_node_fetches_from_the_ssd(conductor: Conductor, join: Join, tmp_path: Path) -> None:
    far = conductor.start_node("node-0", DRAM * BLOCK, **ssd(tmp_path))
    near = conductor.start_node("node-1")
    there, here = join(far), join(near)
    keys = keys_of("a", 6)
    put_gently(there, keys)
    put_gently(there, keys_of("b", 2 * DRAM))
    assert here.fetch(far, SPACE, keys, SECONDS).result(SECONDS) == 6
    assert_served(here, keys)
    assert stats(there)["ssd_promotions"] >= 6
    eventually(lambda: stats(there)["leases"] == stats(there)["rooms"] == 0, "nothing is held")


def directory_of(changes: list[Snapshot | BlocksStored | BlocksRemoved]) -> dict[Tier, set[BlockKey]]:
    """What the announcements amount to."""
    known: dict[Tier, set[BlockKey]] = {tier: set() for tier in Tier}
    for message in changes:
        match message:
            case Snapshot():
                known = {tier: set() for tier in Tier}
                for _, tier, keys in message.blocks:
                    known[tier].update(keys)
            case BlocksStored():
                known[message.tier].update(message.keys)
            case BlocksRemoved():
                known[message.tier].difference_update(message.keys)
    return known


def test_the_directory_hears_of_each_tier(conductor: Conductor, join: Join, tmp_path: Path) -> None:
    node = conductor.start_node("node-0", DRAM * BLOCK, **ssd(tmp_path, blocks=10))
    client = join(node)
    for name in "abc":
        for key in keys_of(name, 10):
            put(client, [key])
    eventually(lambda: stats(client)["ssd_evictions"] > 0, "the SSD is full")

    def is_heard() -> bool:
        messages, before = conductor.messages((Snapshot, BlocksStored, BlocksRemoved)), stats(client)
        time.sleep(0.1)
        known, now = directory_of(messages), stats(client)
        if messages != conductor.messages((Snapshot, BlocksStored, BlocksRemoved)) or before != now:
            return False
        return len(known[Tier.DRAM]) == now["blocks"] and len(known[Tier.SSD]) == now["ssd_blocks"]

    # A snapshot stands for whatever was not announced yet.
    eventually(is_heard, "all of it is announced")
    conductor.tell(node, SendSnapshot(node))
    conductor.wait_for(Snapshot, lambda s: s.seq > 0)
    *before, snapshot = conductor.messages((Snapshot, BlocksStored, BlocksRemoved))
    while not isinstance(snapshot, Snapshot):
        *before, snapshot = before
    assert directory_of([snapshot]) == directory_of(before)
    assert all(directory_of([snapshot]).values()), "both tiers have blocks"


def test_a_full_ssd_gives_up_what_was_not_used_for_longest(conductor: Conductor, join: Join, tmp_path: Path) -> None:
    client = join(conductor.start_node("node-0", DRAM * BLOCK, **ssd(tmp_path, blocks=DRAM)))
    keys = keys_of("a", 5 * DRAM)
    put_gently(client, keys)
    now = stats(client)
    assert now["ssd_evictions"] > 0
    assert now["ssd_used_bytes"] <= DRAM * BLOCK
    assert client.lease(SPACE, keys[:1]).result(SECONDS).count == 0
    assert_served(client, keys[-DRAM:])


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_a_node_that_returns_announces_and_serves_its_ssd(
    conductor: Conductor, tmp_path: Path, end: signal.Signals
) -> None:
    keys = keys_of("a", 3 * DRAM)
    with conductor.process_node("node-0", DRAM * BLOCK, **ssd(tmp_path)) as (node, process):
        with NodeClient.connect(node.socket_path, name="c", incarnation="1") as client:
            put_gently(client, keys)
            saved = stats(client)["ssd_blocks"]
        process.send_signal(end)
        process.wait(SECONDS)
    with conductor.process_node("node-0", DRAM * BLOCK, **ssd(tmp_path)) as (again, process):
        snapshot = conductor.wait_for(Snapshot, lambda s: s.incarnation == again.incarnation)
        [(space, tier, announced)] = snapshot.blocks
        assert (space, tier, len(announced)) == (SPACE.id, Tier.SSD, saved)
        with NodeClient.connect(again.socket_path, name="c", incarnation="2") as client:
            assert_served(client, [key for key in keys if key in announced])
            lost = [key for key in keys if key not in announced]
            assert all(client.lease(SPACE, [key]).result(SECONDS).count == 0 for key in lost)
            client.audit().result(SECONDS)
        process.send_signal(signal.SIGINT)
        process.wait(SECONDS)


def test_a_client_that_dies_while_it_waits_for_the_ssd_leaves_nothing(
    conductor: Conductor, join: Join, tmp_path: Path
) -> None:
    node = conductor.start_node("node-0", DRAM * BLOCK, **ssd(tmp_path))
    client = join(node)
    keys = keys_of("a", 3 * DRAM)
    put_gently(client, keys)
    reader = ClientProcess(node, "reader", keys[:4])
    reader.kill()
    waiting = join(node)
    for key in keys:
        waiting.lease(SPACE, [key])
    waiting.close()
    eventually(lambda: stats(client)["clients"] == 1, "both are gone")
    eventually(lambda: stats(client)["rooms"] == stats(client)["leases"] == 0, "nothing is held")


@pytest.mark.parametrize("is_usable", [True, False])
def test_a_node_is_up_when_its_ssd_is_open_and_not_before(tmp_path: Path, run_dir: Path, is_usable: bool) -> None:
    slab = tmp_path / "node-0" / "slab"
    said: list[str] = []

    async def scenario() -> None:
        if not is_usable:
            slab.parent.touch()
        config = NodeConfig(DRAM * BLOCK, str(run_dir), "127.0.0.1", ssd_bytes=256 * BLOCK, ssd_dirs=(str(tmp_path),))
        link = Link(PartId("node-0"), "127.0.0.1", 0, None)
        is_up = asyncio.Event()
        node = asyncio.create_task(run_node(link, "tcp://127.0.0.1:9", config, is_up.set, said.append))
        up = asyncio.create_task(is_up.wait())
        try:
            async with asyncio.timeout(SECONDS):
                await asyncio.wait([node, up], return_when=asyncio.FIRST_COMPLETED)
            assert said == ["opening 4.0 MiB of SSD"]
            assert is_up.is_set() == is_usable
            if is_usable:
                assert slab.stat().st_size == 256 * BLOCK
            else:
                with pytest.raises(ConfigError, match="--ssd-dir"):
                    await node
        finally:
            up.cancel()
            node.cancel()
            with contextlib.suppress(asyncio.CancelledError, ConfigError):
                await node
            link.close()

    asyncio.run(scenario())
    assert not [*run_dir.iterdir()]
