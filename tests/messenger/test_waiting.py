"""Which piece goes next, and what a queue takes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from moonpool.messenger import waiting
from moonpool.messenger.channel import Channel
from moonpool.messenger.waiting import Piece, Priority, Transfer, Waiting, Way


class Fake:
    """A `Work` that only has a size."""

    way = Way.IN

    def __init__(self, nbytes: int = 1, rest: Sequence[Fake] = ()) -> None:
        self.nbytes = nbytes
        self._rest = rest

    def send(self, channel: Channel) -> None: ...

    def receive(self, channel: Channel) -> None: ...

    def rest(self) -> Sequence[Fake]:
        return self._rest

    def is_needed(self) -> bool:
        return self.nbytes != 13


def transfer(*works: Fake, priority: Priority = Priority.URGENT) -> Transfer[None]:
    return Transfer(works, 1.0, priority, lambda: None)


def background(*works: Fake) -> Transfer[None]:
    return transfer(*works, priority=Priority.BACKGROUND)


def taken(queue: Waiting, count: int) -> list[Transfer[None]]:
    pieces = [queue.take() for _ in range(count)]
    return [piece.transfer for piece in pieces if piece is not None]


def test_first_come_first_served_and_urgent_before_background() -> None:
    queue = Waiting()
    replica, first, second = background(Fake(), Fake()), transfer(Fake(), Fake()), transfer(Fake())
    for each in (replica, first, second):
        queue.add(each)
    assert taken(queue, 9) == [first, first, second, replica, replica]
    assert (len(queue), queue.pieces, queue.nbytes) == (0, 0, 0)


def test_background_work_gets_one_piece_in_eight() -> None:
    queue = Waiting()
    replica, urgent = background(*[Fake()] * 3), transfer(*[Fake()] * 40)
    queue.add(replica)
    queue.add(urgent)
    assert [position for position, each in enumerate(taken(queue, 32)) if each is replica] == [7, 15, 23]


def test_what_urgent_work_took_before_there_was_other_does_not_count() -> None:
    queue = Waiting()
    urgent = transfer(*[Fake()] * 20)
    queue.add(urgent)
    taken(queue, 10)
    replica = background(Fake())
    queue.add(replica)
    assert taken(queue, 8) == [urgent] * 7 + [replica]


def test_what_a_lost_lane_had_comes_before_the_rest() -> None:
    queue = Waiting()
    first, second = transfer(Fake(8, [Fake(2), Fake(1)]), Fake(16)), transfer(Fake())
    queue.add(first)
    queue.add(second)
    piece = queue.take()
    assert piece is not None
    taken(queue, 1)
    piece.breaks = 1
    queue.give_back(piece)
    assert (first.left, queue.nbytes, queue.pieces) == (3, 4, 3)
    again = queue.take()
    assert again is not None
    assert (again.transfer, again.work.nbytes, again.breaks) == (first, 2, 1)
    assert taken(queue, 9) == [first, second]


def test_a_piece_with_nothing_left_is_over() -> None:
    queue = Waiting()
    only = transfer(Fake())
    queue.add(only)
    piece = queue.take()
    assert isinstance(piece, Piece)
    queue.give_back(piece)
    assert only.left == 0
    assert queue.take() is None


def test_withdrawn_pieces_are_over() -> None:
    queue = Waiting()
    first, second = transfer(Fake(), Fake(13), Fake(13)), transfer(Fake())
    queue.add(first)
    queue.add(second)
    queue.withdraw(first, lambda work: not work.is_needed())
    assert (first.left, queue.pieces, queue.nbytes) == (1, 2, 2)
    queue.withdraw(first)
    queue.withdraw(first)
    assert first.left == 0
    assert taken(queue, 9) == [second]


def test_a_queue_is_bounded_in_bytes_and_in_transfers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "QUEUE_BYTES", 100)
    monkeypatch.setattr(waiting, "QUEUE_TRANSFERS", 3)
    monkeypatch.setattr(waiting, "URGENT_TRANSFERS", 5)
    queue = Waiting()
    # One alone may be larger than the bound, else it could never go.
    assert queue.has_room(background(Fake(1000)))
    queue.add(background(Fake(60)))
    assert queue.has_room(background(Fake(40)))
    assert not queue.has_room(background(Fake(41)))
    assert queue.has_room(transfer(Fake(1000)))
    queue.add(transfer(Fake(1)))
    queue.add(transfer(Fake(1)))
    assert not queue.has_room(background(Fake(1)))
    for _ in range(2):
        assert queue.has_room(transfer(Fake(1)))
        queue.add(transfer(Fake(1)))
    assert not queue.has_room(transfer(Fake(1)))
