"""The stages of a pipeline load their layers of one copy of each cached block, or none."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from moonpool.core.vocabulary import BlockKey, NodePeer
from moonpool.engine.timed import TimedConfig, TimedEngine
from moonpool.errors import MoonpoolError
from moonpool.live.bringing import bring
from moonpool.messenger.questions import Marks, Remove
from moonpool.messenger.tcp import TcpMessenger
from moonpool.messenger.transfer import Bytes, checksum
from moonpool.store.client import NodeClient
from moonpool.store.views import Stream
from tests.store.conftest import clean, conductor, join, run_dir
from tests.store.kit import SECONDS, Conductor, bytes_of, eventually, keys_of

Join = Callable[..., NodeClient]
__all__ = ["clean", "conductor", "join", "run_dir"]

K = keys_of("a", 4)


@pytest.fixture
def engine() -> TimedEngine:
    """The second of two stages."""
    return TimedEngine(page_count=8, block_tokens=16, config=TimedConfig(layers=6), poison=True, stage=(1, 2))


@pytest.fixture
def messenger() -> Iterator[TcpMessenger]:
    messenger = TcpMessenger(None)
    yield messenger
    messenger.close()


def of(key: BlockKey, nbytes: int, version: str = "") -> Bytes:
    return bytes_of(key + version.encode(), nbytes)


def put(client: NodeClient, engine: TimedEngine, keys: list[BlockKey], version: str = "") -> None:
    space = engine.space
    with client.open_room(space, keys).result(SECONDS) as room:
        for index, key in enumerate(keys):
            if (view := room.view(index)) is not None:
                view[:] = of(key, space.block_bytes, version)
                sums = [checksum(run) for run in view.reshape(space.runs, -1)]
                client.complete(room, [(index, 0, space.runs)], sums)
    client.stats().result(SECONDS)


def leader_loads(client: NodeClient, engine: TimedEngine, source: NodePeer | None = None) -> tuple[int, ...]:
    """Which copies they are."""
    stream: Stream = client.stream(engine.space, K, source, len(K), SECONDS, True).result(SECONDS)
    eventually(lambda: stream.is_over, "all has come")
    with stream:
        assert stream.whole == len(K)
        return stream.marks(len(K))


@pytest.mark.parametrize("is_far", [False, True], ids=["leader's node", "another node"])
def test_a_stage_loads_the_copies_that_the_leader_has_loaded_and_no_others(
    conductor: Conductor, join: Join, engine: TimedEngine, messenger: TcpMessenger, is_far: bool
) -> None:
    home = conductor.start_node("node-0", 1 << 20)
    here = conductor.start_node("node-1", 1 << 20) if is_far else home
    leader, stage = join(home), join(here)
    pages = [3, 1, 5, 0]

    def load(marks: tuple[int, ...]) -> None:
        loading = bring(engine, stage, here, home, messenger, K, marks, pages, SECONDS)
        asyncio.run(loading)

    put(leader, engine, K)
    marks = leader_loads(leader, engine)
    load(marks)
    size = engine.space.run_bytes
    for key, page in zip(K, pages, strict=True):
        block = of(key, engine.space.block_bytes)
        for layer in engine.layers:
            assert np.array_equal(engine.run(layer, page), block[layer * size : (layer + 1) * size])
    # One of them is computed anew, in another batch: other bytes, as right as the first ones.
    assert leader.ask(Remove(engine.space.id, K[2])).result(SECONDS) == Marks(b"\1")
    put(leader, engine, K, "again")
    with pytest.raises(MoonpoolError, match="replaced by another copy"):
        load(marks)
    again = leader_loads(leader, engine)
    assert [old == new for old, new in zip(marks, again, strict=True)] == [True, True, False, True]
    load(again)


def test_a_stream_tells_which_copies_come_from_wherever_they_come(
    conductor: Conductor, join: Join, engine: TimedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moonpool.store.streaming.FETCH_BYTES", 1)
    near, far = conductor.start_node("node-0", 1 << 20), conductor.start_node("node-1", 1 << 20)
    here, there = join(near), join(far)
    put(there, engine, K)
    put(here, engine, K[:1])
    expected = leader_loads(there, engine)
    assert leader_loads(here, engine, far) == expected
    with here.lease(engine.space, K, marks=True).result(SECONDS) as lease:
        assert tuple(lease.marks) == expected
    assert len(set(expected)) == len(K)
