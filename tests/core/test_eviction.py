from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from moonpool.core.eviction import Eviction, EvictionPolicy
from tests.soak import often

POLICIES: tuple[EvictionPolicy, ...] = ("lru", "lfu", "length-aware")


def chain(eviction: Eviction[str], names: str, size: int = 10) -> None:
    parent = None
    for position, name in enumerate(names):
        eviction.add(name, size, parent, position)
        parent = name


@pytest.mark.parametrize("policy", POLICIES)
def test_a_prefix_outlives_its_continuation(policy: EvictionPolicy) -> None:
    eviction: Eviction[str] = Eviction(policy)
    eviction.extend("abc", 10, None, 0, 0)
    assert eviction.victims(10) == ("c",)
    assert eviction.victims(30) == ("c", "b", "a")
    eviction.touch("abc")
    assert eviction.evict(30) == ("c", "b", "a")


def test_lru_gives_up_the_least_recently_used() -> None:
    eviction: Eviction[str] = Eviction("lru")
    chain(eviction, "abc")
    chain(eviction, "xyz")
    eviction.touch("xyz")
    eviction.touch("abc")
    assert eviction.victims(40) == ("z", "y", "x", "c")
    eviction.touch("x")
    assert eviction.victims(40) == ("z", "y", "c", "b")


def test_lfu_gives_up_the_least_often_used_and_of_equal_ones_the_least_recently_used() -> None:
    eviction: Eviction[str] = Eviction("lfu")
    chain(eviction, "ab")
    chain(eviction, "xy")
    eviction.touch("ab")
    eviction.touch("ab")
    eviction.touch("xy")
    eviction.touch("x")
    assert eviction.victims(40) == ("y", "b", "a", "x")
    eviction.add("m", 10)
    assert eviction.victims(10) == ("m",), "however recent"


def test_length_aware_gives_up_the_later_block_of_those_that_were_used_as_often() -> None:
    eviction: Eviction[str] = Eviction("length-aware")
    chain(eviction, "abc")
    chain(eviction, "xy")
    eviction.touch("abc")
    eviction.touch("xy")
    assert eviction.victims(50) == ("c", "b", "y", "a", "x")
    eviction.touch("abc")
    assert eviction.victims(50) == ("y", "x", "c", "b", "a")


@pytest.mark.parametrize("policy", POLICIES)
def test_a_use_is_a_touch_or_a_pin_whether_it_is_pinned_or_not(policy: EvictionPolicy) -> None:
    eviction: Eviction[str] = Eviction(policy)
    eviction.add("a", 10)
    eviction.touch("a")
    eviction.touch("a")
    eviction.add("x", 10, pins=1)
    eviction.pin("x")
    eviction.touch("x")
    eviction.unpin("x")
    eviction.unpin("x")
    assert eviction.victims(20) == ("a", "x"), "used as often, and x later"


def test_a_block_that_comes_back_was_never_used_before() -> None:
    eviction: Eviction[str] = Eviction("lfu")
    chain(eviction, "ab")
    for _ in range(5):
        eviction.touch("a")
    eviction.remove("a")
    eviction.add("c", 10)
    eviction.touch("c")
    eviction.add("a", 10)
    assert eviction.victims(30) == ("b", "a", "c")


@pytest.mark.parametrize("policy", POLICIES)
def test_who_lost_its_parent_goes_at_once_and_takes_its_continuation_along(policy: EvictionPolicy) -> None:
    eviction: Eviction[str] = Eviction(policy)
    chain(eviction, "abcd")
    chain(eviction, "xyz")
    eviction.remove("b")
    eviction.touch("cd")
    assert eviction.holes == 1
    assert eviction.victims(20) == ("c", "d")


@pytest.mark.parametrize("policy", POLICIES)
def test_victims_are_the_order_in_which_removal_would_go_on(policy: EvictionPolicy) -> None:
    eviction: Eviction[str] = Eviction(policy)
    chain(eviction, "abc")
    chain(eviction, "xyz")
    eviction.touch("a")
    planned = eviction.victims(60)
    one_by_one = []
    while len(eviction):
        (victim,) = eviction.victims(1)
        eviction.remove(victim)
        one_by_one.append(victim)
    assert tuple(one_by_one) == planned


