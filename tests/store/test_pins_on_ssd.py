"""What is pinned is on the SSD at once, so that it is there when the node is started again."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from moonpool.store.pins import PIN_SHARE

from .kit import SPACE, bytes_of, eventually, keys_of
from .tiered import Tiered

DRAM = 32
PINNED = int(DRAM * PIN_SHARE)
KEYS = keys_of("pinned", PINNED)
NAMES = [(SPACE.id, key) for key in KEYS]


def test_pinned_blocks_are_copied_though_dram_is_not_short(tmp_path: Path) -> None:
    with Tiered(tmp_path, DRAM) as tiers:
        tiers.put(KEYS)
        assert tiers.count("ssd_blocks") == 0
        assert tiers.ledger.pins.pin(NAMES, time.monotonic() + 600) == [True] * PINNED
        eventually(lambda: tiers.count("ssd_blocks") == PINNED, "all of them are copied")
        tiers.ledger.check_integrity()
    with Tiered(tmp_path, DRAM, is_restart=True) as tiers:
        assert tiers.count("pins") == 0
        assert [tiers.get(key) for key in KEYS] == [bytes(bytes_of(key)) for key in KEYS]


def test_what_is_unpinned_before_its_turn_is_not_copied(tmp_path: Path) -> None:
    with Tiered(tmp_path, DRAM, ssd_blocks=64) as tiers:
        tiers.put(KEYS)
        with tiers.ledger._lock:  # the disk's thread has to wait
            tiers.ledger.pins.pin(NAMES, time.monotonic() + 600)
            tiers.ledger.pins.unpin(NAMES[1:])
        eventually(lambda: tiers.count("ssd_blocks") == 1, "the one that is still pinned is copied")
        assert tiers.ledger.pins.unpin(NAMES[:1]) == [True]


@pytest.mark.parametrize("ssd_blocks", [8, 16])
def test_copies_of_pinned_blocks_take_a_share_of_the_ssd(tmp_path: Path, ssd_blocks: int) -> None:
    with Tiered(tmp_path, DRAM, ssd_blocks) as tiers:
        tiers.put(KEYS)
        tiers.ledger.pins.pin(NAMES, time.monotonic() + 600)
        most = int(ssd_blocks * PIN_SHARE)
        eventually(lambda: tiers.count("ssd_blocks") == most, "the share is taken")
        # Others get the rest of it.
        others = keys_of("others", 2 * DRAM)
        tiers.put_gently(others)
        assert tiers.count("pins") == PINNED
        shelf = tiers.ledger.shelf
        with tiers.ledger._lock:
            assert sum(shelf.find(name) is not None for name in NAMES) == most
        assert tiers.count("ssd_evictions") > 0
