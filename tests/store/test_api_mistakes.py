"""A caller's mistake is named, costs its own call only, and never the connection and what is leased by it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from moonpool.core.vocabulary import NodePeer
from moonpool.messenger import asking
from moonpool.messenger.channel import Channel
from moonpool.messenger.questions import Exists, GetBlocks, Marks
from moonpool.messenger.waiting import RefusedError
from moonpool.store import BlockMeta, Client, PoolError, Space, key_of
from moonpool.store.far import FarHome
from moonpool.store.near import NearHome

from .kit import BLOCK, SECONDS, SPACE, Conductor, bytes_of, keys_of

Connect = Callable[..., Client]
K = keys_of("m", 6)
DATA = bytes(BLOCK)


@pytest.fixture(params=["near", "far"])
def space(request: pytest.FixtureRequest, node: NodePeer, connect: Connect) -> Space:
    return connect(node, request.param).space(SPACE)


MISTAKES: dict[str, tuple[Callable[[Any], object], str]] = {
    "a dict for a meta": (lambda s: s.put(K[1], DATA, {"index": 1}), "is a BlockMeta, not a dict"),
    "one meta for a list": (lambda s: s.put_many(K[1:2], [DATA], BlockMeta()), "one a key, not a BlockMeta"),
    "metas of other keys": (lambda s: s.put_many(K[1:3], [DATA] * 2, [BlockMeta()]), "2 keys with 1 metas"),
    "a parent that is text": (lambda s: s.put(K[1], DATA, BlockMeta.of(parent="abc")), "as bytes, not 'abc'"),
    "a short parent": (lambda s: s.put(K[1], DATA, BlockMeta.of(parent=b"abc")), "3 bytes, not 16"),
    "an index below 0": (lambda s: s.put(K[1], DATA, BlockMeta.of(index=-1)), "index.*not -1"),
    "an index without end": (lambda s: s.put(K[1], DATA, BlockMeta.of(index=1 << 70)), "index.*0 to"),
    "an index that is text": (lambda s: s.put(K[1], DATA, BlockMeta.of(index="1")), "whole number, not '1'"),
    "a token below 0": (lambda s: s.put(K[1], DATA, BlockMeta.of(tokens=[-1])), "whole numbers from 0"),
    "tokens that are no bytes": (lambda s: s.put(K[1], DATA, BlockMeta(tokens=[1])), "BlockMeta.of makes"),
    "the wall clock": (lambda s: s.get(K[:1], wait_until=time.time() + 5), r"time.monotonic\(\), not of time.time"),
    "a text to wait until": (lambda s: s.get_into(K[0], bytearray(BLOCK), wait_until="5"), "number of seconds"),
    "no time to wait until": (lambda s: s.get(K[:1], wait_until=math.nan), "wait_until is a number of seconds"),
    "layers as a number": (lambda s: s.get(K[:1], layers=3), r"give \(first, count\)"),
    "three layers": (lambda s: s.get(K[:1], layers=(1, 2, 3)), r"give \(first, count\)"),
    "a text for a time": (lambda s: s.pin(K[:1], "60"), "number of seconds, not '60'"),
    "replicas as a text": (lambda s: s.replicas(K[0], "2"), "whole number, not '2'"),
    "too many replicas": (lambda s: s.replicas(K[0], 1 << 70), "0 to 1048576 nodes"),
    "a key that is a number": (lambda s: s.get([1, 2]), "not those of int"),
    "a number for a list": (lambda s: s.exists_many(5), "a list of block keys, not a int"),
    "one buffer for many": (lambda s: s.put_many(K[1:2], DATA), "give a list, one a key, not a bytes"),
    "two prompts": (lambda s: s.keys_of(np.zeros((2, 16), np.int64)), r"one-dimensional.*of shape \(2, 16\)"),
    "a prompt that is text": (lambda s: s.keys_of("hello" * 16), "one-dimensional token ids, not a str"),
    "a token id below 0": (lambda s: s.keys_of([-1] * 16), "whole numbers from 0 to 4294967295"),
    "a token id that is no number": (lambda s: s.keys_of(["a"] * 16), "whole numbers from 0"),
    "a salt that is a number": (lambda s: s.keys_of([1] * 16, 5), "a salt is a text"),
    "a key of a number": (lambda s: key_of("a", 5), "texts and bytes, not of 5"),
}


@pytest.mark.parametrize(("call", "reason"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_named_and_leases_outlast_it(space: Space, call: Callable[[Any], object], reason: str) -> None:
    space.put(K[0], bytes_of(K[0]))
    with space.get(K[:1]) as (block,):
        with pytest.raises(PoolError, match=reason):
            call(space)
        assert np.array_equal(block, bytes_of(K[0]))
    assert space.exists_many(K) == [True, *[False] * 5]


def test_whatever_can_be_meant_is_taken(space: Space) -> None:
    metas = [None, BlockMeta.of(K[0], np.int64(1), np.arange(16))]  # type: ignore[arg-type]
    assert space.put_many(K[:2], [bytes_of(key) for key in K[:2]], metas) == [True, True]  # type: ignore[arg-type]
    assert space.metas(K[:2]) == [BlockMeta(), BlockMeta.of(K[0], 1, range(16))]
    assert space.exists_many(key for key in K[:2]) == [True, True]  # type: ignore[arg-type]
    assert space.remove({K[1]: None}.keys()) == [True]  # type: ignore[arg-type]
    assert space.exists(bytearray(K[0]))  # type: ignore[arg-type]
    with space.get(K[:1], layers=(np.int64(1), np.int64(2))) as (block,):
        assert np.array_equal(block, bytes_of(K[0])[4096 : 3 * 4096])
    assert space.keys_of(np.arange(40)) == space.keys_of(range(40)) == space.keys_of(iter(range(40)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda pool: pool.space(None, block_bytes=1), "name is a text, not None"),
        (lambda pool: pool.space("\ud800", block_bytes=1), "half a character"),
        (lambda pool: pool.space("m", block_bytes=1e6), "block_bytes is a whole number, not 1000000.0"),
        (lambda pool: pool.space("m", block_bytes=4, layers="2"), "layers is a whole number"),
    ],
)
def test_a_space_that_cannot_be_is_named(
    node: NodePeer, connect: Connect, make: Callable[[Any], object], reason: str
) -> None:
    with pytest.raises(PoolError, match=reason):
        make(connect(node, "near"))


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("", "path of its socket, or host:port"),
        ("http://127.0.0.1:9100", "without http://"),
        ("127.0.0.1:abc", "a port from 1 to 65535"),
        ("127.0.0.1:99999", "a port from 1 to 65535"),
        (":9100", "give host:port"),
        ("{folder}", "is a folder, no node's socket: .*such as .*node-0.sock"),
        ("{folder}/plain", "is a file, no node's socket"),
        ("localhost", "is the port missing"),
        ("nohost.invalid:9100", "no node at nohost.invalid:9100"),
        (5, "not 5"),
    ],
)
def test_what_is_no_address_is_said_at_once(node: NodePeer, tmp_path: Path, address: Any, reason: str) -> None:
    (tmp_path / "plain").touch()
    (tmp_path / "node-0.sock").symlink_to(node.socket_path)
    began = time.monotonic()
    with pytest.raises(PoolError, match=reason):
        Client.connect(address.format(folder=tmp_path) if isinstance(address, str) else address, timeout=2 * SECONDS)
    assert time.monotonic() - began < SECONDS


@pytest.mark.parametrize("timeout", [0, -1, "5", math.inf, None])
def test_a_timeout_is_a_time(node: NodePeer, timeout: Any) -> None:
    with pytest.raises(PoolError, match="timeout is"):
        Client.connect(node.data_address, timeout=timeout)


# What the node makes of mistakes that a client of another making sends


@pytest.fixture
def channel(node: NodePeer, connect: Connect) -> Iterator[Channel]:
    home = connect(node, "far")._home
    assert isinstance(home, FarHome)
    token = object()
    channel = home._take(token, time.monotonic() + SECONDS, is_fresh=False)
    yield channel
    home._give_back(token, channel, is_good=True)


def test_a_question_that_cannot_be_read_is_refused_and_the_next_answered(channel: Channel) -> None:
    until = time.monotonic() + SECONDS
    bad = GetBlocks(msgspec.structs.replace(SPACE, runs=0), b"", 0, 1, 1.0)
    for question in (bad, Exists(SPACE.id, "text")):  # type: ignore[arg-type]
        with pytest.raises(RefusedError, match="unreadable frame"):
            asking.ask(channel, question, until)  # type: ignore[arg-type]
    assert asking.ask(channel, Exists(SPACE.id, K[0]), until) == Marks(b"\0")


# A connection that is lost while something is leased


def cut(pool: Client) -> None:
    """As a node does to who talks nonsense."""
    assert isinstance(pool._home, NearHome)
    pool._home._line.caller._socket.sendall(b"\x01\0\0\0\xc1")


def test_who_held_something_when_the_connection_was_lost_hears_of_it(node: NodePeer, connect: Connect) -> None:
    pool = connect(node, "near")
    space = pool.space(SPACE)
    space.put(K[0], bytes_of(K[0]))

    def read(fails: bool) -> None:
        with space.get(K[:1]):
            cut(pool)
            # The next call goes over another connection, as it does where the node was started again.
            assert space.exists_many(K[1:3]) == [False, False]
            if fails:
                raise ZeroDivisionError("which is what the caller wants to hear of")

    with pytest.raises(PoolError, match="what was read may be wrong"):
        read(fails=False)
    with pytest.raises(ZeroDivisionError):
        read(fails=True)
    with space.get(K[:1]) as blocks:
        assert blocks.hits == 1


@pytest.mark.parametrize("way", ["near", "far"])
def test_a_node_that_was_started_again_is_used_again(conductor: Conductor, connect: Connect, way: str) -> None:
    with conductor.process_node("dead-0") as (node, process):
        port = int(node.data_address.rpartition(":")[2])
        space = connect(node, way).space(SPACE)
        assert space.put(K[0], bytes_of(K[0]))
        process.kill()
        process.wait(SECONDS)
    with pytest.raises(PoolError, match="no node"):
        space.exists(K[0])
    with conductor.process_node("dead-0", data_port=port):
        assert not space.exists(K[0])
        assert space.put(K[0], bytes_of(K[0]))
        with space.get(K[:1]) as (block,):
            assert np.array_equal(block, bytes_of(K[0]))
