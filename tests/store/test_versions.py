"""A node never has two versions of one key, whatever its tiers, its disks and its restarts do."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from moonpool.core.vocabulary import BlockKey
from moonpool.errors import PoolError
from moonpool.messenger.transfer import Bytes
from moonpool.store.rooms import ClientId, Room

from .kit import BLOCK, SECONDS, SPACE, bytes_of, eventually, keys_of, run_checksums
from .tiered import CLIENT, Tiered

OTHER = ClientId(2)
KEYS = keys_of("a", 16)
KEY = KEYS[0]


def write(tiers: Tiered, client: ClientId, room: Room, data: Bytes) -> None:
    block = room.blocks[0]
    assert block is not None
    if not block.resident:
        tiers.arena.slice(block.offset, BLOCK)[:] = data
        tiers.ledger.rooms.complete(client, room.id, [(0, 0, SPACE.runs)], run_checksums(data, SPACE.runs))
    tiers.ledger.rooms.close(client, room.id)


def shelve(tiers: Tiered, keys: Sequence[BlockKey] = KEYS) -> None:
    """As many others that the first of them is on the SSD alone."""
    tiers.put_gently(keys)
    name = SPACE.id, keys[0]
    assert tiers.ledger.shelf.find(name) is not None
    assert tiers.ledger.leading(SPACE, keys[:1]) == 0


def test_who_is_late_with_another_version_replaces_what_the_ssd_has(tmp_path: Path) -> None:
    other = bytes_of(keys_of("b", 1)[0])
    with Tiered(tmp_path, dram_blocks=8) as tiers:
        room = tiers.ledger.rooms.open(OTHER, SPACE, [KEY])
        shelve(tiers)
        write(tiers, OTHER, room, other)
        assert tiers.get(KEY) == bytes(other)
        tiers.put_gently(keys_of("c", 16))
        assert tiers.get(KEY) == bytes(other)


def test_the_same_version_leaves_the_ssd_alone(tmp_path: Path) -> None:
    with Tiered(tmp_path, dram_blocks=8) as tiers:
        room = tiers.ledger.rooms.open(OTHER, SPACE, [KEY])
        shelve(tiers)
        shelved = tiers.ledger.shelf.find((SPACE.id, KEY))
        write(tiers, OTHER, room, bytes_of(KEY))
        assert tiers.ledger.leading(SPACE, [KEY]) == 1
        assert tiers.ledger.shelf.find((SPACE.id, KEY)) is shelved


def test_another_version_stays_private_while_the_one_on_the_ssd_is_in_use(tmp_path: Path) -> None:
    with Tiered(tmp_path, dram_blocks=8) as tiers:
        room = tiers.ledger.rooms.open(OTHER, SPACE, [KEY])
        shelve(tiers)
        _, borrowed = tiers.ledger.shelf.borrow(SPACE.id, [KEY])
        write(tiers, OTHER, room, bytes_of(keys_of("b", 1)[0]))
        assert tiers.ledger.leading(SPACE, [KEY]) == 0
        tiers.ledger.shelf.give_back([shelved for _, shelved in borrowed])
        assert tiers.get(KEY) == bytes(bytes_of(KEY))


def test_an_ssd_that_is_late_brings_no_other_version(tmp_path: Path) -> None:
    with Tiered(tmp_path / "one", dram_blocks=8) as tiers:
        shelve(tiers)
        entries = tiers.ledger.shelf.entries(0)
    with Tiered(tmp_path / "two", dram_blocks=8) as tiers:
        room = tiers.ledger.rooms.open(CLIENT, SPACE, [KEY])
        write(tiers, CLIENT, room, bytes_of(keys_of("b", 1)[0]))
        tiers.ledger.shelf.add_volume(64 * BLOCK, entries, is_late=True)
        assert tiers.ledger.shelf.find((SPACE.id, KEY)) is None
        assert tiers.ledger.shelf.find((SPACE.id, KEYS[1])) is not None


def test_who_is_refused_while_the_ssd_writes_is_told_to_try_again(tmp_path: Path) -> None:
    with Tiered(tmp_path, dram_blocks=2) as tiers:
        slab = tiers.disks._volumes[0].slab
        may_go_on, write = threading.Event(), slab.write

        def wait(offset: int, buffers: Sequence[Bytes]) -> None:
            may_go_on.wait(SECONDS)
            write(offset, buffers)

        slab.write = wait  # type: ignore[method-assign]
        try:
            tiers.put(KEYS[:2])
            eventually(lambda: bool(tiers.ledger._blocks.saving), "the SSD writes")
            with pytest.raises(PoolError, match=f"{BLOCK} evictable bytes are just being written to an SSD"):
                tiers.ledger.rooms.open_each(OTHER, SPACE, KEYS[2:4], ())
        finally:
            may_go_on.set()
        eventually(lambda: not tiers.ledger._blocks.saving, "it has written")
        tiers.ledger.rooms.close(OTHER, tiers.ledger.rooms.open_each(OTHER, SPACE, KEYS[2:4], ()).id)
