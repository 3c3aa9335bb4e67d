"""Orders to a node: copies, demotions, drops. What somebody uses stays, and what comes twice is harmless."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from msgspec.structs import replace

from moonpool.core.actions import Demote, DropReplica, ReleaseRoom, Replicate
from moonpool.core.events import BlocksRemoved, BlocksStored, RoomRefused, Snapshot
from moonpool.core.vocabulary import BlockKey, Incarnation, NodePeer, PartId, RequestId
from moonpool.store.client import NodeClient
from moonpool.store.orders import MAX_WAITING, Orders
from moonpool.wire.messages import Located

from .kit import BLOCK, SECONDS, SPACE, Conductor, bytes_of, eventually, keys_of, put
from .test_ssd import directory_of, ssd, stats

Join = Callable[..., NodeClient]


def replicate(node: NodePeer, keys: list[BlockKey], source: NodePeer, time_left: float = SECONDS) -> Replicate:
    return Replicate(node, SPACE, tuple(keys), source, time_left)


def served(client: NodeClient, keys: list[BlockKey]) -> list[BlockKey]:
    """Those that the node has, with the right bytes."""
    found = []
    for key in keys:
        with client.lease(SPACE, [key]).result(SECONDS) as lease:
            if lease.count:
                assert np.array_equal(lease.views[0], bytes_of(key))
                found.append(key)
    return found


def all_heard(conductor: Conductor, node: NodePeer) -> None:
    """What was told before is with the node."""
    conductor.reserve(node, "after", [])
    conductor.release(node, "after")


def known(conductor: Conductor, node: NodePeer) -> set[BlockKey]:
    """What the node's announcements amount to."""
    heard = conductor.messages((Snapshot, BlocksStored, BlocksRemoved))
    return set().union(*directory_of([m for m in heard if m.node == node.id]).values())


def test_copies_come_from_another_node_each_by_itself(conductor: Conductor, join: Join) -> None:
    far, near = conductor.start_node("node-0"), conductor.start_node("node-1")
    there, here = join(far), join(near)
    keys = keys_of("a", 5)
    put(there, keys[:2])
    put(there, keys[3:])
    for _ in range(2):
        conductor.tell(near, replicate(near, keys, far))
    wanted = {*keys[:2], *keys[3:]}
    eventually(lambda: known(conductor, near) == wanted, "the directory hears of the copies")
    assert served(here, keys) == [*keys[:2], *keys[3:]]
    eventually(lambda: stats(here)["orders_waiting"] == 0, "the second order is through")
    assert stats(here)["replicated_blocks"] == 4
    for client in (here, there):
        eventually(lambda c=client: stats(c)["leases"] == stats(c)["rooms"] == 0, "nothing is held")  # type: ignore[misc]
        client.audit().result(SECONDS)


def test_a_copy_costs_nobody_what_is_leased(conductor: Conductor, join: Join) -> None:
    far, near = conductor.start_node("node-0"), conductor.start_node("node-1", 4 * BLOCK)
    there, here = join(far), join(near)
    used, unused = keys_of("used", 3), keys_of("unused", 1)
    put(here, unused)
    put(here, used)
    put(there, keys_of("a", 3))
    with here.lease(SPACE, used).result(SECONDS):
        conductor.tell(near, replicate(near, keys_of("a", 3), far))
        eventually(lambda: stats(here)["replicated_blocks"] > 0, "the order is obeyed as far as it goes")
        eventually(lambda: stats(here)["rooms"] == 0, "it is over")
        assert served(here, used) == used
        assert served(here, unused) == [], "what nobody used made room"
        assert len(served(here, keys_of("a", 3))) == 1


def test_a_copy_from_a_dead_node_or_too_late_does_nothing(conductor: Conductor, join: Join) -> None:
    with conductor.process_node("node-0") as (far, process):
        process.send_signal(signal.SIGINT)
        process.wait(SECONDS)
    near = conductor.start_node("node-1")
    here = join(near)
    alive = conductor.start_node("node-2")
    put(join(alive), keys_of("a", 2))
    conductor.tell(near, replicate(near, keys_of("a", 2), far, time_left=2.0))
    conductor.tell(near, replicate(near, keys_of("a", 1), alive, time_left=0.0))
    conductor.tell(near, replicate(near, keys_of("a", 2)[1:], alive))
    eventually(lambda: stats(here)["replicated_blocks"] == 1, "the one good order is obeyed")
    assert served(here, keys_of("a", 2)) == keys_of("a", 2)[1:]