@pytest.mark.parametrize("policy", POLICIES)
def test_a_pinned_block_is_never_a_victim_and_pins_count(policy: EvictionPolicy) -> None:
    eviction: Eviction[str] = Eviction(policy)
    chain(eviction, "ab")
    eviction.pin("ab")
    eviction.pin("a")
    assert (eviction.victims(100), eviction.evictable_bytes, eviction.bytes) == ((), 0, 20)
    assert eviction.evict(100) == ()
    eviction.unpin("ab")
    assert eviction.victims(100) == ("b",)
    with pytest.raises(ValueError, match="pinned 1 times"):
        eviction.remove("a")
    eviction.unpin("a")
    assert eviction.victims(100) == ("b", "a")
    with pytest.raises(ValueError, match="not pinned"):
        eviction.unpin("a")


def test_the_last_unpin_is_the_time_of_use() -> None:
    eviction: Eviction[str] = Eviction("lru")
    chain(eviction, "ab")
    chain(eviction, "xy")
    eviction.pin("ab")
    eviction.touch("xy")
    eviction.unpin("ab")
    assert eviction.victims(40) == ("y", "x", "b", "a")


def test_a_parent_that_comes_late_adopts_its_children() -> None:
    eviction: Eviction[str] = Eviction("lru")
    chain(eviction, "xy")
    eviction.add("b", 10, "a")
    eviction.add("c", 10, "a")
    assert (eviction.victims(20), eviction.holes) == (("b", "c"), 2)
    eviction.add("a", 10)
    assert eviction.holes == 0
    eviction.touch("abc")
    eviction.touch("xy")
    assert eviction.victims(50) == ("c", "b", "a", "y", "x")


@pytest.mark.parametrize("policy", POLICIES)
def test_a_parent_in_another_tier_is_not_gone(policy: EvictionPolicy) -> None:
    elsewhere: dict[str, None] = {"a": None}
    eviction: Eviction[str] = Eviction(policy, elsewhere.__contains__)
    eviction.extend("abc", 10, None, 0, 0)
    eviction.add("x", 10, None)
    eviction.remove("a")
    assert (eviction.holes, eviction.is_hole("b")) == (0, False)
    assert eviction.victims(10) == ("c",), "by policy, like any other"
    del elsewhere["a"]
    eviction.left_elsewhere("a")
    assert (eviction.holes, eviction.is_hole("b"), eviction.victims(20)) == (1, True, ("b", "c"))
    elsewhere["a"] = None
    eviction.came_elsewhere("a")
    assert (eviction.holes, eviction.victims(10)) == (0, ("c",))
    eviction.add("a", 10, None)
    eviction.check_integrity()
    assert eviction.holes == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_what_can_go_may_be_less_than_asked(policy: EvictionPolicy) -> None:
    eviction: Eviction[str] = Eviction(policy)
    chain(eviction, "ab")
    eviction.pin("a")
    assert eviction.victims(0) == eviction.evict(0) == ()
    assert eviction.victims(1000) == ("b",)
    assert eviction.evict(1000) == ("b",)
    assert list(eviction.keys()) == ["a"]


def test_a_key_is_added_once_and_a_refusal_changes_nothing() -> None:
    eviction: Eviction[str] = Eviction()
    eviction.add("c", 1, "b")
    for keys, parent in (("c", "z"), ("xyc", "z"), ("xyx", None)):
        with pytest.raises(ValueError, match=f"'{keys[-1]}' is present already"):
            eviction.extend(keys, 1, parent, 0, 0)
    eviction.extend("", 1, "z", 0, 0)
    assert (list(eviction.keys()), eviction.bytes, eviction.holes) == (["c"], 1, 1)
    eviction.check_integrity()


