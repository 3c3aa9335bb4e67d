"""The default placement, case by case; one block takes 0.16 s to compute."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from moonpool.core.cost import PrefillCoefficients, PrefillCost, TransferCost
from moonpool.core.kvcentric import NEAR
from moonpool.core.placement import Choice, DecodeOption, PrefillOption, View, Wanted, place
from moonpool.core.vocabulary import PartId, RequestId

COST = PrefillCost(PrefillCoefficients(0.0, 0.01, 0.0))
BENT = PrefillCost(PrefillCoefficients(0.01, 0.01, 1e-5))
WANTED = Wanted(tokens=161, block_tokens=16, block_bytes=1000)
BLOCK = 0.16
FAST = TransferCost(0.0, 1e9, 1e9)
BLOCK_A_TENTH = TransferCost(0.0, 1e4, 1e4)
"""A block takes 0.1 s on the way, and as long from an SSD."""


def prefill(index: int, queue: float = 0.0, held: int = 0, **more: int) -> PrefillOption:
    return PrefillOption(PartId(f"prefill-{index}"), PartId(f"node-{index}"), queue, held, COST, held, **more)


def decode(index: int, tbt: float = 0.05, held: int = 0) -> DecodeOption:
    return DecodeOption(PartId(f"decode-{index}"), PartId(f"node-d{index}"), tbt, held)


class Source(NamedTuple):
    node: PartId
    blocks: int
    slow: int


def source(name: str, blocks: int, slow: int = 0) -> Source:
    return Source(PartId(name), blocks, slow)


def view(*options: PrefillOption, sources: tuple[Source, ...] = (), transfer: TransferCost = FAST) -> View:
    held, slow = {s.node: s.blocks for s in sources}, {s.node: s.slow for s in sources if s.slow}
    return View(options, (decode(0), decode(1)), held, transfer, slow=slow)


def choose(seen: View, wanted: Wanted = WANTED) -> Choice:
    return place("kvcache-centric", seen, wanted, np.random.Generator(np.random.PCG64(1)), 1.0)


def test_an_idle_instance_fetches_what_a_busy_one_holds() -> None:
    choice = choose(view(prefill(0, 5.0, held=10), prefill(1, held=2), sources=(source("node-0", 10),)))
    assert choice.prefill.id == "prefill-1"
    assert choice.fetch is not None
    assert (choice.fetch.source, choice.fetch.first, choice.fetch.count, choice.hit_blocks) == ("node-0", 2, 8, 10)
    assert choice.prefill_seconds == pytest.approx(0.01)


def test_a_fetch_goes_on_while_the_queue_computes() -> None:
    """The paper's algorithm adds both up."""
    seen = view(prefill(0, 1.0), sources=(source("node-9", 10),), transfer=BLOCK_A_TENTH)
    choice = choose(seen)
    assert choice.hit_blocks == 10
    assert choice.fetch_seconds == pytest.approx(1.0)
    assert choice.ttft_seconds == pytest.approx(1.0 + 0.01)
    summed = place("algorithm-1", seen, WANTED, np.random.Generator(np.random.PCG64(1)), 1.0)
    assert summed.ttft_seconds == pytest.approx(2.0 + 0.01)


def test_as_much_is_fetched_as_comes_while_it_waits_and_the_rest_is_computed() -> None:
    slow = TransferCost(0.0, 1000 / 0.2, 1e9)
    choice = choose(view(prefill(0, 0.9), sources=(source("node-9", 10),), transfer=slow))
    # All 10 blocks take 2 s; in the 0.9 s of the queue 4 come, and the next one 0.1 s later.
    assert choice.fetch is not None
    assert (choice.fetch.first, choice.fetch.count, choice.hit_blocks) == (0, 5, 5)
    assert choice.ttft_seconds == pytest.approx(1.0 + 5 * BLOCK + 0.01)


def test_an_idle_instance_computes_what_would_come_later() -> None:
    slow = TransferCost(0.0, 1000 / 0.2, 1e9)
    choice = choose(view(prefill(0), sources=(source("node-9", 10),), transfer=slow))
    assert choice.fetch is None
    assert choice.ttft_seconds == pytest.approx(1.61)


def test_the_queue_of_either_link_counts() -> None:
    sources = source("node-7", 10), source("node-8", 9)
    seen = view(prefill(0), prefill(1), sources=sources, transfer=BLOCK_A_TENTH)
    assert choose(seen).fetch.source == "node-7"  # type: ignore[union-attr]
    busy = choose(structs.replace(seen, link_waits={PartId("node-7"): 0.5, PartId("node-0"): 0.5}))
    assert busy.fetch is not None
    assert (busy.prefill.id, busy.fetch.source, busy.hit_blocks) == ("prefill-1", "node-8", 9)
    both = structs.replace(seen, link_waits={PartId(f"node-{i}"): 3.0 for i in (0, 1)})
    assert choose(both).fetch is None, "whoever fetches has to wait longer than computing takes"


