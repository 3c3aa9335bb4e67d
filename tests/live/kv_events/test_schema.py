"""The bytes of KV events, read by vLLM's own classes as recorded and by the follower that reads vLLM's."""

from __future__ import annotations

import msgspec
import pytest

from moonpool.core.vocabulary import BlockKey, Tier
from moonpool.live.external.events import BlockTable, events_in
from moonpool.live.kv_events.schema import MOST_HASHES, MOST_TOKENS, AllBlocksCleared, Change, batches, encoded

from .kit import SIZE, SPACE, BlockRemoved, BlockStored, KVEventBatch, hash_of, keys_and_metas, tokens_of

TOKENS = tokens_of(1, 4)
PROMPT = keys_and_metas(TOKENS)
KEYS = [key for key, _ in PROMPT]
HASHES = [hash_of(key) for key in KEYS]


def stored(at: int, tier: Tier = Tier.DRAM, is_salted: bool = False) -> Change:
    key, meta = PROMPT[at]
    return Change(True, tier, key, meta.parent, meta.tokens, is_salted)


def removed(at: int, tier: Tier = Tier.DRAM) -> Change:
    return Change(False, tier, KEYS[at])


def read(changes: list[Change]) -> list[object]:
    (events,) = batches(changes)
    batch = msgspec.msgpack.decode(encoded(events, 7.5), type=KVEventBatch)
    assert (batch.ts, batch.data_parallel_rank) == (7.5, 0)
    return list(batch.events)


def test_blocks_that_continue_each_other_are_one_event() -> None:
    assert read(
        [stored(0), stored(1), stored(3), stored(0, Tier.SSD), removed(1), removed(3), removed(0, Tier.SSD)]
    ) == [
        BlockStored(HASHES[:2], None, TOKENS[: 2 * SIZE], SIZE, None, "CPU", None),
        BlockStored(HASHES[3:], HASHES[2], TOKENS[3 * SIZE :], SIZE, None, "CPU", None),
        BlockStored(HASHES[:1], None, TOKENS[:SIZE], SIZE, None, "STORAGE", None),
        BlockRemoved([HASHES[1], HASHES[3]], "CPU"),
        BlockRemoved([HASHES[0]], "STORAGE"),
    ]


def test_the_batch_is_an_array_of_three_and_events_are_maps() -> None:
    """Some routers take nothing else."""
    batch = msgspec.msgpack.decode(encoded([AllBlocksCleared(), *next(batches([stored(0)]))], 1.0))
    assert batch[0] == 1.0
    assert batch[2:] == [0]
    assert batch[1][0] == {"type": "AllBlocksCleared"}
    assert list(batch[1][1]) == [
        *("type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name")
    ]


def test_a_salt_is_not_told_and_matches_nobodys() -> None:
    salted = keys_and_metas(TOKENS, "secret")
    changes = [Change(True, Tier.DRAM, key, meta.parent, meta.tokens, at == 0) for at, (key, meta) in enumerate(salted)]
    (event,) = read(changes)
    assert isinstance(event, BlockStored)
    assert event.extra_keys == [(f"moonpool:{salted[0][0].hex()}",), None, None, None]
    (events,) = batches(changes)
    (heard,) = events_in(encoded(events, 0.0).replace(b"CPU", b"GPU"))
    assert not set(BlockTable(SPACE).apply(heard).came) & {*KEYS, *(key for key, _ in salted)}


def test_whoever_follows_vllm_follows_this() -> None:
    (events,) = batches([stored(0), stored(1), stored(2), removed(2)])
    table, held = BlockTable(SPACE), set[BlockKey]()
    for event in events_in(encoded(events, 0.0).replace(b"CPU", b"GPU")):
        known = table.apply(event)
        held = held.union(known.came).difference(known.went)
    assert held == set(KEYS[:2])


@pytest.mark.parametrize("count", [1, 3000])
def test_batches_are_bounded(count: int) -> None:
    """By tokens, unless it is one block; by hashes."""
    large = b"\0" * 4 * (MOST_TOKENS // 3 + 1)
    came = [Change(True, Tier.DRAM, BlockKey(bytes([at % 256]) * 16), None, large) for at in range(5)]
    assert [len(batch) for batch in batches(came)] == [2, 2, 1]
    huge = Change(True, Tier.DRAM, KEYS[0], None, b"\0" * 4 * 2 * MOST_TOKENS)
    assert [len(batch) for batch in batches([huge] * 2)] == [1, 1]
    went = [removed(0)] * count
    sizes = [sum(len(event.block_hashes) for event in batch) for batch in batches(went)]  # type: ignore[union-attr]
    assert sizes == ([1] if count == 1 else [MOST_HASHES, count - MOST_HASHES])
    assert not list(batches([]))