@pytest.mark.parametrize("policy", POLICIES)
def test_what_a_pool_begins_with_goes_in_its_order(policy: EvictionPolicy) -> None:
    eviction: Eviction[str] = Eviction(policy)
    eviction.fill((name, size, None) for size, name in enumerate("abc", 1))
    assert (eviction.bytes, eviction.evictable_bytes, eviction.victims(6)) == (6, 6, ("a", "b", "c"))
    with pytest.raises(ValueError, match="'b' is present already"):
        eviction.fill([("d", 1, None), ("b", 1, None)])
    eviction.check_integrity()
    assert eviction.evict(100) == ("a", "b", "c", "d")


def test_what_a_pool_begins_with_knows_its_parents_whatever_their_order() -> None:
    eviction: Eviction[str] = Eviction("lru", "k".__eq__)
    eviction.fill([("c", 1, "b"), ("d", 1, "b"), ("b", 1, "a"), ("a", 1, None), ("z", 1, "y"), ("l", 1, "k")])
    eviction.check_integrity()
    assert eviction.holes == 1
    assert eviction.evict(100) == ("z", "c", "d", "b", "a", "l")


# a tree: three prompts from a, one of them far, and one apart
PARENTS: dict[str, str | None] = {
    "a": None,
    "b": "a",
    "c": "b",
    "d": "b",
    "e": "a",
    "f": "e",
    "x": None,
    "y": "x",
    "z": "y",
}
NAMES = tuple(PARENTS)


def position(name: str) -> int:
    parent = PARENTS[name]
    return 0 if parent is None else position(parent) + 1


