from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from moonpool.core.eviction import Lru


def chain(lru: Lru[str], names: str, size: int = 10) -> None:
    parent = None
    for name in names:
        lru.add(name, size, parent)
        parent = name


def test_a_prefix_outlives_its_continuation() -> None:
    lru: Lru[str] = Lru()
    chain(lru, "abc")
    lru.touch("abc")
    assert lru.victims(10) == ("c",)
    assert lru.victims(30) == ("c", "b", "a")


def test_the_least_recently_used_goes_first() -> None:
    lru: Lru[str] = Lru()
    chain(lru, "abc")
    chain(lru, "xyz")
    lru.touch("xyz")
    lru.touch("abc")
    assert lru.victims(40) == ("z", "y", "x", "c")
    lru.touch("x")
    assert lru.victims(40) == ("z", "y", "c", "b")


def test_who_lost_its_parent_goes_at_once_and_takes_its_continuation_along() -> None:
    lru: Lru[str] = Lru()
    chain(lru, "abcd")
    chain(lru, "xyz")
    lru.remove("b")
    lru.touch("cd")
    assert lru.victims(20) == ("c", "d")


def test_victims_are_the_order_in_which_removal_would_go_on() -> None:
    lru: Lru[str] = Lru()
    chain(lru, "abc")
    chain(lru, "xyz")
    lru.touch("a")
    planned = lru.victims(60)
    one_by_one = []
    while len(lru):
        (victim,) = lru.victims(1)
        lru.remove(victim)
        one_by_one.append(victim)
    assert tuple(one_by_one) == planned


def test_a_pinned_block_is_never_a_victim_and_pins_count() -> None:
    lru: Lru[str] = Lru()
    chain(lru, "ab")
    lru.pin("ab")
    lru.pin("a")
    assert (lru.victims(100), lru.evictable_bytes, lru.bytes) == ((), 0, 20)
    lru.unpin("ab")
    assert lru.victims(100) == ("b",)
    with pytest.raises(ValueError, match="pinned 1 times"):
        lru.remove("a")
    lru.unpin("a")
    assert lru.victims(100) == ("b", "a")
    with pytest.raises(ValueError, match="not pinned"):
        lru.unpin("a")


def test_the_last_unpin_is_a_use() -> None:
    lru: Lru[str] = Lru()
    chain(lru, "ab")
    chain(lru, "xy")
    lru.pin("ab")
    lru.touch("xy")
    lru.unpin("ab")
    assert lru.victims(40) == ("y", "x", "b", "a")


def test_a_parent_that_comes_late_adopts_its_children() -> None:
    lru: Lru[str] = Lru()
    chain(lru, "xy")
    lru.add("b", 10, "a")
    assert lru.victims(10) == ("b",)
    lru.add("a", 10)
    lru.touch("ab")
    lru.touch("xy")
    assert lru.victims(40) == ("b", "a", "y", "x")


def test_what_cannot_be_reached_is_less_than_asked() -> None:
    lru: Lru[str] = Lru()
    chain(lru, "ab")
    assert lru.victims(1000) == ("a", "b")
    assert lru.victims(0) == ()


def test_a_key_is_added_once() -> None:
    lru: Lru[str] = Lru()
    lru.add("a", 1)
    with pytest.raises(ValueError, match="present already"):
        lru.add("a", 1)


NAMES = "abcdefgh"
PARENTS = {name: (NAMES[i - 1] if i % 4 else None) for i, name in enumerate(NAMES)}


class AgainstLists(RuleBasedStateMachine):
    """The same policy by sorting everything each time."""

    def __init__(self) -> None:
        super().__init__()
        self.lru: Lru[str] = Lru()
        self.used: dict[str, int] = {}
        """Present blocks and when each entered its queue or was used last."""
        self.sizes: dict[str, int] = {}
        self.pins: dict[str, int] = {}
        self.clock = 0

    def _tick(self, name: str) -> None:
        self.clock += 1
        self.used[name] = self.clock

    def _orphan(self, name: str, present: dict[str, int]) -> bool:
        return PARENTS[name] is not None and PARENTS[name] not in present

    def _children(self, name: str) -> list[str]:
        return [n for n in self.used if PARENTS[n] == name and not self.pins[n]]

    @rule(name=st.sampled_from(NAMES), size=st.integers(1, 9))
    def add(self, name: str, size: int) -> None:
        if name in self.used:
            return
        self.lru.add(name, size, PARENTS[name])
        self.sizes[name], self.pins[name] = size, 0
        for child in self._children(name):
            self._tick(child)
        self._tick(name)

    @rule(names=st.lists(st.sampled_from(NAMES), unique=True))
    def touch(self, names: list[str]) -> None:
        names = [n for n in names if n in self.used]
        self.lru.touch(names)
        for name in reversed(names):
            if not self.pins[name]:
                self._tick(name)

    @rule(names=st.lists(st.sampled_from(NAMES), max_size=4))
    def pin(self, names: list[str]) -> None:
        names = [n for n in names if n in self.used]
        self.lru.pin(names)
        for name in names:
            self.pins[name] += 1

    @rule(names=st.lists(st.sampled_from(NAMES), unique=True, max_size=4))
    def unpin(self, names: list[str]) -> None:
        names = [n for n in names if self.pins.get(n)]
        self.lru.unpin(names)
        for name in reversed(names):
            self.pins[name] -= 1
            if not self.pins[name]:
                self._tick(name)

    @rule(data=st.data())
    @precondition(lambda self: any(not p for p in self.pins.values()))
    def remove(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(n for n, p in self.pins.items() if not p)))
        self.lru.remove(name)
        self._forget(name)

    def _forget(self, name: str) -> None:
        del self.used[name], self.pins[name], self.sizes[name]
        for child in self._children(name):
            self._tick(child)

    @rule(needed=st.integers(0, 60))
    def victims(self, needed: int) -> None:
        present, pins, freed, expected = dict(self.used), dict(self.pins), 0, []
        clock = self.clock
        while freed < needed:
            free = [n for n in present if not pins[n]]
            if not free:
                break
            victim = min(free, key=lambda n: (not self._orphan(n, present), present[n]))
            expected.append(victim)
            freed += self.sizes[victim]
            del present[victim]
            for child in [n for n in present if PARENTS[n] == victim and not pins[n]]:
                clock += 1
                present[child] = clock
        assert self.lru.victims(needed) == tuple(expected)

    @invariant()
    def adds_up(self) -> None:
        self.lru.check_integrity()
        assert len(self.lru) == len(self.used)
        assert self.lru.bytes == sum(self.sizes.values())
        assert self.lru.evictable_bytes == sum(s for n, s in self.sizes.items() if not self.pins[n])


AgainstLists.TestCase.settings = settings(max_examples=80, deadline=None)
TestAgainstLists = AgainstLists.TestCase
