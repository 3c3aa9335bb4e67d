"""A node with many blocks on SSD, and what measures it."""

from __future__ import annotations

import random
import threading
from pathlib import Path

from moonpool.bench.scale import SPACE, measure_directory, measure_restart
from moonpool.core.eviction import Eviction
from moonpool.core.vocabulary import BlockKey, KeySpace, KeySpaceId
from moonpool.store.blocks import Blocks, Name
from moonpool.store.extents import PAGE_BYTES, Extents
from moonpool.store.index import Index, Recovered, Shelved, recover
from moonpool.store.shelf import Shelf

BLOCKS = 20_000


def test_a_large_index_says_what_was_written(tmp_path: Path) -> None:
    rng = random.Random(3)
    index = Index(tmp_path / "index", Recovered())
    model: dict[BlockKey, Shelved] = {}
    free = list(range(BLOCKS))
    rng.shuffle(free)
    for _ in range(BLOCKS // 200):
        gone = [model.pop(key) for key in rng.sample(sorted(model), min(len(model), rng.randrange(100)))]
        free += [entry.offset // PAGE_BYTES for entry in gone]
        index.append((), gone)
        come = [_entry(rng, free.pop()) for _ in range(rng.randrange(300))]
        index.append(come, ())
        model.update((entry.key, entry) for entry in come)
    index.close()
    found = recover(tmp_path / "index", BLOCKS * PAGE_BYTES)
    assert not found.losses
    assert {entry.key: _plain(entry) for entry in found.entries} == {key: _plain(e) for key, e in model.items()}
    assert [entry.key for entry in found.entries] == list(model), "the oldest first"
    # In a smaller slab the rest is still good.
    within = recover(tmp_path / "index", BLOCKS // 2 * PAGE_BYTES)
    assert {entry.key for entry in within.entries} == {
        key for key, entry in model.items() if entry.offset < BLOCKS // 2 * PAGE_BYTES
    }


def _entry(rng: random.Random, place: int) -> Shelved:
    parent = BlockKey(rng.randbytes(16)) if rng.random() < 0.9 else None
    key, checksums = BlockKey(rng.randbytes(16)), rng.randbytes(8 * SPACE.runs)
    return Shelved(place * PAGE_BYTES, SPACE, key, parent, checksums, PAGE_BYTES)


def _plain(entry: Shelved) -> tuple[object, ...]:
    return entry.offset, entry.space, entry.parent, entry.checksums, entry.nbytes


def test_the_benchmark_measures_what_it_says() -> None:
    rows, figures = measure_directory(20_000)
    assert dict(rows)["entries"] == "19,968"
    assert 0 < figures["lookup"] <= figures["p99"]
    rows, seconds = measure_restart(3000)
    assert (dict(rows)["blocks on SSD"], seconds > 0) == ("3,000", True)


def test_saving_ahead_does_not_look_through_all_of_dram_for_each_block() -> None:
    """Every block is on SSD before it goes, and finding it cost a look at some blocks, not at half of them."""
    count = 1000
    blocks = Blocks(Extents(count * PAGE_BYTES), lambda change: None, Eviction())
    shelf = Shelf(threading.Condition(threading.RLock()), blocks, lambda change: None)
    shelf.add_volume(4 * count * PAGE_BYTES, [])
    space = KeySpace(KeySpaceId("aa"), 64, 1, PAGE_BYTES)
    looked_at = saved = 0
    victims = blocks.eviction.victims

    def counted(needed: int) -> tuple[Name, ...]:
        nonlocal looked_at
        found = victims(needed)
        looked_at += len(found)
        return found

    blocks.eviction.victims = counted  # type: ignore[method-assign]
    for number in range(2 * count):
        block = blocks.allocate(space, BlockKey(number.to_bytes(16, "big")), None, 0, b"")
        assert block is not None
        block.complete = 1
        blocks.promote(space, [block])
        blocks.eviction.unpin([block.name])
        while (saves := shelf.next_saves(0, 32, 16 << 20)) is not None:
            saved += len(saves.blocks)
            shelf.saved(saves, True)
    assert blocks.evictions == blocks.demotions == count, "nothing was lost"
    assert saved >= 1.4 * count
    assert looked_at < 100 * saved, "half of DRAM is 500 blocks"
    shelf.check_integrity()
