"""The pool's API in a coroutine."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from moonpool.core.vocabulary import NodePeer
from moonpool.store import AsyncClient, AsyncSpace, Client, PoolError, Space
from moonpool.store.client import NodeClient

from .kit import BLOCK, SECONDS, SPACE, bytes_of, eventually, keys_of

Join = Callable[..., NodeClient]
K = keys_of("k", 8)


@pytest.fixture(params=["near", "far"])
def address(request: pytest.FixtureRequest, node: NodePeer) -> str:
    return node.socket_path if request.param == "near" else node.data_address


def stats(observer: NodeClient) -> dict[str, float]:
    return observer.stats().result(SECONDS)


def watches(observer: NodeClient) -> float:
    return stats(observer)["watches"]


def test_it_does_what_the_other_does(address: str) -> None:
    async def main() -> None:
        async with await AsyncClient.connect(address, timeout=SECONDS) as pool:
            space = pool.space(SPACE)
            assert await space.put(K[0], bytes_of(K[0]))
            assert await space.put_many(K[1:3], [bytes_of(key) for key in K[1:3]]) == [True, True]
            assert await space.put_from(K[3], [*bytes_of(K[3]).reshape(4, -1)])
            async with space.get([K[3], K[4], K[0]]) as blocks:
                assert blocks[1] is None
                assert np.array_equal(blocks[0], bytes_of(K[3]))
                assert np.array_equal(blocks[2], bytes_of(K[0]))
            target = bytearray(BLOCK)
            assert await space.get_into(K[1], [target])
            assert target == bytes_of(K[1]).tobytes()
            assert await space.exists(K[0])
            assert await space.exists_many(K[3:5]) == [True, False]
            assert await space.pin(K[:1], 600) == [True]
            with pytest.raises(PoolError, match="pinned"):
                await space.remove(K[:1])
            assert await space.unpin(K[:1]) == [True]
            assert await space.remove(K[:4]) == [True] * 4
            assert await space.replicas(K[0]) == 0
            assert (await pool.stats())["leases"] == 0

    asyncio.run(main())


def test_calls_run_beside_each_other(address: str, node: NodePeer, join: Join) -> None:
    writer = join(node)
    room = writer.open_room(SPACE, K[:1]).result(SECONDS)

    async def main() -> None:
        async with await AsyncClient.connect(address, timeout=SECONDS) as pool:
            space = pool.space(SPACE)

            async def wait() -> bool:
                async with space.get(K[:1], wait_until=time.monotonic() + SECONDS) as blocks:
                    return blocks[0] is not None

            waiting = asyncio.create_task(wait())
            await asyncio.to_thread(eventually, lambda: watches(writer) == 1, "it waits")
            assert await space.put(K[1], bytes_of(K[1]))
            assert not waiting.done()
            room.close()
            assert await waiting is False

    asyncio.run(main())


def test_a_cancelled_get_leaves_no_lease(address: str, node: NodePeer, join: Join) -> None:
    writer = join(node)
    room = writer.open_room(SPACE, K[:2]).result(SECONDS)

    async def main() -> None:
        async with await AsyncClient.connect(address, timeout=SECONDS) as pool:
            space = pool.space(SPACE)
            await space.put(K[2], bytes_of(K[2]))

            async def wait() -> None:
                async with space.get([K[2], *K[:2]], wait_until=time.monotonic() + SECONDS):
                    pytest.fail("it was cancelled")

            waiting = asyncio.create_task(wait())
            await asyncio.to_thread(eventually, lambda: watches(writer) == 1, "it waits")
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            room.close()
            await asyncio.to_thread(eventually, lambda: stats(writer)["lookups"] == 1, "it was leased all the same")
            await asyncio.to_thread(eventually, lambda: stats(writer)["leases"] == 0, "and let go")
            assert await space.remove([K[2]]) == [True]

    asyncio.run(main())


def test_a_cancelled_put_is_over_when_it_says_so(address: str, node: NodePeer, join: Join) -> None:
    async def main() -> None:
        async with await AsyncClient.connect(address, timeout=SECONDS) as pool:
            space = pool.space(SPACE)
            data = [bytes_of(key).copy() for key in K]
            putting = asyncio.create_task(space.put_many(K, data))
            await asyncio.sleep(0)
            putting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await putting
            for buffer in data:
                buffer[:] = 0
            async with space.get(K) as blocks:
                assert all(block is None or block.any() for block in blocks)

    asyncio.run(main())
    observer = join(node)
    eventually(lambda: stats(observer)["rooms"] == 0, "nothing is being written")


def test_a_closed_client_says_so(node: NodePeer) -> None:
    async def main() -> None:
        pool = await AsyncClient.connect(node.socket_path, timeout=SECONDS)
        space = pool.space(SPACE)
        await pool.close()
        for call in (pool.stats(), space.exists(K[0]), space.pin(K[:1], 60)):
            with pytest.raises(PoolError, match="this client was closed"):
                await call
        with pytest.raises(PoolError, match="this client was closed"):
            async with space.get(K[:1]):
                pass

    asyncio.run(main())


def test_nobody_listens_there() -> None:
    with pytest.raises(PoolError, match="no node listens"):
        asyncio.run(AsyncClient.connect("/tmp/no-such-node.sock", timeout=0.01))
    with pytest.raises(PoolError, match="give the path of a node's socket, or host:port"):
        Client.connect("127.0.0.1", timeout=0)
    with pytest.raises(PoolError, match="not None"):
        Client.connect(None)  # type: ignore[arg-type]
    with pytest.raises(PoolError, match="is the port missing"):
        Client.connect("127.0.0.1")


@pytest.mark.parametrize(("plain", "other"), [(Client, AsyncClient), (Space, AsyncSpace)])
def test_both_have_the_same_calls(plain: type[Any], other: type[Any]) -> None:
    names = {name for name, value in vars(plain).items() if inspect.isfunction(value) and not name.startswith("_")}
    for name in names & vars(other).keys():
        ours, theirs = inspect.signature(getattr(plain, name)), inspect.signature(getattr(other, name))
        assert ours.parameters.keys() == theirs.parameters.keys(), name
    assert names - vars(other).keys() <= {"keys_of"}
