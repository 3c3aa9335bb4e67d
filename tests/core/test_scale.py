"""The directory where it is large: nobody waits for its growth, and it says what a plain dict says."""

from __future__ import annotations

import random
import time

from moonpool.core.directory import Directory
from moonpool.core.masks import SHARDS, Masks
from moonpool.core.vocabulary import BlockKey, Chain, KeySpaceId, PartId, Tier

S = KeySpaceId("s")
NODES = [PartId(f"node-{number}") for number in range(12)]
ENTRIES = 200_000
GUARD_SECONDS = 0.025
"""Five times what it may take at fifty times the size (`make bench-scale`)."""


def random_keys(rng: random.Random, count: int) -> list[BlockKey]:
    return [BlockKey(rng.randbytes(16)) for _ in range(count)]


def test_masks_say_what_a_dict_says() -> None:
    rng = random.Random(1)
    keys = random_keys(rng, 2000)
    masks, model = Masks(), dict.fromkeys(keys, 0)
    for _ in range(300):
        some, bit = rng.sample(keys, 50), 1 << rng.randrange(12)
        if rng.random() < 0.6:
            assert masks.set_bit(some, bit) == sum(not model[key] & bit for key in some)
            model.update((key, model[key] | bit) for key in some)
        else:
            assert masks.clear_bit(some, bit) == sum(bool(model[key] & bit) for key in some)
            model.update((key, model[key] & ~bit) for key in some)
    assert dict(masks.items()) == {key: mask for key, mask in model.items() if mask}
    assert len(masks) == sum(map(bool, model.values()))
    assert all(masks.get(key) == mask for key, mask in model.items())


def test_shards_stay_small_whatever_the_keys_look_like() -> None:
    masks = Masks()
    for order in ("little", "big"):
        masks.set_bit([BlockKey(number.to_bytes(16, order)) for number in range(1 << 40, (1 << 40) + 50_000)], 1)
    assert max(map(len, masks.shards)) < 3 * len(masks) // SHARDS


def fill(seed: int) -> tuple[Directory, dict[BlockKey, set[PartId]], list[list[BlockKey]], float]:
    """A directory, what it should know, the prompts in it; the most seconds of processor time that one step took."""
    rng = random.Random(seed)
    directory, model, seqs = Directory(), dict[BlockKey, set[PartId]](), dict.fromkeys(NODES, 0)
    for node in NODES:
        directory.join(node)
        directory.replace(node, 0, ())
    slowest = 0.0
    prompts = [random_keys(rng, 50) for _ in range(ENTRIES // 50)]
    for number, keys in enumerate(prompts):
        for node in (NODES[number % 12], NODES[number % 5]):
            seqs[node] += 1
            began = time.thread_time()
            directory.stored(node, seqs[node], S, Tier.DRAM, keys)
            slowest = max(slowest, time.thread_time() - began)
            for key in keys:
                model.setdefault(key, set()).add(node)
    began = time.thread_time()
    directory.forget(NODES[3])
    directory.replace(NODES[4], seqs[NODES[4]], ((S, Tier.DRAM, prompts[0]),))
    slowest = max(slowest, time.thread_time() - began)
    for node in (NODES[3], NODES[4]):
        for holders in model.values():
            holders.discard(node)
    for key in prompts[0]:
        model[key].add(NODES[4])
    return directory, model, prompts, slowest


def test_no_insert_and_no_leave_takes_long() -> None:
    """Some 0.2 ms is usual; one dict of all keys would take 50 ms, each time. A busy machine may seem slow once."""
    pauses: list[float] = []
    while len(pauses) < 3 and (not pauses or pauses[-1] >= GUARD_SECONDS):
        directory, model, prompts, slowest = fill(len(pauses))
        pauses.append(slowest)
    assert min(pauses) < GUARD_SECONDS, pauses
    for keys in [*random.Random(1).sample(prompts, 200), prompts[0]]:
        assert list(directory.match(Chain(S, tuple(keys))).items()) == [(node, 50) for node in sorted(model[keys[0]])]
    directory.check_integrity(most=10 * ENTRIES)
