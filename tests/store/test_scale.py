"""A node with many blocks on SSD, and what measures it."""

from __future__ import annotations

import random
from pathlib import Path

from moonpool.bench.scale import SPACE, measure_directory, measure_restart
from moonpool.core.vocabulary import BlockKey
from moonpool.store.extents import PAGE_BYTES
from moonpool.store.index import Index, Recovered, Shelved, recover

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
