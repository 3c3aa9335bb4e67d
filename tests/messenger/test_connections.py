"""The cap over all peers: who gives up a connection for whom."""

from __future__ import annotations

from moonpool.messenger.connections import Connections


class Peer:
    def __init__(self, connections: Connections, address: str) -> None:
        self.address = address
        self.is_busy = False
        self.open_count = 0
        self.woken = 0
        self._connections = connections

    def open(self) -> bool:
        if not self._connections.open(self, is_first=not self.open_count):
            return False
        self.open_count += 1
        return True

    def close(self) -> None:
        self.open_count -= 1
        self._connections.close(self, is_last=not self.open_count)

    def close_idle(self) -> int:
        closed, self.open_count = self.open_count, 0
        return closed

    def wake(self) -> None:
        self.woken += 1


def test_idle_endpoints_go_those_first_that_were_not_used_again() -> None:
    connections = Connections(3)
    a, b, c, d, e, f = (Peer(connections, name) for name in "abcdef")
    assert [peer.open() for peer in (a, b, c)] == [True] * 3
    connections.use("a")
    connections.use("c")
    assert d.open()
    assert [peer.open_count for peer in (a, b, c, d)] == [1, 0, 1, 1]
    connections.use("d")
    # The hand goes on from where b was: c and d lose their marks, a has lost its own before.
    assert e.open()
    assert [peer.open_count for peer in (a, c, d, e)] == [0, 1, 1, 1]
    assert f.open()
    assert [peer.open_count for peer in (c, d, e, f)] == [0, 1, 1, 1]
    assert (connections.count, connections.evicted) == (3, 3)


def test_all_connections_of_an_evicted_endpoint_go() -> None:
    connections = Connections(3)
    a, b = Peer(connections, "a"), Peer(connections, "b")
    assert [a.open() for _ in range(3)] == [True] * 3
    assert b.open()
    assert (a.open_count, connections.count) == (0, 1)


def test_a_busy_endpoint_keeps_its_connections_and_the_others_wait_their_turn() -> None:
    connections = Connections(2)
    a, b, c, d = (Peer(connections, name) for name in "abcd")
    assert a.open()
    assert b.open()
    a.is_busy = b.is_busy = True
    assert not c.open()
    assert not d.open()
    assert not a.open()
    assert connections.is_wanted
    a.close()
    assert (c.woken, d.woken, a.woken) == (1, 0, 0)
    # Nobody comes before the one whose turn it is.
    assert not d.open()
    assert not a.open()
    assert c.open()
    assert connections.count == 2
    b.close()
    assert d.woken == 1
    connections.give_up(d)
    assert a.woken == 1
    assert a.open()
    assert not connections.is_wanted


def test_a_second_connection_is_not_waited_for() -> None:
    connections = Connections(1)
    a = Peer(connections, "a")
    a.is_busy = True
    assert a.open()
    assert not a.open()
    assert not connections.is_wanted
