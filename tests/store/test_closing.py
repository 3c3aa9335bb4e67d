"""Clients that are closed, or interrupted, in the middle of a call: nobody is harmed, and nothing is left of them."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from moonpool.core.vocabulary import NodePeer
from moonpool.messenger.transfer import Bytes
from moonpool.store import Client, PoolError, Space, near
from moonpool.store.copying import copy
from moonpool.store.far import FarHome

from .kit import BLOCK, SECONDS, SPACE, bytes_of, eventually, keys_of

Connect = Callable[..., Client]
KEYS = keys_of("closing", 2)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Copies of clients on this host: set once one has begun; it goes on when the other is set."""
    begun, may_go_on = threading.Event(), threading.Event()

    def held_copy(target: Bytes, source: Bytes) -> None:
        begun.set()
        assert may_go_on.wait(SECONDS)
        copy(target, source)

    monkeypatch.setattr(near, "copier", lambda nbytes: held_copy)
    return begun, may_go_on


@pytest.mark.parametrize("does", ["put", "get_into"])
def test_the_node_lends_memory_to_nobody_else_while_a_closed_client_copies(
    node: NodePeer, connect: Connect, held: tuple[threading.Event, threading.Event], does: str
) -> None:
    begun, may_go_on = held
    far, closing = connect(node, "far"), connect(node, "near")
    if does == "get_into":
        assert far.space(SPACE).put(KEYS[0], bytes_of(KEYS[0]))
    space, outcome = closing.space(SPACE), list[object]()

    def work() -> None:
        target = np.zeros(BLOCK, np.uint8)
        try:
            outcome.append(space.put(KEYS[0], bytes_of(KEYS[0])) if does == "put" else _leased(space, closing, target))
        except PoolError as e:
            outcome.append(e)

    def lent() -> float:
        stats = far.stats()
        return stats["rooms"] + stats["leases"]

    worker, closer = threading.Thread(target=work), threading.Thread(target=closing.close)
    worker.start()
    assert begun.wait(SECONDS)
    closer.start()
    eventually(lambda: _is_refused(space), "the client is closed")
    assert [lent() for _ in range(20)] == [1.0] * 20
    may_go_on.set()
    worker.join(SECONDS)
    closer.join(SECONDS)
    assert len(outcome) == 1
    assert isinstance(outcome[0], PoolError) if does == "put" else outcome == [True]
    eventually(lambda: not lent(), "all is given back")


def _leased(space: Space, client: Client, target: Bytes) -> bool:
    """As `get_into` where a block is not on the node's board."""
    home = client._home
    assert isinstance(home, near.NearHome)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(home._line.sights, "find", lambda *_: None)
        return bool(space.get_into(KEYS[0], target))


def _is_refused(space: Space) -> bool:
    with contextlib.suppress(PoolError):
        space.exists(KEYS[1])
        return False
    return True


def test_a_closed_client_keeps_no_arena_and_no_descriptor(node: NodePeer) -> None:
    def kept() -> tuple[int, int]:
        return Path("/proc/self/maps").read_text().count("moonpool-"), len(list(Path("/proc/self/fd").iterdir()))

    def connect_once() -> None:
        with Client.connect(node.socket_path) as client:
            assert client.space(SPACE).exists(KEYS[0]) is False

    connect_once()
    gc.collect()
    gc.disable()
    try:
        before = kept()
        for _ in range(3):
            connect_once()
        eventually(lambda: kept() <= before, "all is closed")
    finally:
        gc.enable()


@pytest.mark.parametrize("way", ["near", "far"])
def test_no_call_enters_a_condition_that_an_exception_of_a_signal_handler_would_leave_taken(
    node: NodePeer, connect: Connect, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`threading.Condition.__enter__` is of Python: an exception can come between taking the lock and its own end."""
    pool = connect(node, way)
    home = pool._home
    ours = home._free if isinstance(home, FarHome) else home._line.caller._changed
    enter = threading.Condition.__enter__

    def checked(condition: threading.Condition) -> bool:
        assert condition is not ours
        return enter(condition)

    monkeypatch.setattr(threading.Condition, "__enter__", checked)
    space = pool.space(SPACE)
    assert space.put(KEYS[0], bytes_of(KEYS[0]))
    assert space.get_into(KEYS[0], np.zeros(BLOCK, np.uint8))
    assert space.exists_many(KEYS) == [True, False]
    pool.close()
