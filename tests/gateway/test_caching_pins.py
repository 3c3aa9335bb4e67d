"""Cached contexts against a real node: pins are renewed, end with their gateway, and what is lost is computed again."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from moonpool.core.events import RequestArrived
from moonpool.core.vocabulary import NodePeer
from moonpool.gateway.caching import keeper, pinning
from moonpool.gateway.caching.context import Context
from moonpool.gateway.caching.files import Files
from moonpool.store import Client
from moonpool.store.extents import PAGE_BYTES
from moonpool.wire.messages import Work
from tests.gateway.conftest import Open
from tests.gateway.kit import SPACE, Stage, run, until
from tests.store.conftest import clean, run_dir
from tests.store.kit import SECONDS, Conductor

__all__ = ["run_dir"]

BLOCKS = 3
PROMPT = list(range(100, 100 + BLOCKS * SPACE.block_tokens + 5))
PIN_SECONDS = 1.0


@pytest.fixture
def node(run_dir: Path) -> Iterator[NodePeer]:
    with clean(Conductor(run_dir)) as conductor:
        yield conductor.start_node("node-0")


@pytest.fixture
def pool(node: NodePeer) -> Iterator[Client]:
    with Client.connect(node.socket_path, timeout=SECONDS) as client:
        yield client


@pytest.fixture(autouse=True)
def haste(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (keeper, pinning):
        monkeypatch.setattr(module, "PIN_SECONDS", PIN_SECONDS)
    monkeypatch.setattr(keeper, "RENEW_SECONDS", 0.2)
    monkeypatch.setattr(keeper, "TICK_SECONDS", 0.02)
    monkeypatch.setattr(pinning, "ARRIVE_SECONDS", 0.3)


class Prefill:
    """What the scripted cluster does with a request: its whole blocks come to the node."""

    def __init__(self, pool: Client) -> None:
        self._space = pool.space(SPACE)
        self.stores = True

    def __call__(self, work: Work) -> list[int]:
        keys = self._space.keys_of(work.tokens)
        if self.stores:
            self._space.put_many(keys, [bytes(SPACE.block_bytes)] * len(keys))
        return [5]

    def lose(self) -> None:
        """One block in the middle."""
        keys = self._space.keys_of(PROMPT)[1:2]
        self._space.unpin(keys)
        self._space.remove(keys)


async def join(s: Stage, node: NodePeer) -> None:
    s.node = node
    s.announce()
    await until(lambda: s.gateway.cluster.fleet.nodes == (node,))


async def make(s: Stage, prompt: list[int] = PROMPT, **fields: object) -> dict[str, Any]:
    answer = await s.post("/v1/caching", {"prompt": prompt, **fields})
    assert answer.status_code == 200, answer.text
    made: dict[str, Any] = answer.json()
    return made


async def delete(s: Stage, made: dict[str, Any]) -> httpx.Response:
    return await s.client.delete(f"{s.url}/v1/caching/{made['id']}")


async def pins(pool: Client) -> float:
    return (await asyncio.to_thread(pool.stats))["pins"]


def test_pins_are_renewed_and_end_when_nobody_renews_them(opened: Open, node: NodePeer, pool: Client) -> None:
    async def test() -> None:
        async with opened(answer=Prefill(pool)) as s:
            await join(s, node)
            made = await make(s)
            assert (made["status"], made["pinned_tokens"], made["bytes"]) == ("ready", 192, 3 * SPACE.block_bytes)
            began = time.monotonic()
            while time.monotonic() < began + 3 * PIN_SECONDS:
                assert await pins(pool) == BLOCKS
                await asyncio.sleep(0.05)
            assert len(s.got("conductor", RequestArrived)) == 1, "renewing computes nothing"
        assert await pins(pool) == BLOCKS, "a gateway that is started again finds them"
        while await pins(pool):
            assert time.monotonic() < began + SECONDS, "they stay"
            await asyncio.sleep(0.05)

    run(test())


def test_what_is_lost_is_computed_again(opened: Open, node: NodePeer, pool: Client) -> None:
    async def test() -> None:
        prefill = Prefill(pool)
        async with opened(answer=prefill) as s:
            await join(s, node)
            made = await make(s)
            (held,) = s.gateway.keeper.book
            await asyncio.to_thread(prefill.lose)
            await until(lambda: s.gateway.keeper.totals["contexts_computed_again"] == 1)
            await until(lambda: held.is_ready)
            assert await pins(pool) == BLOCKS
            second = await s.arrival(2)
            assert (second.priority, second.prompt_tokens) == ("batch", BLOCKS * SPACE.block_tokens)
            shown = (await s.client.get(f"{s.url}/v1/caching/{made['id']}")).json()
            assert shown == made

    run(test())


def test_what_cannot_be_pinned_is_said_and_tried_again(opened: Open, node: NodePeer, pool: Client) -> None:
    async def test() -> None:
        prefill = Prefill(pool)
        async with opened(answer=prefill) as s:
            await join(s, node)
            prefill.stores = False
            failed = await s.post("/v1/caching", {"prompt": PROMPT})
            assert (failed.status_code, failed.json()["error"]["code"]) == (503, "not_pinned")
            assert await pins(pool) == 0
            prefill.stores = True
            made = await make(s)
            (held,) = s.gateway.keeper.book
            prefill.stores = False
            await asyncio.to_thread(prefill.lose)
            await until(lambda: held.problem)
            shown = (await s.client.get(f"{s.url}/v1/caching/{made['id']}")).json()
            assert shown["status"] == "pending"
            assert "not pinned: it was gone" in shown["problem"]
            assert await pins(pool) == 0
            prefill.stores = True
            await until(lambda: held.is_ready)
            assert await pins(pool) == BLOCKS
            shown = (await s.client.get(f"{s.url}/v1/caching/{made['id']}")).json()
            assert shown == made

    run(test())


# ---- several at a time


@pytest.fixture
def lasting(haste: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pins that no renewal makes good again while a test runs."""
    monkeypatch.setattr(pinning, "PIN_SECONDS", 600.0)
    monkeypatch.setattr(keeper, "PIN_SECONDS", 600.0)


