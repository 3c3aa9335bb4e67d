"""The scheduler's question: answered from shared memory, by the node, or by nobody, and never waited for."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moonpool.connectors.counters import Counters
from moonpool.connectors.link import NodeLink
from moonpool.connectors.lookup import Lookup
from moonpool.core.vocabulary import NodePeer, RequestId
from moonpool.store.client import NodeClient

from ..store.kit import SECONDS, SPACE, Conductor, eventually, keys_of, put

Ask = Callable[..., Lookup]
REQUEST = RequestId("cmpl-1")


@pytest.fixture
def ask(run_dir: Path) -> Iterator[Ask]:
    opened: list[tuple[Lookup, NodeLink]] = []

    def ask(path: str, seconds: float = SECONDS) -> Lookup:
        link = NodeLink(path, "vllm", Counters())
        opened.append((Lookup(link, link._counters, seconds), link))
        return opened[-1][0]

    yield ask
    for lookup, link in opened:
        lookup.close()
        link.close()


def joined(lookup: Lookup) -> Lookup:
    eventually(lambda: lookup._link.client is not None, "the node lets it in")
    return lookup


def answer(lookup: Lookup, count: int, name: str = "a") -> int:
    found: list[int] = []

    def is_known() -> bool:
        leading = lookup.leading(REQUEST, SPACE, keys_of(name, count))
        found.extend([] if leading is None else [leading])
        return bool(found)

    eventually(is_known, "the pool answers")
    return found[0]


def test_what_is_there_and_what_is_not(node: NodePeer, ask: Ask) -> None:
    lookup = joined(ask(node.socket_path))
    assert answer(lookup, 3) == 0
    with NodeClient.connect(node.socket_path, name="client", incarnation="0") as client:
        put(client, keys_of("a", 2))
        client.stats().result(SECONDS)
    lookup.forget(REQUEST)
    assert answer(lookup, 2) == 2
    assert answer(lookup, 3) == 2
    assert answer(lookup, 0) == 0


def test_blocks_of_another_node_count(deciding: Conductor, ask: Ask) -> None:
    near, far = deciding.start_node("node-0"), deciding.start_node("node-1")
    with NodeClient.connect(far.socket_path, name="client", incarnation="0") as client:
        put(client, keys_of("a", 2))
    lookup = joined(ask(near.socket_path))

    def is_seen() -> bool:
        lookup.forget(REQUEST)
        return answer(lookup, 3) == 2

    eventually(is_seen, "the directory has heard of it")


def test_where_no_node_is_nothing_is_there(run_dir: Path, ask: Ask) -> None:
    lookup = ask(str(run_dir / "nobody.sock"))
    assert lookup.leading(REQUEST, SPACE, keys_of("a", 3)) == 0


def test_a_node_that_stands_still_has_what_is_on_its_board_and_nothing_else(conductor: Conductor, ask: Ask) -> None:
    with conductor.process_node("dead-0") as (node, process):
        with NodeClient.connect(node.socket_path, name="client", incarnation="0") as client:
            put(client, keys_of("a", 2))
            client.stats().result(SECONDS)
        lookup = joined(ask(node.socket_path, seconds=0.5))
        os.kill(process.pid, signal.SIGSTOP)
        try:
            began = time.monotonic()
            assert lookup.leading(REQUEST, SPACE, keys_of("a", 2)) == 2
            assert lookup.leading(REQUEST, SPACE, keys_of("a", 4)) is None
            assert time.monotonic() - began < SECONDS / 10
            assert answer(lookup, 4) == 2
            assert lookup._counters.take()["late_lookups"] == 1
        finally:
            os.kill(process.pid, signal.SIGCONT)
