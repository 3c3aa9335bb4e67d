from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from moonpool.messenger.sieve import Sieve


def test_what_was_not_used_since_it_came_goes_in_order_of_age() -> None:
    sieve = Sieve[str]()
    for key in "abcd":
        sieve.touch(key)
    assert [sieve.evict() for _ in range(5)] == ["a", "b", "c", "d", None]
    assert len(sieve) == 0


def test_the_hand_goes_on_where_it_was() -> None:
    """A, B and G were used; the hand takes marks away until it meets one without."""
    sieve = Sieve[str]()
    for key in "ABCDEFG":
        sieve.touch(key)
    for key in "ABG":
        sieve.touch(key)
    assert sieve.evict() == "C"
    sieve.touch("H")
    sieve.touch("A")
    assert sieve.evict() == "D"
    sieve.touch("I")
    sieve.touch("B")
    assert [sieve.evict() for _ in range(3)] == ["E", "F", "H"]
    # G has lost its mark on the way; then around: I is met before the old end of the queue.
    assert [sieve.evict() for _ in range(4)] == ["I", "G", "A", "B"]


def test_what_is_in_use_stays_whatever_its_mark() -> None:
    sieve = Sieve[str]()
    for key in "abc":
        sieve.touch(key)
    assert sieve.evict(lambda key: key == "c") == "c"
    assert sieve.evict(lambda key: False) is None
    assert sieve.evict() == "a"
    sieve.remove("a")
    assert "b" in sieve
    assert len(sieve) == 1


class Slow:
    """The algorithm as the paper writes it down, on a list with the newest first."""

    def __init__(self) -> None:
        self.keys: list[int] = []
        self.visited: set[int] = set()
        self.hand: int | None = None
        """The key it points at."""

    def touch(self, key: int) -> None:
        if key in self.keys:
            self.visited.add(key)
        else:
            self.keys.insert(0, key)

    def remove(self, key: int) -> None:
        if key in self.keys:
            position = self.keys.index(key)
            if self.hand == key:
                self.hand = self.keys[position - 1] if position else None
            del self.keys[position]
            self.visited.discard(key)

    def evict(self, kept: set[int]) -> int | None:
        if not set(self.keys) - kept:
            return None
        position = self.keys.index(self.hand) if self.hand is not None else len(self.keys) - 1
        while True:
            key = self.keys[position]
            if key not in kept:
                if key not in self.visited:
                    self.hand = key
                    self.remove(key)
                    return key
                self.visited.discard(key)
            position = position - 1 if position else len(self.keys) - 1


@given(st.lists(st.tuples(st.sampled_from(["touch", "touch", "remove", "evict"]), st.integers(0, 7))))
def test_it_agrees_with_the_paper_s_loop(steps: list[tuple[str, int]]) -> None:
    quick, slow = Sieve[int](), Slow()
    for step, key in steps:
        if step == "touch":
            quick.touch(key)
            slow.touch(key)
        elif step == "remove":
            quick.remove(key)
            slow.remove(key)
        else:
            kept = {key, key + 1}
            assert quick.evict(lambda k, kept=kept: k not in kept) == slow.evict(kept)
        assert sorted(slow.keys) == sorted(k for k in range(9) if k in quick)
        assert len(quick) == len(slow.keys)
