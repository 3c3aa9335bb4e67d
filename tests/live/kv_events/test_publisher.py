"""A real Conductor that publishes, real nodes, clients that put: subscribers know what /cluster/blocks shows."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from moonpool.core.conductor import ConductorConfig
from moonpool.core.events import Lost
from moonpool.core.vocabulary import BlockKey, BlockMeta, PartId, Peer
from moonpool.live import conductor
from moonpool.live.conductor import run_conductor
from moonpool.live.kv_events import publisher as module
from moonpool.live.kv_events.stream import StreamConfig
from moonpool.messenger.transfer import checksum
from moonpool.store import Client
from moonpool.store.client import NodeClient
from moonpool.store.node import NodeConfig, run_node
from moonpool.wire.link import Link
from moonpool.wire.messages import Describe, Description

from .kit import SPACE, Subscriber, Told, hash_of, keys_and_metas, quiet_port, run, tokens_of

BLOCK = SPACE.block_bytes
Blocks = Sequence[tuple[BlockKey, BlockMeta]]


class Pool:
    """Nodes around a Conductor that publishes."""

    def __init__(self, folder: Path, blocks: int, ssd_blocks: int) -> None:
        self._folder = folder
        self._sizes = blocks, ssd_blocks
        self._port = quiet_port()
        self._events = StreamConfig("127.0.0.1", quiet_port(), quiet_port(), buffer_bytes=1 << 14)
        self._asker = Link(PartId("asker"), "127.0.0.1", 0, None)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._chief: Link | None = None
        self._lives: dict[str, Peer] = {}

    def start_conductor(self) -> None:
        self._chief = Link(PartId("conductor"), "127.0.0.1", self._port, None)
        self._start(
            "conductor", self._chief, run_conductor(self._chief, ConductorConfig(), seed=0, events=self._events)
        )

    def start_node(self, name: str) -> None:
        link = Link(PartId(name), "127.0.0.1", 0, None)
        blocks, ssd = self._sizes
        config = NodeConfig(
            blocks * BLOCK,
            str(self._folder),
            "127.0.0.1",
            client_quota=blocks * BLOCK,
            ssd_bytes=ssd * BLOCK,
            ssd_dirs=(str(self._folder),),
        )
        self._lives[name] = link.me
        self._start(name, link, run_node(link, f"tcp://127.0.0.1:{self._port}", config))

    def _start(self, name: str, link: Link, work: Any) -> None:
        async def life() -> None:
            try:
                await work
            finally:
                link.close()

        self._tasks[name] = asyncio.create_task(life())

    async def end(self, *names: str) -> None:
        for name in names or list(self._tasks):
            task = self._tasks.pop(name)
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled() or task.exception() is None
            if names and (life := self._lives.pop(name, None)) is not None and self._chief is not None:
                # As a supervisor does.
                await self._asker.send(self._chief.me, Lost(life.id, life.incarnation, "ended"))
        if not names:
            self._asker.close()

    async def joined(self, part: str) -> None:
        while True:
            if any(each["id"] == part for each in (await self.ask(None))["parts"]):
                return
            await asyncio.sleep(0.02)

    async def ask(self, after: str | None) -> Any:
        assert self._chief is not None
        await self._asker.send(self._chief.me, Describe(self._asker.me, 0, "", after))
        while True:
            body = (await self._asker.receive()).body
            if isinstance(body, Description):
                return msgspec.json.decode(body.state)

    async def blocks(self) -> dict[int, dict[str, Any]]:
        """By hash."""
        found: dict[int, dict[str, Any]] = {}
        after: str | None = ""
        while after is not None:
            page = await self.ask(after)
            found |= {block["hash"]: block for block in page["blocks"]}
            after = page["next"]
        return found

    async def told(self) -> Told:
        """What subscribers are to know, by the directory."""
        blocks = [block for block in (await self.blocks()).values() if block["published"]]
        dram = {("CPU", block["hash"]) for block in blocks if block["dram"]}
        return dram | {("STORAGE", block["hash"]) for block in blocks if block["ssd"]}

    async def counters(self) -> dict[str, float]:
        found: dict[str, float] = (await self.ask(None))["counters"]["conductor"]
        return found

    async def until(self, condition: Callable[[dict[int, dict[str, Any]]], bool]) -> None:
        while True:
            if condition(await self.blocks()):
                return
            await asyncio.sleep(0.02)

    async def until_unknown(self, answers: int) -> None:
        """So many times nobody knew what a block is of."""
        while True:
            if (await self.counters())["kv_events_blocks_without_tokens"] >= answers:
                return
            await asyncio.sleep(0.02)

    async def put(self, node: str, blocks: Blocks, bare: bool = False) -> None:
        def talk() -> None:
            with Client.connect(self._folder / f"{node}.sock") as client:
                for key, meta in blocks:
                    data = (key * (BLOCK // 16))[:BLOCK]
                    assert client.space(SPACE).put(key, data, None if bare else meta)

        await asyncio.to_thread(talk)

    async def remove(self, node: str, blocks: Blocks) -> None:
        def talk() -> None:
            with Client.connect(self._folder / f"{node}.sock") as client:
                client.space(SPACE).remove([key for key, _ in blocks])

        await asyncio.to_thread(talk)

    @contextlib.contextmanager
    def subscriber(self) -> Iterator[Subscriber]:
        address = f"tcp://127.0.0.1:{self._events.port}"
        made = Subscriber(address, f"tcp://127.0.0.1:{self._events.replay_port}")
        try:
            yield made
        finally:
            made.close()


@contextlib.asynccontextmanager
async def pool(blocks: int = 64, ssd_blocks: int = 0, nodes: int = 1) -> AsyncIterator[Pool]:
    with tempfile.TemporaryDirectory(prefix="mp-") as folder:
        made = Pool(Path(folder), blocks, ssd_blocks)
        made.start_conductor()
        for number in range(nodes):
            made.start_node(f"node-{number}")
        try:
            for number in range(nodes):
                await made.joined(f"node-{number}")
            yield made
        finally:
            await made.end()


def names(blocks: Blocks, medium: str = "CPU") -> Told:
    return {(medium, hash_of(key)) for key, _ in blocks}


def is_published(blocks: Blocks) -> Callable[[dict[int, dict[str, Any]]], bool]:
    """All of these are, and nothing else is there."""
    return lambda found: (
        set(found) == {hash_of(key) for key, _ in blocks} and all(b["published"] for b in found.values())
    )


ONE, OTHER = keys_and_metas(tokens_of(1, 6)), keys_and_metas(tokens_of(2, 4), "salt")


def test_puts_removals_and_the_end_of_a_node_are_followed() -> None:
    async def work() -> None:
        async with pool(nodes=2) as p:
            with p.subscriber() as early, p.subscriber() as late:
                await early.catch_up()
                await p.put("node-0", ONE)
                await p.put("node-1", OTHER)
                await p.until(is_published([*ONE, *OTHER]))
                await early.catch_up()
                assert early.told == await p.told() == names([*ONE, *OTHER])
                await p.remove("node-0", ONE[4:])
                await early.until(names([*ONE[:4], *OTHER]))
                await p.end("node-1")
                await early.until(names(ONE[:4]))
                await late.catch_up()
                assert late.told == early.told == await p.told()
                p.start_node("node-1")
                await early.until(names(ONE[:4]))
                assert (await p.counters())["kv_events_blocks"] == 4

    run(work())


def test_a_block_leaves_with_its_last_copy() -> None:
    async def work() -> None:
        async with pool(nodes=2) as p:
            with p.subscriber() as follower:
                await p.put("node-0", ONE)
                await p.until(is_published(ONE))
                await asyncio.to_thread(replicate, p)
                await p.until(lambda found: all(len(block["dram"]) == 2 for block in found.values()))
                await follower.catch_up()
                await p.end("node-0")
                await p.until(lambda found: all(block["dram"] == ["node-1"] for block in found.values()))
                await p.put("node-1", OTHER)
                await follower.until(names([*ONE, *OTHER]))
                # Nothing was said of what stayed.
                assert follower.removals == 0

    def replicate(p: Pool) -> None:
        with Client.connect(p._folder / "node-0.sock") as client:
            space = client.space(SPACE)
            assert [space.replicas(key, 2) for key, _ in ONE] == [2] * len(ONE)

    run(work())


def test_evictions_and_tiers_are_followed() -> None:
    async def work() -> None:
        async with pool(blocks=16, ssd_blocks=64) as p:
            with p.subscriber() as follower:
                prompts = [keys_and_metas(tokens_of(seed, 4)) for seed in range(10, 18)]
                await follower.catch_up()
                for prompt in prompts:
                    await p.put("node-0", prompt)
                last = names(prompts[-1])
                await p.until(lambda found: any(not b["dram"] for b in found.values()))
                while not (last <= follower.told and follower.told == await p.told()):
                    await follower.catch_up()
                    await asyncio.sleep(0.05)
                mediums = {medium for medium, _ in follower.told}
                assert mediums == {"CPU", "STORAGE"}
                assert len([medium for medium, _ in follower.told if medium == "CPU"]) <= 16

    run(work())


def test_a_new_conductor_tells_it_all_again() -> None:
    async def work() -> None:
        async with pool(ssd_blocks=64) as p:
            with p.subscriber() as follower, p.subscriber() as late:
                await follower.catch_up()
                await p.put("node-0", ONE)
                await follower.until(names(ONE))
                await p.end("conductor")
                p.start_conductor()
                await p.until(is_published(ONE))
                await p.put("node-0", OTHER)
                await follower.until(names([*ONE, *OTHER]))
                await late.catch_up()
                assert late.told == await p.told()

    run(work())


def test_what_nobody_can_tell_the_tokens_of_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client of the pool need not say what its blocks are of; or says it wrongly."""
    monkeypatch.setattr(module, "RETRY_SECONDS", (0.05,))

    async def work() -> None:
        async with pool() as p:
            with p.subscriber() as follower:
                wrong = [(key, BlockMeta(meta.parent, meta.index, ONE[0][1].tokens)) for key, meta in OTHER[1:3]]
                await p.put("node-0", ONE[:2], bare=True)
                await p.put("node-0", wrong)
                await p.put("node-0", ONE[2:])
                await p.until_unknown(8)
                await follower.catch_up()
                assert follower.told == await p.told() == names(ONE[2:])
                shown = await p.blocks()
                assert {hash_of(key) for key, _ in ONE[:2]} < {
                    h for h, block in shown.items() if not block["published"]
                }
                assert len(shown) == len(ONE) + 2

    run(work())