class Gate:
    """In the way of what the gateway does with the files of contexts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.is_shut = False
        self.waits = threading.Event()
        self._open = threading.Event()
        work = getattr(Files, name)

        def wait(files: Files, context: Context) -> None:
            if self.is_shut:
                self.waits.set()
                assert self._open.wait(SECONDS)
            work(files, context)

        monkeypatch.setattr(Files, name, wait)

    def open(self) -> None:
        self._open.set()


def test_the_end_of_a_context_leaves_the_blocks_of_one_that_is_being_made(
    opened: Open, node: NodePeer, pool: Client, lasting: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    writing = Gate(monkeypatch, "write")

    async def test() -> None:
        async with opened(answer=Prefill(pool), caching_dir=str(tmp_path / "caching")) as s:
            await join(s, node)
            first = await make(s)
            writing.is_shut = True
            making = asyncio.create_task(make(s))
            await asyncio.to_thread(writing.waits.wait)
            deleting = asyncio.create_task(delete(s, first))
            await until(lambda: first["id"] not in {held.context.id for held in s.gateway.keeper.book})
            for _ in range(20):
                assert await pins(pool) == BLOCKS
                await asyncio.sleep(0.01)
            writing.open()
            second = await making
            assert (await deleting).status_code == 200
            assert await pins(pool) == BLOCKS
            await delete(s, second)
            assert await pins(pool) == 0

    run(test())


def test_whoever_comes_and_goes_nothing_loses_its_pins_and_nothing_keeps_them(
    opened: Open, node: NodePeer, pool: Client, lasting: None
) -> None:
    """Forty contexts with beginnings in common, made, deleted and left by their clients at the same time."""
    rng = random.Random(7)

    async def test() -> None:
        async with opened(answer=Prefill(pool)) as s:
            await join(s, node)

            async def life(n: int) -> None:
                blocks = rng.randrange(1, 5)
                prompt = [*range(100, 100 + blocks * SPACE.block_tokens), *[n % 3] * SPACE.block_tokens]
                if n % 4 == 3:
                    leaving = asyncio.create_task(s.post("/v1/caching", {"prompt": prompt}))
                    await asyncio.sleep(rng.random() * 0.1)
                    leaving.cancel()
                    return
                made = await make(s, prompt)
                await asyncio.sleep(rng.random() * 0.05)
                if n % 2:
                    assert (await delete(s, made)).status_code == 200

            await asyncio.gather(*(life(n) for n in range(40)))
            await until(lambda: s.gateway.seats.taken == 0)
            book = s.gateway.keeper.book
            for held in book:  # a client that left at the last moment has made one
                assert held.pinned is not None
            needed = book.needed(node, SPACE)
            began = time.monotonic()
            while await pins(pool) != len(needed):
                assert time.monotonic() < began + SECONDS, "blocks are pinned for nobody, or are not"
                await asyncio.sleep(0.01)
            assert len(needed) >= 4
            for held in book:
                await s.client.delete(f"{s.url}/v1/caching/{held.context.id}")
            assert await pins(pool) == 0

    run(test())


def test_twenty_at_once_are_cached_or_told_that_the_share_is_taken(
    opened: Open, node: NodePeer, pool: Client, lasting: None
) -> None:
    blocks = 6

    async def test() -> None:
        async with opened(answer=Prefill(pool)) as s:
            await join(s, node)
            prompts = [[n + 100] * (blocks * SPACE.block_tokens) for n in range(20)]
            answers = await asyncio.gather(*(s.post("/v1/caching", {"prompt": prompt}) for prompt in prompts))
            made = [answer.json()["id"] for answer in answers if answer.status_code == 200]
            told = {(a.status_code, a.json()["error"]["code"]) for a in answers if a.status_code != 200}
            assert told == {(429, "caching_full")}
            stats = await asyncio.to_thread(pool.stats)
            assert len(made) == stats["pinnable_bytes"] // (blocks * PAGE_BYTES)
            assert stats["pins"] == len(made) * blocks
            for id_ in made:
                await s.client.delete(f"{s.url}/v1/caching/{id_}")
            assert await pins(pool) == 0

    run(test())


# ---- what takes long holds up nothing else


def test_pins_are_renewed_while_the_disk_takes_its_time(
    opened: Open, node: NodePeer, pool: Client, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    removing = Gate(monkeypatch, "remove")

    async def test() -> None:
        async with opened(answer=Prefill(pool), caching_dir=str(tmp_path / "caching")) as s:
            await join(s, node)
            made = await make(s)
            await make(s, [5] * SPACE.block_tokens, ttl=1)
            removing.is_shut = True
            await asyncio.to_thread(removing.waits.wait)
            began = time.monotonic()
            while time.monotonic() < began + 3 * PIN_SECONDS:
                assert await pins(pool) >= BLOCKS
                await asyncio.sleep(0.05)
            assert (await s.client.get(f"{s.url}/v1/caching/{made['id']}")).json()["status"] == "ready"
            removing.open()

    run(test())


def test_what_a_node_still_has_does_not_wait_for_what_must_be_computed(
    opened: Open, node: NodePeer, pool: Client
) -> None:
    async def test() -> None:
        prefill = Prefill(pool)
        async with opened(answer=prefill) as s:
            await join(s, node)
            await make(s)
            other = await make(s, [5] * SPACE.block_tokens)
            lost, there = s.gateway.keeper.book
            s.places = False  # whatever is to be computed waits for its place
            await asyncio.to_thread(prefill.lose)
            await s.arrival(3)
            there.pinned = None
            await until(lambda: there.is_ready)
            assert not lost.is_ready
            assert (await s.client.get(f"{s.url}/v1/caching/{other['id']}")).json()["status"] == "ready"
            s.place(await s.arrival(3))
            await until(lambda: lost.is_ready)

    run(test())
