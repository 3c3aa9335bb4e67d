"""A client in a process that was forked from its own: it must never read the other's answers."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
import warnings
from collections.abc import Callable

import numpy as np
import pytest

from moonpool.core.vocabulary import NodePeer
from moonpool.store import AsyncClient, Client, PoolError

from .kit import SECONDS, SPACE, bytes_of, keys_of

Connect = Callable[..., Client]
K = keys_of("f", 2)


def in_child(work: Callable[[], None]) -> int:
    """Its exit code: 0 where `work` raised nothing."""
    with warnings.catch_warnings():
        # The child calls little more than what is tested.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        signal.alarm(int(SECONDS))
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def expect_refusal(call: Callable[[], object]) -> None:
    with pytest.raises(PoolError, match="made in another process"):
        call()


@pytest.mark.parametrize("way", ["near", "far"])
def test_a_child_is_refused_and_its_parent_not_disturbed(node: NodePeer, connect: Connect, way: str) -> None:
    pool = connect(node, way)
    space = pool.space(SPACE)
    space.put(K[0], bytes_of(K[0]))
    with space.get(K[:1]) as blocks:

        def work() -> None:
            target = bytearray(space.block_bytes)
            for call in (
                lambda: space.exists(K[0]),
                lambda: space.put(K[1], bytes_of(K[1])),
                lambda: space.get(K[:1]),
                lambda: space.get_into(K[0], target),
                pool.stats,
            ):
                expect_refusal(call)
            if way == "near":
                expect_refusal(blocks.close)
            pool.close()
            # One of its own is as good as any.
            address = node.socket_path if way == "near" else node.data_address
            with Client.connect(address) as own:
                assert own.space(SPACE).exists_many(K) == [True, False]

        assert in_child(work) == 0
        assert np.array_equal(blocks[0], bytes_of(K[0]))
    assert space.exists_many(K) == [True, False]
    assert space.put(K[1], bytes_of(K[1]))


def test_an_asynchronous_client_is_refused_in_a_child(node: NodePeer) -> None:
    async def parent() -> int:
        async with await AsyncClient.connect(node.socket_path) as pool:
            space = pool.space(SPACE)
            await space.put(K[0], bytes_of(K[0]))

            def work() -> None:
                # No loop runs in the child: what a call does before its first wait is enough to see.
                for call in (lambda: space.exists(K[0]), pool.stats, lambda: space.get(K[:1]).__aenter__()):
                    expect_refusal(lambda call=call: call().send(None))  # type: ignore[misc]

            code = in_child(work)
            assert await space.exists(K[0])
            return code

    assert asyncio.run(parent()) == 0


def test_a_child_keeps_nothing_of_its_parents(node: NodePeer, connect: Connect) -> None:
    """Else what a dead parent had leased would be held for as long as its children live."""
    observer = connect(node, "near")

    def parent() -> None:
        pool = Client.connect(node.socket_path)
        pool.space(SPACE).put(K[0], bytes_of(K[0]))
        pool.space(SPACE).get(K[:1])
        if not os.fork():
            ours.close()
            theirs.recv(1)
            os._exit(0)

    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert in_child(parent) == 0
        until = time.monotonic() + SECONDS
        while observer.stats()["leases"] and time.monotonic() < until:
            time.sleep(0.01)
        assert observer.stats()["leases"] == 0
