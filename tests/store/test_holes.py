"""Blocks whose parent is in no tier of their node: counted in each tier, first to go, nearly none in the long run."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from moonpool.core.vocabulary import BlockKey

from .kit import SPACE, eventually, keys_of
from .tiered import Tiered


def on_ssd(tiered: Tiered, keys: Sequence[BlockKey]) -> None:
    """Out of DRAM, onto the SSD."""
    already = tiered.count("ssd_blocks")
    tiered.ledger.shelf.demote(SPACE.id, keys)
    eventually(lambda: tiered.count("ssd_blocks") == already + len(keys), "they are demoted")


def holes(tiered: Tiered) -> tuple[float, float]:
    tiered.ledger.check_integrity()
    return tiered.count("holes"), tiered.count("ssd_holes")


def test_a_parent_on_the_ssd_alone_is_not_gone(tmp_path: Path) -> None:
    with Tiered(tmp_path, dram_blocks=64) as tiered:
        keys = keys_of("a", 4)
        tiered.put(keys)
        on_ssd(tiered, keys[:2])
        assert holes(tiered) == (0, 0), "the third block's parent is on the SSD"
        tiered.ledger.catalogue.remove(SPACE.id, keys[1:2])
        assert holes(tiered) == (1, 0), "now it is nowhere"
        tiered.put(keys)
        assert holes(tiered) == (0, 0), "it is computed again"
        assert tiered.get(keys[0]) is not None
        assert holes(tiered) == (0, 0)


def test_a_continuation_on_the_ssd_alone_is_a_hole_without_its_prefix(tmp_path: Path) -> None:
    with Tiered(tmp_path, dram_blocks=64, ssd_blocks=8) as tiered:
        keys = keys_of("a", 4)
        tiered.put(keys)
        on_ssd(tiered, keys[2:])
        assert holes(tiered) == (0, 0), "its prefix is in DRAM"
        tiered.ledger.catalogue.remove(SPACE.id, keys[1:2])
        assert holes(tiered) == (0, 1)
        # Newer blocks fill the SSD: the hole goes first, and then the one behind it, before older whole prompts.
        old = keys_of("old", 1)
        tiered.put(old)
        on_ssd(tiered, old)
        tiered.put(keys_of("new", 7))
        already = tiered.count("ssd_evictions")
        tiered.ledger.shelf.demote(SPACE.id, keys_of("new", 7))
        eventually(lambda: tiered.count("ssd_evictions") == already + 2, "the SSD makes room")
        eventually(lambda: tiered.count("ssd_blocks") == 8, "for all of them")
        assert holes(tiered) == (0, 0)
        assert tiered.get(keys[2]) is None
        assert tiered.get(old[0]) is not None


def test_after_a_restart_parents_are_found_again(tmp_path: Path) -> None:
    keys = keys_of("a", 6)
    with Tiered(tmp_path, dram_blocks=64) as tiered:
        tiered.put(keys)
        on_ssd(tiered, [keys[n] for n in (0, 1, 2, 4, 5)])
    with Tiered(tmp_path, dram_blocks=64) as tiered:
        assert holes(tiered) == (0, 1), "the fourth block was in DRAM alone"
        tiered.put(keys)
        assert holes(tiered) == (0, 0)


def test_what_is_useless_is_not_saved(tmp_path: Path) -> None:
    with Tiered(tmp_path) as tiered:
        keys = keys_of("a", 8)
        tiered.put(keys[:4])
        tiered.ledger.catalogue.remove(SPACE.id, keys[:1])
        assert holes(tiered) == (1, 0)
        tiered.put(keys_of("b", 4))
        eventually(lambda: tiered.count("ssd_saves") == 2, "the rest of the reserve is saved")
        assert set(tiered.ledger.shelf.names()) == {(SPACE.id, key) for key in keys[2:4]}
        assert tiered.get(keys[1]) is not None, "it is in DRAM until it goes"


def test_in_the_long_run_there_are_nearly_none(tmp_path: Path) -> None:
    """Conversations that grow and pause, on a node for a few of them; the disk does not always keep up."""
    rng = random.Random(3)
    with Tiered(tmp_path, dram_blocks=24, ssd_blocks=48) as tiered:
        talks = [keys_of(f"talk {n}", 12) for n in range(16)]
        lengths = [0] * len(talks)
        most = 0.0
        for _ in range(400):
            n = rng.randrange(len(talks))
            lengths[n] = min(12, lengths[n] + rng.randrange(1, 4))
            tiered.put(talks[n][: lengths[n]])
            most = max(most, tiered.count("holes") + tiered.count("ssd_holes"))
        assert tiered.count("evictions") > 500
        assert tiered.count("ssd_evictions") > 50
        assert most <= 0.1 * (24 + 48), "they are not kept near zero"
        assert sum(holes(tiered)) <= 3