def test_what_is_on_ssd_only_takes_longer() -> None:
    sources = source("node-7", 10, slow=10), source("node-8", 9)
    choice = choose(view(prefill(0), sources=sources, transfer=BLOCK_A_TENTH))
    assert choice.fetch is not None
    assert (choice.fetch.source, choice.fetch.count) == ("node-8", 9)
    own = prefill(0, held=10, slow_blocks=10)
    assert choose(view(own, transfer=BLOCK_A_TENTH)).ttft_seconds == pytest.approx(1.0 + 0.01)
    assert choose(view(structs.replace(own, queue_seconds=3.0), transfer=BLOCK_A_TENTH)).ttft_seconds < 3.02


def test_blocks_that_are_coming_are_waited_for_and_named() -> None:
    coming = structs.replace(prefill(0, 1.0, held=4), held_blocks=10, producer=RequestId("first"))
    choice = choose(view(coming, prefill(1)))
    assert (choice.prefill.id, choice.hit_blocks, choice.awaits) == ("prefill-0", 10, "first")
    # Fetched blocks are there sooner: nothing is awaited.
    fetched = choose(view(coming, prefill(1), sources=(source("node-9", 10),)))
    assert (fetched.prefill.id, fetched.awaits) == ("prefill-1", None)


def test_between_near_equals_the_least_work_then_the_fewest_requests() -> None:
    near = 10.0 * (1.0 + NEAR / 2)
    choice = choose(view(prefill(0, 10.0 - 1.61), prefill(1, near - 0.01, held=10)))
    assert choice.prefill.id == "prefill-1"
    assert choose(view(prefill(0, placed=3), prefill(1, placed=2), prefill(2, placed=2))).prefill.id == "prefill-1"


def test_a_decode_instance_beyond_the_limit_is_avoided_and_what_it_holds_need_not_move() -> None:
    def chosen(*options: DecodeOption, wanted: Wanted = WANTED, transfer: TransferCost = FAST) -> str:
        return choose(structs.replace(view(prefill(0), transfer=transfer), decode=options), wanted).decode.id

    assert chosen(decode(0, 0.06, held=9), decode(1, 0.05)) == "decode-1"
    assert chosen(decode(0), decode(1, held=3)) == "decode-1"
    slow = TransferCost(0.0, 1000 / 0.4, 1e9)
    assert chosen(decode(0, 0.06, held=9), decode(1, 0.05), transfer=slow) == "decode-0", "its KV is there sooner"
    limited = structs.replace(WANTED, tbt_limit=0.055)
    assert chosen(decode(0, 0.06, held=9), decode(1, 0.05), wanted=limited, transfer=slow) == "decode-1"
    assert chosen(decode(0, 0.06), decode(1, 0.07), wanted=limited) == "decode-0", "where all are beyond it"


@given(
    st.floats(0, 5),
    st.integers(0, 9),
    st.lists(st.tuples(st.integers(1, 10), st.floats(0, 2)), max_size=4),
    st.floats(0.01, 1.0),
    st.booleans(),
)
def test_no_other_end_of_any_fetch_would_be_quicker(
    queue: float, held: int, given_sources: list[tuple[int, float]], block_seconds: float, bent: bool
) -> None:
    transfer = TransferCost(0.01, 1000 / block_seconds, 1e9)
    sources = [(source(f"node-{i + 5}", blocks), wait) for i, (blocks, wait) in enumerate(given_sources)]
    sources.sort(key=lambda pair: (-pair[0].blocks, pair[0].node))
    cost = BENT if bent else COST
    option = structs.replace(prefill(0, queue, held), cost=cost)
    seen = structs.replace(
        view(option, sources=tuple(s for s, _ in sources), transfer=transfer),
        link_waits={s.node: wait for s, wait in sources if wait},
    )
    quickest = queue + cost.seconds(161, held * 16)
    for each, wait in sources:
        for end in range(held + 1, each.blocks + 1):
            arrival = wait + 0.01 + (end - held) * block_seconds
            quickest = min(quickest, max(queue, arrival) + cost.seconds(161, end * 16))
    assert choose(seen).ttft_seconds == pytest.approx(quickest, rel=1e-3)


def test_where_all_are_busy_a_prompt_waits_for_the_instance_that_has_its_prefix() -> None:
    """It would come to its first token a little sooner elsewhere, and delay all who come later there."""
    holder, other = prefill(0, 11.8, held=10), prefill(1, 10.0)
    choice = choose(view(holder, other))
    assert choice.prefill.id == "prefill-0"
    assert choice.ttft_seconds > 10.0 + WANTED.tokens * 0.01
    idle = choose(view(prefill(0, 1.8, held=10), prefill(1)))
    assert idle.prefill.id == "prefill-1", "an idle instance computes at once"


def test_it_waits_no_longer_than_its_limit_allows() -> None:
    holder, other = prefill(0, 11.8, held=10), prefill(1, 10.0)
    strict = structs.replace(WANTED, ttft_left=11.7)
    assert choose(view(holder, other), strict).prefill.id == "prefill-1"
    hopeless = structs.replace(WANTED, ttft_left=1.0)
    assert choose(view(holder, other), hopeless).prefill.id == "prefill-0", "late in any case, it computes least"
