"""What a node tells the directory, replayed into a directory."""

from __future__ import annotations

import pytest

from moonpool.core.directory import Directory, IndexHealth
from moonpool.core.events import BlocksRemoved, BlocksStored, Snapshot
from moonpool.core.vocabulary import Chain, Incarnation, KeySpaceId, PartId, Tier
from moonpool.store import announcements
from moonpool.store.announcements import Announcements
from moonpool.store.blocks import Change, Name

from .kit import keys_of

NODE = PartId("node-0")
S, OTHER = KeySpaceId("aa"), KeySpaceId("bb")


def names(space: KeySpaceId, name: str, count: int) -> list[Name]:
    return [(space, key) for key in keys_of(name, count)]


def apply(directory: Directory, message: Snapshot | BlocksStored | BlocksRemoved) -> bool:
    """Whether the directory misses something."""
    match message:
        case Snapshot():
            directory.replace(NODE, message.seq, message.blocks, message.more)
            return False
        case BlocksStored():
            return directory.stored(NODE, message.seq, message.space, message.tier, message.keys, message.more)
        case BlocksRemoved():
            return directory.removed(NODE, message.seq, message.space, message.tier, message.keys)


@pytest.mark.parametrize("snapshot_keys", [1, 7, 1000])
def test_a_node_too_large_for_one_message_is_announced_whole(
    monkeypatch: pytest.MonkeyPatch, snapshot_keys: int
) -> None:
    monkeypatch.setattr(announcements, "KEYS_A_SNAPSHOT", snapshot_keys)
    monkeypatch.setattr(announcements, "KEYS_A_MESSAGE", 3)
    directory = Directory()
    directory.join(NODE)
    told = Announcements(NODE, Incarnation("1"), lambda: None)
    dram, ssd = names(S, "a", 5), [*names(S, "b", 10), *names(OTHER, "c", 4)]
    told.ask_snapshot()
    first = told.next(dram, ssd)
    assert first is not None
    assert not apply(directory, first)
    # Meanwhile one that is still to be told of goes, and another comes.
    told.note([Change(False, ssd[-1], Tier.SSD)])
    told.note([Change(True, names(S, "d", 1)[0], Tier.DRAM)])
    is_whole = False
    while (message := told.next([], [])) is not None:
        is_whole |= sum(directory.counts(NODE).values()) >= 19
        assert directory.health(NODE) is (IndexHealth.EXACT if is_whole else IndexHealth.CATCHING_UP)
        assert not apply(directory, message)
    assert directory.counts(NODE) == {Tier.DRAM: 6, Tier.SSD: 13}
    assert directory.health(NODE) is IndexHealth.EXACT
    assert list(directory.match(Chain(S, tuple(keys_of("b", 10)))).items()) == [(NODE, 10)]
    directory.check_integrity()


def test_tiers_are_told_apart() -> None:
    directory = Directory()
    directory.join(NODE)
    told = Announcements(NODE, Incarnation("1"), lambda: None)
    told.ask_snapshot()
    (block,) = names(S, "a", 1)
    for change in (Change(True, block), Change(True, block, Tier.SSD), Change(False, block)):
        told.note([change])
    while (message := told.next([block], [])) is not None:
        apply(directory, message)
    for change in (Change(True, block, Tier.SSD), Change(False, block)):
        told.note([change])
    while (message := told.next([], [])) is not None:
        apply(directory, message)
    assert directory.counts(NODE) == {Tier.DRAM: 0, Tier.SSD: 1}
    assert list(directory.match(Chain(S, (block[1],))).items()) == [(NODE, 1)]
