"""What the pool beneath the servers has: told by its nodes where the servers' connectors say what their blocks are
called, else estimated."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from moonpool.core.blocks import block_keys
from moonpool.core.vocabulary import KeySpace, KeySpaceId, PartId
from moonpool.live.external.cache import CachePart
from moonpool.live.external.config import PoolUse
from moonpool.wire.link import Link

from .fake import BLOCK, FakeVllm, answer_to, fakes
from .kit import Front, front, instances, run

SPACE = KeySpace(KeySpaceId("c0ffee"), BLOCK, runs=3, run_bytes=500)
PROMPT = [11 + at % 7 for at in range(3 * BLOCK + 5)]


@dataclass
class Scene:
    front: Front
    servers: list[FakeVllm]
    node: CachePart
    """Of the pool; it says what a test tells it to."""

    async def parts(self) -> set[str]:
        return {part["id"] for part in (await self.front.state())["parts"]}


@asynccontextmanager
async def scene(pool: PoolUse, *spaces: KeySpace | None) -> AsyncIterator[Scene]:
    async with fakes(len(spaces)) as servers:
        for server, space in zip(servers, spaces, strict=True):
            server.space = space
        async with front(instances(servers, pool=pool)) as f:
            link = Link(PartId("node-0"), "127.0.0.1", 0, None)
            node = CachePart(link, f.conductor, SPACE, 64, True, is_pool=True)
            living = asyncio.create_task(node.run())
            try:
                await f.until(lambda state: any(part["id"] == "node-0" for part in state["parts"]), "its node is there")
                yield Scene(f, servers, node)
            finally:
                living.cancel()
                await asyncio.wait((living,))
                node.close()


def blocks_of(part: str, count: int) -> Any:
    return lambda state: any(p["id"] == part and p["blocks"]["dram"] == count for p in state["parts"])


def test_what_the_pool_s_nodes_have_is_a_hit_at_any_server() -> None:
    async def test() -> None:
        async with scene("exact", SPACE, SPACE) as s:
            for server in s.servers:
                server.per_token = 0.005  # to load has to be worth it
            assert (await s.front.ask(PROMPT, 3)).cached_tokens == 0
            other = [*range(200, 200 + 8 * BLOCK), 7]
            s.node.use(block_keys(other, SPACE))
            await s.front.until(blocks_of("node-0", 8), "its blocks are known")
            answer = await s.front.ask(other, 3)
            assert (answer.tokens, answer.cached_tokens) == (answer_to(other, 3), 8 * BLOCK)
            assert not {part for part in await s.parts() if part.startswith("vllm-pool")}

    run(test())


@pytest.mark.parametrize(("pool", "space"), [("exact", None), ("estimated", SPACE)])
def test_else_it_is_estimated(pool: PoolUse, space: KeySpace | None) -> None:
    async def test() -> None:
        async with scene(pool, space) as s:
            await s.front.ask(PROMPT, 3)
            await s.front.until(blocks_of(f"vllm-pool-{BLOCK}", 3), "what was computed is taken to be there")

    run(test())


def test_one_that_tells_nonsense_does_not_serve() -> None:
    async def test() -> None:
        async with fakes(1) as servers:
            servers[0].space = KeySpace(KeySpaceId("x" * 1000), BLOCK, 1, 1)
            async with front(instances(servers, pool="exact"), there=False) as f:
                await asyncio.sleep(1.0)
                await f.until(lambda state: all(part["id"] != "vllm-0" for part in state["parts"]), "it is not there")
                servers[0].space = SPACE
                await f.until_there("vllm-0")

    run(test())