def test_tokens_that_are_told_later_are_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode worker says what prefill has written from elsewhere."""
    monkeypatch.setattr(module, "RETRY_SECONDS", (0.05,) * 200)

    async def work() -> None:
        async with pool() as p:
            with p.subscriber() as follower:
                await follower.catch_up()
                await asyncio.to_thread(put_in_two_steps, p, asyncio.get_running_loop())
                await follower.until(names(ONE))

    def put_in_two_steps(p: Pool, loop: asyncio.AbstractEventLoop) -> None:
        keys = [key for key, _ in ONE]
        with (
            NodeClient.connect(p._folder / "node-0.sock", name="w", incarnation="1") as client,
            client.open_room(SPACE, keys).result(10) as room,
        ):
            for at, key in enumerate(keys):
                view = room.view(at)
                assert view is not None
                view[:] = key[0]
                client.complete(room, [(at, 0, SPACE.runs)], sums(view))
            until = asyncio.run_coroutine_threadsafe(p.until_unknown(1), loop)
            until.result(20)
            client.tell_tokens(room, tokens_of(1, 6))

    def sums(view: Any) -> list[int]:
        return [checksum(run) for run in view.reshape(SPACE.runs, -1)]

    run(work())


def test_pages_hold_every_block_once_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conductor, "BLOCKS_A_PAGE", 3)

    async def work() -> None:
        async with pool() as p:
            await p.put("node-0", ONE)
            await p.put("node-0", OTHER)
            await p.until(is_published([*ONE, *OTHER]))
            pages, after = [], ""
            while after is not None:
                page = await p.ask(after)
                pages.append(page["blocks"])
                after = page["next"]
            assert len(pages) >= 3
            shown = [block for page in pages for block in page]
            assert sorted(block["key"] for block in shown) == sorted(key.hex() for key, _ in (*ONE, *OTHER))
            assert all(block["dram"] == ["node-0"] and block["ssd"] == [] for block in shown)
            assert await p.ask("9.9") == {"blocks": [], "next": None}
            for wrong in ("x", "1", "1.2.3", "-1.0", "1." + "9" * 40):
                assert await p.ask(wrong) is None

    run(work())
