"""What subscribers are told of, in which order, and what is not believed."""

from __future__ import annotations

import random

import pytest

from moonpool.core.vocabulary import BlockKey, BlockMeta, Tier
from moonpool.live.kv_events.schema import Change
from moonpool.live.kv_events.table import Space

from .kit import SPACE, keys_and_metas, tokens_of

PROMPT = keys_and_metas(tokens_of(1, 4))
KEYS = [key for key, _ in PROMPT]
METAS = dict(PROMPT)
DRAM, SSD = 1, 2


class Told:
    def __init__(self) -> None:
        self.space = Space(SPACE.id)
        self.changes: list[Change] = []

    def look(self, key: BlockKey, there: int) -> bool:
        return self.space.look(key, there, self.changes)

    def learn(self, key: BlockKey, meta: BlockMeta | None = None) -> bool:
        return self.space.learn(key, meta or METAS.get(key), self.changes)

    def take(self) -> list[tuple[bool, Tier, BlockKey]]:
        changes, self.changes = self.changes, []
        self.space.check_integrity()
        return [(change.stored, change.tier, change.key) for change in changes]


@pytest.fixture
def told() -> Told:
    return Told()


def test_a_block_is_told_of_when_it_is_known_what_it_is_of(told: Told) -> None:
    assert told.look(KEYS[0], DRAM)
    assert not told.look(KEYS[0], DRAM | SSD), "it is asked for already"
    assert told.take() == []
    assert told.learn(KEYS[0])
    assert told.take() == [(True, Tier.DRAM, KEYS[0]), (True, Tier.SSD, KEYS[0])]
    assert not told.look(KEYS[0], SSD)
    assert told.take() == [(False, Tier.DRAM, KEYS[0])]
    assert not told.look(KEYS[0], 0)
    assert told.take() == [(False, Tier.SSD, KEYS[0])]
    assert not told.space


def test_what_goes_before_it_is_known_is_not_told_of(told: Told) -> None:
    told.look(KEYS[0], DRAM)
    told.look(KEYS[0], 0)
    assert told.learn(KEYS[0])
    assert told.take() == []
    # And comes again.
    assert told.look(KEYS[0], DRAM)
    told.learn(KEYS[0])
    assert told.take() == [(True, Tier.DRAM, KEYS[0])]


def test_a_prompt_is_told_of_from_its_beginning(told: Told) -> None:
    for key in reversed(KEYS):
        assert told.look(key, DRAM)
    for key in reversed(KEYS[1:]):
        assert told.learn(key)
    assert told.take() == []
    told.learn(KEYS[0])
    assert told.take() == [(True, Tier.DRAM, key) for key in KEYS]


@pytest.mark.parametrize("ending", ["gone", "unknown"])
def test_nobody_waits_for_what_will_not_be_told_of(told: Told, ending: str) -> None:
    for key in KEYS[:3]:
        told.look(key, DRAM)
    told.learn(KEYS[1])
    told.learn(KEYS[2])
    assert told.take() == []
    if ending == "gone":
        told.look(KEYS[0], 0)
    else:
        assert not told.learn(KEYS[0], BlockMeta())
    assert told.take() == [(True, Tier.DRAM, key) for key in KEYS[1:3]]
    # A later block does not wait for it either, and it is told of when somebody knows it after all.
    assert told.look(KEYS[0], DRAM)
    told.learn(KEYS[0])
    assert told.take() == [(True, Tier.DRAM, KEYS[0])]


def test_only_what_the_key_proves_is_told(told: Told) -> None:
    others = keys_and_metas(tokens_of(2, 2))
    for key in (*KEYS[:2], others[1][0]):
        told.look(key, DRAM)
    assert not told.learn(KEYS[1], BlockMeta(KEYS[0], 1, others[1][1].tokens))
    assert not told.learn(KEYS[1], BlockMeta(others[0][0], 1, METAS[KEYS[1]].tokens))
    assert not told.learn(KEYS[1], BlockMeta(KEYS[0], 1))
    assert not told.learn(others[1][0], BlockMeta(None, 1, others[1][1].tokens))
    assert told.take() == []
    assert told.learn(KEYS[1])


def test_of_a_salted_prompt_the_first_block_says_so(told: Told) -> None:
    salted = keys_and_metas(tokens_of(1, 2), "secret")
    for key, meta in salted:
        told.look(key, DRAM)
        assert told.learn(key, meta)
    assert [change.is_salted for change in told.changes] == [True, False]


def test_a_snapshot_is_what_was_told_from_the_beginnings_on(told: Told) -> None:
    blocks = [keys_and_metas(tokens_of(seed, 5)) for seed in range(3, 8)]
    metas = {key: meta for prompt in blocks for key, meta in prompt}
    keys = list(metas)
    random.Random(1).shuffle(keys)
    for at, key in enumerate(keys):
        told.look(key, SSD if at % 3 else DRAM | SSD)
        told.learn(key, metas[key])
    now = {(tier, key) for _, tier, key in told.take()}
    assert len(now) == told.space.told_tiers > told.space.told == len(keys)
    for key in keys[:4]:
        told.look(key, 0)
    now -= {(tier, key) for _, tier, key in told.take()}
    done: set[BlockKey] = set()
    given = [c for start in range(0, len(keys), 4) for c in told.space.stored(keys[start : start + 4], done)]
    assert {(change.tier, change.key) for change in given} == now
    assert len(given) == len(now)
    first = {change.key: at for at, change in reversed([*enumerate(given)])}
    parents = [(c.key, c.parent) for c in given if c.parent in first]
    assert parents
    assert all(first[parent] < first[key] for key, parent in parents)  # type: ignore[index]
