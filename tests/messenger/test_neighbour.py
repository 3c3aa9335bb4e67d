"""A peer on this host is left a processor to itself, and nothing else of the thread changes."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from moonpool.messenger.neighbour import Neighbour

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Over loopback; something has come from the first to the second."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as sender,
        listener.accept()[0] as receiver,
    ):
        sender.sendall(b"x")
        assert receiver.recv(1) == b"x"
        yield sender, receiver


@pytest.mark.parametrize("is_some_idle", [True, False])
def test_a_thread_leaves_the_processor_of_its_peer_for_an_idle_one(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_some_idle: bool
) -> None:
    allowed, moves = os.sched_getaffinity(0), []
    neighbour = Neighbour.of(pair[1])
    assert neighbour is not None
    theirs = pair[1].getsockopt(socket.SOL_SOCKET, socket.SO_INCOMING_CPU)
    monkeypatch.setattr("os.sched_setaffinity", lambda thread, processors: moves.append((thread, processors)))
    monkeypatch.setattr("moonpool.messenger.neighbour._current_processor", lambda: theirs)
    running = os.cpu_count() or 1
    load = tmp_path / "loadavg"
    load.write_text(f"1.0 1.0 1.0 {running if is_some_idle else running + 1}/300 4711\n")
    monkeypatch.setattr("moonpool.messenger.neighbour._LOAD", load)
    neighbour.step_aside()
    monkeypatch.undo()
    expected = [(0, allowed - {theirs}), (0, allowed)] if is_some_idle and len(allowed) > 1 else []
    assert moves == expected
    neighbour.step_aside()
    assert os.sched_getaffinity(0) == allowed


def test_a_thread_that_is_elsewhere_stays(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    neighbour = Neighbour.of(pair[1])
    assert neighbour is not None
    theirs = pair[1].getsockopt(socket.SOL_SOCKET, socket.SO_INCOMING_CPU)
    monkeypatch.setattr("os.sched_setaffinity", lambda thread, processors: pytest.fail("it was moved"))
    monkeypatch.setattr("moonpool.messenger.neighbour._current_processor", lambda: theirs + 1)
    neighbour.step_aside()


def test_nobody_paces_what_goes_to_a_neighbour(pair: Pair) -> None:
    Neighbour.of(pair[0])
    algorithm = pair[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    assert algorithm.rstrip(b"\0") == b"reno"


def test_a_peer_that_is_gone_is_no_neighbour() -> None:
    with socket.socket() as unconnected:
        assert Neighbour.of(unconnected) is None