def test_orders_that_make_no_sense_cost_a_line_each(
    conductor: Conductor, node: NodePeer, join: Join, caplog: pytest.LogCaptureFixture
) -> None:
    client, keys = join(node), keys_of("a", 2)
    put(client, keys)
    nowhere = replace(node, id=PartId("node-9"), data_address="nowhere")
    conductor.tell(node, replicate(node, keys_of("b", 1), nowhere))
    conductor.tell(node, replicate(node, [BlockKey(b"short")], nowhere))
    conductor.tell(node, Demote(node, SPACE, (BlockKey(b""),)))
    assert isinstance(conductor.reserve(node, "r", [BlockKey(b"short")]), RoomRefused)
    conductor.tell(node, ReleaseRoom(node, RequestId(""), -1))
    conductor.tell(node, Located(1 << 40, (node,), 1, b"\xff"))
    all_heard(conductor, node)
    eventually(lambda: stats(client)["orders_waiting"] == 0, "all orders are carried out")
    with client.lease(SPACE, keys).result(SECONDS) as lease:
        assert [bytes(view) for view in lease.views] == [bytes(bytes_of(key)) for key in keys]
    assert all(record.exc_info is None for record in caplog.records)


def test_orders_beyond_the_bound_are_lost() -> None:
    """Without a run, nothing of an order is looked at."""
    idle = Orders(*cast(Any, (None, None, None)))
    node = NodePeer(PartId("n"), Incarnation("1"), "", "", "")
    for _ in range(MAX_WAITING + 3):
        idle.take(DropReplica(node, SPACE, tuple(keys_of("a", 1))))
    assert (idle.counters()["orders_waiting"], idle.counters()["orders_lost"]) == (MAX_WAITING, 3)


def test_demoted_blocks_leave_dram_and_are_hit_on_the_ssd(conductor: Conductor, join: Join, tmp_path: Path) -> None:
    node = conductor.start_node("node-0", **ssd(tmp_path))
    client = join(node)
    keys = keys_of("a", 6)
    put(client, keys)
    with client.lease(SPACE, keys[:2]).result(SECONDS):
        for _ in range(2):
            conductor.tell(node, Demote(node, SPACE, (*keys, *keys_of("nobody", 1))))
        all_heard(conductor, node)
        eventually(lambda: stats(client)["blocks"] == 2, "all but the leased ones leave DRAM")
    now = stats(client)
    assert (now["ssd_blocks"], now["demotions"], now["evictions"]) == (4, 4, 4)
    eventually(lambda: known(conductor, node) == set(keys), "the directory has them all")
    assert served(client, keys) == keys
    assert stats(client)["ssd_promotions"] == 4
    eventually(lambda: stats(client)["rooms"] == stats(client)["leases"] == 0, "nobody holds them")
    # What the SSD has already leaves at once.
    conductor.tell(node, Demote(node, SPACE, tuple(keys[2:])))
    eventually(lambda: stats(client)["blocks"] == 2, "they leave again")
    assert stats(client)["ssd_saves"] == 4
    client.audit().result(SECONDS)


def test_without_an_ssd_nothing_is_demoted(conductor: Conductor, join: Join) -> None:
    node = conductor.start_node("node-0")
    client = join(node)
    keys = keys_of("a", 2)
    put(client, keys)
    conductor.tell(node, Demote(node, SPACE, tuple(keys)))
    conductor.tell(node, DropReplica(node, SPACE, tuple(keys[1:])))
    eventually(lambda: stats(client)["dropped_replicas"] == 1, "both orders are obeyed")
    assert served(client, keys) == keys[:1]


def test_dropped_blocks_are_gone_in_both_tiers_and_do_not_return(tmp_path: Path, conductor: Conductor) -> None:
    keys = keys_of("a", 6)
    with conductor.process_node("node-0", **ssd(tmp_path)) as (node, process):
        with NodeClient.connect(node.socket_path, name="c", incarnation="1") as client:
            put(client, keys)
            conductor.tell(node, Demote(node, SPACE, tuple(keys[:4])))
            eventually(lambda: stats(client)["ssd_blocks"] == 4, "four are on the SSD")
            index = tmp_path / "node-0" / "index"
            size = index.stat().st_size
            with client.lease(SPACE, keys[:1]).result(SECONDS):
                for _ in range(2):
                    conductor.tell(node, DropReplica(node, SPACE, (*keys[:3], keys[5], *keys_of("nobody", 1))))
                all_heard(conductor, node)
                eventually(lambda: stats(client)["dropped_replicas"] == 3, "all but the leased one go")
                eventually(lambda: stats(client)["orders_waiting"] == 0, "the second order finds nothing")
            assert served(client, keys) == [keys[0], keys[3], keys[4]]
            remaining = {keys[0], keys[3], keys[4]}
            eventually(lambda: known(conductor, node) == remaining, "the directory has heard of it")
            client.audit().result(SECONDS)
            eventually(lambda: index.stat().st_size > size, "the index says so")
        process.kill()
        process.wait(SECONDS)
    with conductor.process_node("node-0", **ssd(tmp_path)) as (again, process):
        snapshot = conductor.wait_for(Snapshot, lambda s: s.incarnation == again.incarnation)
        assert {key for _, _, some in snapshot.blocks for key in some} == {keys[0], keys[3]}
        process.send_signal(signal.SIGINT)
        process.wait(SECONDS)