class AgainstLists(RuleBasedStateMachine):
    """The same policy by sorting everything each time."""

    policy: EvictionPolicy

    def __init__(self) -> None:
        super().__init__()
        self.elsewhere: dict[str, None] = {}
        """What another tier has."""
        self.eviction: Eviction[str] = Eviction(self.policy, self.elsewhere.__contains__)
        self.entered: dict[str, int] = {}
        """Present blocks in the order of their arrival, and when each entered its queue."""
        self.uses: dict[str, int] = {}
        self.sizes: dict[str, int] = {}
        self.pins: dict[str, int] = {}
        self.arrivals: list[str] = []
        self.clock = 0

    def _tick(self, name: str) -> None:
        self.clock += 1
        self.entered[name] = self.clock

    def _is_hole(self, name: str, present: dict[str, int]) -> bool:
        parent = PARENTS[name]
        return parent is not None and parent not in present and parent not in self.elsewhere

    def _children(self, name: str) -> list[str]:
        return [n for n in self.arrivals if PARENTS[n] == name and not self.pins[n]]

    def _order(self, name: str, present: dict[str, int]) -> tuple[int, ...]:
        if self._is_hole(name, present):
            return 0, present[name]
        match self.policy:
            case "lru":
                return 1, present[name]
            case "lfu":
                return 1, self.uses[name], present[name]
            case "length-aware":
                return 1, self.uses[name], -position(name), present[name]

    def _arrive(self, name: str, size: int, pins: int) -> None:
        self._requeue_children(name)
        self.sizes[name], self.pins[name], self.uses[name] = size, pins, 1
        self.arrivals.append(name)
        self.entered[name] = 0

    @rule(name=st.sampled_from(NAMES), size=st.integers(1, 9), pins=st.integers(0, 1))
    def add(self, name: str, size: int, pins: int) -> None:
        if name in self.entered:
            return
        self.eviction.add(name, size, PARENTS[name], position(name), pins)
        self._arrive(name, size, pins)
        self._tick(name)

    @rule(last=st.sampled_from(NAMES), size=st.integers(1, 9), pins=st.integers(0, 1))
    def extend(self, last: str, size: int, pins: int) -> None:
        """What is lacking of a prompt before its first block that is present."""
        names: list[str] = []
        name: str | None = last
        while name is not None and name not in self.entered:
            names.insert(0, name)
            name = PARENTS[name]
        self.eviction.extend(names, size, name, position(names[0]) if names else 0, pins)
        for new in names:
            self._arrive(new, size, pins)
        for new in reversed(names):
            self._tick(new)

    @rule(names=st.lists(st.sampled_from(NAMES), unique=True))
    def touch(self, names: list[str]) -> None:
        names = [n for n in names if n in self.entered]
        self.eviction.touch(names)
        for name in reversed(names):
            self.uses[name] += 1
            if not self.pins[name]:
                self._tick(name)

    @rule(names=st.lists(st.sampled_from(NAMES), max_size=4))
    def pin(self, names: list[str]) -> None:
        names = [n for n in names if n in self.entered]
        self.eviction.pin(names)
        for name in names:
            self.pins[name] += 1
            self.uses[name] += 1

    @rule(names=st.lists(st.sampled_from(NAMES), unique=True, max_size=4))
    def unpin(self, names: list[str]) -> None:
        names = [n for n in names if self.pins.get(n)]
        self.eviction.unpin(names)
        for name in reversed(names):
            self.pins[name] -= 1
            if not self.pins[name]:
                self._tick(name)

    @rule(data=st.data())
    @precondition(lambda self: any(not p for p in self.pins.values()))
    def remove(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(n for n, p in self.pins.items() if not p)))
        self.eviction.remove(name)
        self._forget(name)

    @rule(needed=st.integers(0, 60))
    def evict(self, needed: int) -> None:
        expected = self._plan(needed)
        assert self.eviction.evict(needed) == expected
        for name in expected:
            self._forget(name)

    @rule(needed=st.integers(0, 60))
    def victims(self, needed: int) -> None:
        assert self.eviction.victims(needed) == self._plan(needed)

    def _forget(self, name: str) -> None:
        del self.entered[name], self.pins[name], self.sizes[name], self.uses[name]
        self.arrivals.remove(name)
        self._requeue_children(name)

    def _requeue_children(self, name: str) -> None:
        """They are holes now, or no longer."""
        if name not in self.elsewhere:
            for child in self._children(name):
                self._tick(child)

    @rule(name=st.sampled_from(NAMES), stays=st.booleans())
    def change_elsewhere(self, name: str, stays: bool) -> None:
        if (name in self.elsewhere) == stays:
            return
        self.elsewhere.pop(name, None)
        if name not in self.entered:
            self._requeue_children(name)
        if stays:
            self.elsewhere[name] = None
            self.eviction.came_elsewhere(name)
        else:
            self.eviction.left_elsewhere(name)

    def _plan(self, needed: int) -> tuple[str, ...]:
        present, freed, expected, clock = dict(self.entered), 0, [], self.clock
        while freed < needed:
            free = [n for n in present if not self.pins[n]]
            if not free:
                break
            victim = min(free, key=lambda n: self._order(n, present))
            expected.append(victim)
            freed += self.sizes[victim]
            del present[victim]
            for child in self._children(victim) if victim not in self.elsewhere else ():
                if child in present:
                    clock += 1
                    present[child] = clock
        return tuple(expected)

    @invariant()
    def adds_up(self) -> None:
        self.eviction.check_integrity()
        assert self.eviction.keys() == self.entered.keys()
        assert self.eviction.bytes == sum(self.sizes.values())
        assert self.eviction.evictable_bytes == sum(s for n, s in self.sizes.items() if not self.pins[n])
        assert self.eviction.holes == sum(self._is_hole(n, self.entered) for n in self.entered)
        assert all(self.eviction.pins(n) == pins for n, pins in self.pins.items())
        assert all(self.eviction.is_hole(n) == self._is_hole(n, self.entered) for n in self.entered)


class LruAgainstLists(AgainstLists):
    policy = "lru"


class LfuAgainstLists(AgainstLists):
    policy = "lfu"


class LengthAwareAgainstLists(AgainstLists):
    policy = "length-aware"


LIMITS = settings(max_examples=often(60))
TestLru = LruAgainstLists.TestCase
TestLfu = LfuAgainstLists.TestCase
TestLengthAware = LengthAwareAgainstLists.TestCase
TestLru.settings = TestLfu.settings = TestLengthAware.settings = LIMITS
