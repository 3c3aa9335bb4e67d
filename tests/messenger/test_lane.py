"""What may be under way at once on one connection."""

from __future__ import annotations

import errno
from collections.abc import Sequence

import pytest

from moonpool.messenger.channel import Channel
from moonpool.messenger.lane import Lane, failure
from moonpool.messenger.waiting import Piece, RefusedError, Transfer, Way
from moonpool.wire.security import data_key

from .kit import MemoryStore, serving


class Noted:
    """A `Work` that writes down when it is sent and when it is answered."""

    nbytes = 1

    def __init__(self, name: str, way: Way, story: list[str]) -> None:
        self.way = way
        self._name = name
        self._story = story

    def send(self, channel: Channel) -> None:
        self._story.append(f">{self._name}")

    def receive(self, channel: Channel) -> None:
        self._story.append(f"<{self._name}")
        if self._name == "refused":
            raise RefusedError("no")
        if self._name == "bad":
            raise ValueError("bad")

    def rest(self) -> Sequence[Noted]:
        return (self,)

    def is_needed(self) -> bool:
        return True


def carried(*works: tuple[str, Way]) -> list[str]:
    """What happened, and `!name` for each piece that was over."""
    story: list[str] = []
    pieces = [Piece(Transfer([], 1e9, priority=None, result=int), Noted(*work, story)) for work in works]  # type: ignore[arg-type]
    names = {piece: name for piece, (name, _) in zip(pieces, works, strict=True)}
    waiting = iter(pieces)
    with serving(MemoryStore(16, 1)) as server:
        lane = Lane(server.address, data_key(None))
        try:
            lane.carry(lambda: next(waiting, None), lambda piece, error: story.append(f"!{names[piece]} {error or ''}"))
        except ValueError:
            assert lane.current is not None
            story.append(f"blames {names[lane.current]}, leaves {[names[piece] for piece in lane.underway]}")
        finally:
            lane.close()
    return [part.strip() for part in story]


@pytest.mark.parametrize("way", [Way.IN, Way.OUT])
def test_the_next_is_sent_before_the_last_is_answered(way: Way) -> None:
    assert carried(("a", way), ("b", way), ("c", way)) == [">a", ">b", "<a", "!a", ">c", "<b", "!b", "<c", "!c"]


@pytest.mark.parametrize(("first", "second"), [(Way.IN, Way.OUT), (Way.OUT, Way.IN), (Way.CALL, Way.CALL)])
def test_but_not_where_both_sides_could_wait_for_each_other(first: Way, second: Way) -> None:
    assert carried(("a", first), ("b", second)) == [">a", "<a", "!a", ">b", "<b", "!b"]


def test_a_refusal_is_the_piece_s_alone_and_anything_else_the_end() -> None:
    assert carried(("refused", Way.IN), ("b", Way.IN)) == [">refused", ">b", "<refused", "!refused no", "<b", "!b"]
    assert carried(("bad", Way.IN), ("b", Way.IN)) == [">bad", ">b", "<bad", "blames bad, leaves ['bad', 'b']"]


def test_a_peer_that_the_kernel_gave_up_is_no_deadline() -> None:
    assert "broke" in str(failure("x:1", TimeoutError(errno.ETIMEDOUT, "Connection timed out")))
    assert "not over by its deadline" in str(failure("x:1", TimeoutError("the deadline has passed")))
