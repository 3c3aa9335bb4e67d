from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from msgspec import structs

from moonpool.core.cost import PrefillCoefficients, PrefillCost, TransferCost
from moonpool.core.placement import PLACEMENT_POLICIES, DecodeOption, PrefillOption, View, Wanted, place
from moonpool.core.vocabulary import PartId

COST = PrefillCost(PrefillCoefficients(0.0, 0.01, 0.0))
WANTED = Wanted(tokens=161, block_tokens=16, block_bytes=1000)
"""1.61 s to compute, 10 blocks at most from the cache."""
FAST = TransferCost(0.0, 1e9)


def prefill(index: int, queue: float = 0.0, held: int = 0, **more: int) -> PrefillOption:
    return PrefillOption(PartId(f"prefill-{index}"), PartId(f"node-{index}"), queue, held, COST, held, **more)


def decode(index: int, tbt: float = 0.05, held: int = 0) -> DecodeOption:
    return DecodeOption(PartId(f"decode-{index}"), PartId(f"node-{index}"), tbt, held)


def view(*options: PrefillOption, transfer: TransferCost = FAST, **more: tuple[int, float]) -> View:
    """Sources are those nodes that hold something, and `node_X=(blocks, seconds until its link is free)`."""
    sources = [(p.node, p.resident_blocks) for p in options if p.resident_blocks]
    given = {PartId(name.replace("_", "-")): pair for name, pair in more.items()}
    sources += [(node, blocks) for node, (blocks, _) in given.items()]
    sources.sort(key=lambda source: (-source[1], source[0]))
    waits = {node: wait for node, (_, wait) in given.items() if wait}
    return View(options, (decode(0), decode(1)), dict(sources), transfer, waits)


def choose(policy: str, seen: View, wanted: Wanted = WANTED, threshold: float = 2.0):  # type: ignore[no-untyped-def]
    return place(policy, seen, wanted, np.random.Generator(np.random.PCG64(1)), threshold)  # type: ignore[arg-type]


def test_load_balance_takes_the_shortest_queue_whatever_is_cached() -> None:
    choice = choose("load-balance", view(prefill(0, 0.5, held=10), prefill(1, 0.4), prefill(2, 0.4)))
    assert choice.prefill.id == "prefill-1"
    assert choice.ttft_seconds == pytest.approx(0.4 + 1.61)


def test_cache_aware_weighs_queue_against_hits_and_never_fetches() -> None:
    near = choose("cache-aware", view(prefill(0, 1.0, held=10), prefill(1)))
    assert (near.prefill.id, near.hit_blocks, near.fetch) == ("prefill-0", 10, None)
    assert near.ttft_seconds == pytest.approx(1.0 + 0.01)
    far = choose("cache-aware", view(prefill(0, 1.7, held=10), prefill(1)))
    assert (far.prefill.id, far.hit_blocks, far.fetch) == ("prefill-1", 0, None)


def test_random_uses_all_and_is_repeatable() -> None:
    seen = view(prefill(0, 100.0), prefill(1), prefill(2, 5.0))

    def draw(seed: int) -> list[tuple[str, str]]:
        rng = np.random.Generator(np.random.PCG64(seed))
        choices = [place("random", seen, WANTED, rng, 2.0) for _ in range(300)]
        return [(c.prefill.id, c.decode.id) for c in choices]

    counts = Counter(p for p, _ in draw(1))
    assert all(60 < counts[f"prefill-{i}"] < 140 for i in range(3))
    assert 100 < Counter(d for _, d in draw(1))["decode-0"] < 200
    assert draw(1) == draw(1) != draw(2)


def test_algorithm_1_fetches_what_is_missing_to_an_idle_instance() -> None:
    choice = choose("algorithm-1", view(prefill(0, 5.0, held=10), prefill(1, held=2)))
    assert choice.prefill.id == "prefill-1"
    assert choice.fetch is not None
    assert (choice.fetch.source, choice.fetch.first, choice.fetch.count, choice.hit_blocks) == ("node-0", 2, 8, 10)
    assert choice.ttft_seconds == pytest.approx(0.01, abs=1e-3)


def test_algorithm_1_stays_where_the_prefix_is_if_moving_it_takes_longer() -> None:
    slow = TransferCost(0.0, 1000.0)
    choice = choose("algorithm-1", view(prefill(0, 3.0, held=10), prefill(1), transfer=slow))
    assert (choice.prefill.id, choice.fetch) == ("prefill-0", None)


