"""A real Conductor and two real nodes: copies are ordered, made, demoted and dropped, and the directory follows."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from moonpool.core.actions import Demote, ReplicasOrdered
from moonpool.core.conductor import ConductorConfig
from moonpool.core.events import ReplicasWanted
from moonpool.core.vocabulary import BlockKey, NodePeer, PartId
from moonpool.live.conductor import run_conductor
from moonpool.store import BlockMeta, Client
from moonpool.store.client import NodeClient, awaited
from moonpool.store.node import NodeConfig, run_node
from moonpool.wire.link import Link
from moonpool.wire.messages import Describe, Description, Message
from tests.store.kit import BLOCK, SPACE, bytes_of, keys_of, put

SECONDS = 20.0
T = TypeVar("T")
KEYS = keys_of("a", 4)


class Pool:
    """Two nodes with SSDs around a Conductor, and an asker with a link of its own."""

    def __init__(self) -> None:
        self.chief = Link(PartId("conductor"), "127.0.0.1", 0, None)
        self.asker = Link(PartId("asker"), "127.0.0.1", 0, None)
        self.links = [Link(PartId(f"node-{i}"), "127.0.0.1", 0, None) for i in range(2)]
        self._serial = 0

    async def ask(self, question: Message, kind: type[T]) -> T:
        await self.asker.send(self.chief.me, question)
        async with asyncio.timeout(SECONDS):
            while True:
                body = (await self.asker.receive()).body
                if isinstance(body, kind):
                    return body

    async def want(self, copies: int, at_most: int | None = None) -> tuple[int, ...]:
        self._serial += 1
        question = ReplicasWanted(self.asker.me, self._serial, SPACE, tuple(KEYS), copies, at_most)
        answer = await self.ask(question, ReplicasOrdered)
        assert answer.serial == self._serial
        return answer.copies

    async def blocks(self) -> dict[str, dict[str, int]]:
        """In the directory, by node and tier."""
        description = await self.ask(Describe(self.asker.me, 0), Description)
        state: dict[str, Any] = msgspec.json.decode(description.state)
        return {part["id"]: part["blocks"] for part in state["parts"] if part.get("index") == "exact"}


@contextlib.asynccontextmanager
async def pool(folder: Path) -> AsyncIterator[Pool]:
    made = Pool()
    work: list[Awaitable[None]] = [run_conductor(made.chief, ConductorConfig(), seed=0)]
    for link in made.links:
        config = NodeConfig(
            64 * BLOCK, str(folder), "127.0.0.1", client_quota=64 * BLOCK, ssd_bytes=64 * BLOCK, ssd_dirs=(str(folder),)
        )
        work.append(run_node(link, made.chief.me.address, config))
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        yield made
    finally:
        for task in reversed(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for link in (made.chief, made.asker, *made.links):
            link.close()


async def until(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    loop = asyncio.get_running_loop()
    end = loop.time() + SECONDS
    while not await condition():
        assert loop.time() < end, f"never happened: {what}"
        await asyncio.sleep(0.02)


async def served(client: NodeClient) -> list[BlockKey]:
    """What the node itself has, with the right bytes."""
    found = []
    for key in KEYS:
        with await awaited(client.lease(SPACE, [key])) as lease:
            if lease.count:
                assert np.array_equal(lease.views[0], bytes_of(key))
                found.append(key)
    return found


def test_copies_are_made_demoted_and_dropped() -> None:
    async def test(folder: Path) -> None:
        async with pool(folder) as p:
            await until(lambda: has(p, {"dram": 0, "ssd": 0}, {"dram": 0, "ssd": 0}), "both nodes are there")
            first, second = [
                await asyncio.to_thread(NodeClient.connect, folder / f"node-{i}.sock", name="c", incarnation="1")
                for i in range(2)
            ]
            try:
                await asyncio.to_thread(put, first, KEYS)
                await until(lambda: has(p, {"dram": 4, "ssd": 0}, {"dram": 0, "ssd": 0}), "it is put on one node")
                assert await served(second) == []
                assert await p.want(2) == (2, 2, 2, 2)
                await until(lambda: has(p, {"dram": 4, "ssd": 0}, {"dram": 4, "ssd": 0}), "both have it")
                assert await served(first) == await served(second) == KEYS

                link = p.links[1].me
                peer = NodePeer(link.id, link.incarnation, link.address, "", "")
                await p.asker.send(link, Demote(peer, SPACE, tuple(KEYS)))
                await until(lambda: has(p, {"dram": 4, "ssd": 0}, {"dram": 0, "ssd": 4}), "one has it on its SSD")
                assert await served(second) == KEYS
                assert (await awaited(second.stats()))["ssd_promotions"] == 4
                await until(lambda: has(p, {"dram": 4, "ssd": 0}, {"dram": 4, "ssd": 4}), "it is in both tiers")

                await until(lambda: unheld(first, second), "nobody holds them")
                assert await p.want(1, at_most=1) == (2, 2, 2, 2)
                await until(lambda: holders(p, (1, 1, 1, 1)), "the surplus is dropped")
                assert sorted([await served(first), await served(second)]) == [[], KEYS]
                await p.want(0, at_most=0)
                await asyncio.sleep(0.2)
                assert await p.want(0) == (1, 1, 1, 1), "the last one stays"
                for client in (first, second):
                    await awaited(client.audit())
            finally:
                first.close()
                second.close()

    async def has(p: Pool, *expected: dict[str, int]) -> bool:
        return await p.blocks() == {f"node-{i}": blocks for i, blocks in enumerate(expected)}

    async def unheld(*clients: NodeClient) -> bool:
        held = [await awaited(client.stats()) for client in clients]
        return not any(stats["leases"] or stats["rooms"] for stats in held)

    async def holders(p: Pool, counts: tuple[int, ...]) -> bool:
        return await p.want(0) == counts

    with tempfile.TemporaryDirectory(prefix="mp-") as name:
        asyncio.run(test(Path(name)))


def test_a_client_has_its_blocks_copied() -> None:
    key, data = keys_of("b", 1)[0], bytes(bytes_of(keys_of("b", 1)[0]))
    meta = BlockMeta.of(parent=KEYS[3], index=4, tokens=(1, 2, 3))

    def talk(folder: Path) -> None:
        with (
            Client.connect(folder / "node-0.sock", name="a") as near,
            Client.connect(folder / "node-1.sock", name="b") as far,
        ):
            ours, theirs = [c.space("s", block_bytes=BLOCK, layers=4, block_tokens=16) for c in (near, far)]
            assert ours.replicas(key, 2) == 0, "it is nowhere"
            assert ours.put(key, data, meta)
            assert ours.replicas(key, 2) == 2
            end = time.monotonic() + SECONDS
            while theirs.metas([key]) != [meta]:
                assert time.monotonic() < end, "the copy never came, or without what it is part of"
                time.sleep(0.02)
            with theirs.get([key]) as (block,):
                assert block is not None
                assert bytes(block) == data
            assert ours.replicas(key, 7) == theirs.replicas(key) == 2

    async def test(folder: Path) -> None:
        async with pool(folder) as p:
            await until(lambda: both(p), "both nodes are there")
            await asyncio.to_thread(talk, folder)

    async def both(p: Pool) -> bool:
        return len(await p.blocks()) == 2

    with tempfile.TemporaryDirectory(prefix="mp-") as name:
        asyncio.run(test(Path(name)))
