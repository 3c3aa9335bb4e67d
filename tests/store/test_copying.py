"""Copies that several threads share: all of it is done when `run` returns, by whomever."""

from __future__ import annotations

import threading
from functools import partial

import pytest

from moonpool.store.copying import ALONE_BYTES, MOST_PIECE_BYTES, Crew, piece_bytes

SECONDS = 20.0


@pytest.fixture(params=[0, 1, 3])
def crew(request: pytest.FixtureRequest) -> Crew:
    return Crew(request.param)


def test_every_piece_is_done_once(crew: Crew) -> None:
    done: list[int] = []
    for count in (0, 1, 2, 500):
        done.clear()
        crew.run([partial(done.append, number) for number in range(count)])
        assert sorted(done) == list(range(count))
    crew.close()
    crew.run([partial(done.append, number) for number in range(500, 510)])
    assert sorted(done) == list(range(510)), "a closed crew leaves it to the caller"


def test_a_helper_takes_pieces_while_the_caller_is_at_one() -> None:
    crew, both = Crew(1), threading.Barrier(2)
    who: set[str] = set()

    def work() -> None:
        who.add(threading.current_thread().name)
        both.wait(SECONDS)

    crew.run([work, work])
    assert len(who) == 2
    crew.close()


def test_what_is_small_is_done_by_the_caller_alone() -> None:
    crew, threads = Crew(1), set[int]()
    crew.run([lambda: threads.add(threading.get_ident())] * 8, nbytes=ALONE_BYTES - 1)
    assert threads == {threading.get_ident()}
    crew.close()


def test_it_waits_for_a_piece_that_a_helper_has_begun() -> None:
    crew, begun, may_end = Crew(1), threading.Event(), threading.Event()
    ended: list[bool] = []

    def slow() -> None:
        if threading.current_thread().name == "copying":
            begun.set()
            may_end.wait(SECONDS)
            ended.append(True)
        else:
            assert begun.wait(SECONDS)

    runner = threading.Thread(target=crew.run, args=([slow, slow],))
    runner.start()
    assert begun.wait(SECONDS)
    runner.join(0.05)
    assert runner.is_alive()
    may_end.set()
    runner.join(SECONDS)
    assert ended
    assert not runner.is_alive()
    crew.close()


def test_an_error_is_raised_when_all_is_over(crew: Crew) -> None:
    def fail() -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        crew.run([fail] * 5)
    done: list[int] = []
    crew.run([partial(done.append, number) for number in range(5)])
    assert len(done) == 5
    crew.close()


def test_callers_do_not_get_into_each_others_way() -> None:
    crew = Crew(1)
    done: list[list[int]] = [[] for _ in range(4)]

    def call(own: list[int]) -> None:
        for _ in range(50):
            crew.run([partial(own.append, number) for number in range(8)])

    threads = [threading.Thread(target=call, args=(own,)) for own in done]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert [len(own) for own in done] == [400] * 4
    crew.close()


def test_small_copies_are_not_cut() -> None:
    assert piece_bytes(64 << 10) == 64 << 10, "it is done before anybody could help"
    assert piece_bytes(8 << 20) == 512 << 10
    assert piece_bytes(1 << 30) == MOST_PIECE_BYTES
