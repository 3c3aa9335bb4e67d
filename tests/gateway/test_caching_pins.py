"""Cached contexts against a real node: pins are renewed, end with their gateway, and what is lost is computed again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moonpool.core.events import RequestArrived
from moonpool.core.vocabulary import NodePeer
from moonpool.gateway.caching import keeper, pinning
from moonpool.store import Client
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


async def make(s: Stage) -> dict[str, Any]:
    answer = await s.post("/v1/caching", {"prompt": PROMPT})
    assert answer.status_code == 200, answer.text
    made: dict[str, Any] = answer.json()
    return made


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