@pytest.mark.parametrize(
    ("held", "best", "threshold", "fetches"),
    [
        (0, 1, 1e9, True),  # nothing of one's own: the ratio is infinite
        (0, 0, 1.0, False),  # 0/0 is 1, and there is nothing to fetch
        (5, 10, 2.0, True),  # equality fetches
        (5, 10, 2.0001, False),
        (6, 10, 2.0, False),
        (10, 10, 1.0, False),  # equal runs: nothing is missing
        (4, 3, 1.0, False),
    ],
)
def test_algorithm_1_traps(held: int, best: int, threshold: float, fetches: bool) -> None:
    seen = view(prefill(0, held=held), node_9=(best, 0)) if best else view(prefill(0, held=held))
    choice = choose("algorithm-1", seen, threshold=threshold)
    assert (choice.fetch is not None) == fetches
    assert choice.hit_blocks == (best if fetches else held)


def test_the_fetch_comes_from_the_source_that_sends_least() -> None:
    choice = choose("algorithm-1", view(prefill(0), node_7=(10, 0.5), node_8=(10, 0.1), node_9=(4, 0)))
    assert choice.fetch is not None
    assert choice.fetch.source == "node-8"


def test_round_robin_takes_whoever_got_the_fewest_whatever_is_cached_or_queued() -> None:
    seen = view(prefill(0, held=10, placed=3), prefill(1, 9.0, placed=2), prefill(2, 8.0, placed=2))
    assert choose("round-robin", seen).prefill.id == "prefill-1"
    turned = view(prefill(0, placed=3), prefill(1, 9.0, placed=3), prefill(2, placed=2))
    assert choose("round-robin", turned).prefill.id == "prefill-2"


def test_prefix_affine_goes_where_the_fewest_tokens_come_before_the_first_one() -> None:
    """10 blocks of 16 cached leave 1 of 161 tokens."""
    near = choose("prefix-affine", view(prefill(0, held=10, tokens=159), prefill(1)))
    assert (near.prefill.id, near.hit_blocks, near.fetch) == ("prefill-0", 10, None)
    assert choose("prefix-affine", view(prefill(0, held=10, tokens=161), prefill(1))).prefill.id == "prefill-1"
    equal = structs.replace(
        view(prefill(0), prefill(1)),
        decode=tuple(DecodeOption(PartId(f"prefill-{n}"), PartId(f"node-{n}"), 0.05, 0, 2 - n) for n in range(2)),
    )
    assert choose("prefix-affine", equal).prefill.id == "prefill-1", "the one with the smaller batch"


@pytest.mark.parametrize("policy", PLACEMENT_POLICIES)
def test_one_token_stays_uncached(policy: str) -> None:
    exact = structs.replace(WANTED, tokens=160)
    assert choose(policy, view(prefill(0, held=10)), exact).hit_blocks == 9
    if policy in ("algorithm-1", "kvcache-centric"):
        fetched = choose(policy, view(prefill(0), node_9=(10, 0)), exact)
        assert fetched.fetch.count == fetched.hit_blocks == 9


def test_decode_by_predicted_step_then_by_what_need_not_move_then_by_id() -> None:
    def chosen(*options: DecodeOption) -> str:
        return choose("algorithm-1", structs.replace(view(prefill(0)), decode=options)).decode.id

    assert chosen(decode(0, 0.06, held=9), decode(1, 0.05)) == "decode-1"
    assert chosen(decode(0), decode(1, held=3)) == "decode-1"
    assert chosen(decode(1), decode(0)) == "decode-0"


@pytest.mark.parametrize("policy", [p for p in PLACEMENT_POLICIES if p != "random"])
def test_ties_break_by_id(policy: str) -> None:
    assert choose(policy, view(prefill(1), prefill(0))).prefill.id == "prefill-0"


def test_lmetric_multiplies_what_is_to_compute_with_the_batch() -> None:
    # 161 tokens are wanted: (100 + 1) * 2 against (0 + 161) * 1, then against a batch of one more.
    held = prefill(0, held=10, tokens=100, requests=1)
    assert choose("lmetric", view(held, prefill(1))).prefill.id == "prefill-1"
    assert choose("lmetric", view(held, prefill(1, requests=1))).prefill.id == "prefill-0"
    busy = decode(0, tbt=0.01), decode(1, tbt=0.02)
    seen = structs.replace(view(held), decode=(structs.replace(busy[0], requests=3), busy[1]))
    assert choose("lmetric", seen).decode.id == "decode-1"


def test_dynamo_adds_blocks_to_compute() -> None:
    # 11 new blocks on the empty one against 1 of 161 tokens and what is queued there.
    assert choose("dynamo", view(prefill(0, held=10, tokens=159), prefill(1))).prefill.id == "prefill-0"
    assert choose("dynamo", view(prefill(0, held=10, tokens=161), prefill(1))).prefill.id == "prefill-1"
    full = structs.replace(decode(0, tbt=0.01), pages=9)
    assert choose("dynamo", structs.replace(view(prefill(0)), decode=(full, decode(1)))).decode.id == "decode-1"
