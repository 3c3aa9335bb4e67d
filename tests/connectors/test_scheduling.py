"""The half beside vLLM's scheduler, on what vLLM's scheduler was seen to hand it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from moonpool.connectors.counters import Counters
from moonpool.connectors.identity import Shape, Spaces
from moonpool.connectors.lookup import Lookup
from moonpool.connectors.scheduling import TELL_SPACE, SchedulerHalf
from moonpool.core.blocks import block_keys
from moonpool.core.vocabulary import BlockKey, KeySpace, RequestId
from moonpool.errors import ConfigError

from .kit import LAYERS, MODEL, RUN_BYTES, SHAPE, SIZE, Request, spaces, step


class Has(Lookup):
    """A pool that has these blocks."""

    def __init__(self, *blocks: BlockKey) -> None:
        self.blocks = set(blocks)
        self.answers = True
        self.forgotten: list[str] = []

    def leading(self, request: RequestId, space: KeySpace, keys: tuple[BlockKey, ...]) -> int | None:
        if not self.answers:
            return None
        return next((at for at, key in enumerate(keys) if key not in self.blocks), len(keys))

    def forget(self, request: RequestId) -> None:
        self.forgotten.append(request)


def prompt(blocks: float, start: int = 100) -> list[int]:
    return list(range(start, start + int(blocks * SIZE)))


def half_of(pool: Lookup, known: Spaces | None = None, loads: bool = True, saves: bool = True) -> SchedulerHalf:
    return SchedulerHalf(known or spaces(), pool, Counters(), loads, saves)


def keys_of(tokens: list[int], salt: str = "") -> tuple[BlockKey, ...]:
    space = spaces().of(None)
    assert space is not None
    return block_keys(tokens, space, salt)


@pytest.mark.parametrize(("tokens", "hit"), [(1, 0), (SIZE, 0), (SIZE + 1, 1), (4 * SIZE, 3), (4 * SIZE + 5, 4)])
def test_at_most_the_last_block_and_a_token_are_computed_of_what_the_pool_has(tokens: int, hit: int) -> None:
    ids = list(range(tokens))
    half = half_of(Has(*keys_of(ids)))
    assert half.matched(Request("r", ids), 0) == (hit * SIZE, hit > 0)


def test_what_vllm_has_itself_is_not_loaded() -> None:
    ids = prompt(5.5)
    half, request = half_of(Has(*keys_of(ids)[:3])), Request("r", ids)
    assert half.matched(request, 3 * SIZE) == (0, False)
    assert half.matched(request, SIZE) == (2 * SIZE, True)
    half.allocated(request, [7, 3, 9, 1], 2 * SIZE)
    (load,) = half.plan(step()).loads
    assert (load.keys, load.blocks) == (keys_of(ids)[1:3], (3, 9))
    assert half.plan(step()).loads == ()
    # Afterwards vLLM computes the rest; the loaded blocks are not stored again.
    half.heard(["r"], ())
    (save,) = half.plan(step(new=[("r", [7, 3, 9, 1, 4, 5], 3 * SIZE, 2 * SIZE + 8)])).saves
    assert (save.keys, save.blocks, save.fresh) == (keys_of(ids), (7, 3, 9, 1, 4), 2)


def test_a_pool_that_has_not_answered_is_asked_again() -> None:
    pool = Has()
    half, request = half_of(pool), Request("r", prompt(2.5))
    pool.answers = False
    assert half.matched(request, 0) == (None, False)
    pool.answers = True
    assert half.matched(request, 0) == (0, False)


def test_blocks_are_stored_once_when_they_are_whole() -> None:
    ids = prompt(3.5)
    request, half = Request("r", ids), half_of(Has())
    half.matched(request, 0)
    half.allocated(request, [4, 5], 0)
    stored = [
        half.plan(step(new=[("r", [4, 5], 0, 24)])),
        half.plan(step(more=[("r", [6], 24, 20)])),
        half.plan(step(more=[("r", [8], 44, 12)])),
    ]
    assert [[save.blocks for save in plan.saves] for plan in stored] == [[(4,)], [(4, 5)], [(4, 5, 6)]]
    # Its answer: a block is whole when its last token has been computed, and known.
    for count in range(8):
        request.output.append(count)
        plan = half.plan(step(more=[("r", None, 56 + count, 1)]))
        assert [save.blocks for save in plan.saves] == ([(4, 5, 6, 8)] if count == 7 else [])
    assert plan.saves[0].keys == keys_of(request.all_token_ids)[:4]
    assert plan.saves[0].tokens == tuple(request.all_token_ids[: 4 * SIZE])
    half.finished(request)
    assert half.plan(step(more=[("r", [9], 64, 16)])).saves == ()


def test_where_vllm_schedules_ahead_a_block_waits_for_its_last_token() -> None:
    ids = prompt(1.5)
    request, half = Request("r", ids), half_of(Has())
    half.matched(request, 0)
    half.allocated(request, [4, 5], 0)
    half.plan(step(new=[("r", [4, 5], 0, 24)]))
    request.output = [1, 2, 3, 4, 5, 6, 7]
    assert half.plan(step(more=[("r", None, 31, 1)])).saves == ()
    request.output.append(8)
    assert len(half.plan(step(more=[("r", [6], 32, 1)])).saves) == 1


def test_a_preempted_request_has_other_blocks_when_it_is_resumed() -> None:
    ids = prompt(2)
    request, half = Request("r", ids), half_of(Has())
    half.matched(request, 0)
    half.allocated(request, [4, 5], 0)
    half.plan(step(new=[("r", [4, 5], 0, SIZE)]))
    half.matched(request, 0)
    half.allocated(request, [7, 8], 0)
    (save,) = half.plan(step(more=[("r", [7, 8], 0, 2 * SIZE)], resumed=["r"])).saves
    assert save.blocks == (7, 8)


def test_a_request_whose_load_failed_is_computed_and_stored() -> None:
    ids = prompt(3.5)
    half, request = half_of(Has(*keys_of(ids))), Request("r", ids)
    assert half.matched(request, 0) == (3 * SIZE, True)
    half.allocated(request, [1, 2, 3], 3 * SIZE)
    half.plan(step())
    half.heard((), {9})
    assert half.matched(request, 0) == (3 * SIZE, True)
    half.heard(["r"], {2, 3})
    assert half.matched(request, SIZE) == (0, False)
    (save,) = half.plan(step(new=[("r", [1, 2, 3, 4], SIZE, 40)])).saves
    assert save.blocks == (1, 2, 3)


def test_vllm_is_not_left_waiting_for_a_load_by_a_fault_of_ours() -> None:
    ids = prompt(3.5)
    half, request = half_of(Has(*keys_of(ids))), Request("r", ids)
    half.matched(request, 0)
    half.allocated(request, [1, 2, 3], 3 * SIZE)
    # Whatever goes wrong with what is stored, what is loaded is told.
    (load,) = half.plan(SimpleNamespace(scheduled_cached_reqs=None)).loads
    assert load.blocks == (1, 2, 3)
    half.allocated(request, [1, 2, 3], 3 * SIZE)
    half.give_up(request, [1, 2, 3])
    (load,) = half.plan(step()).loads
    assert (load.keys, load.blocks) == ((), (1, 2, 3))


def test_what_is_never_shared() -> None:
    ids = prompt(2.5)
    alike = Request("r", ids)
    pool = Has(*keys_of(ids), *keys_of(ids, "tenant a"))
    assert half_of(pool).matched(alike, 0) == (2 * SIZE, True)
    assert half_of(pool).matched(replace(alike, cache_salt="tenant a"), 0) == (2 * SIZE, True)
    unlike = {
        "another salt": replace(alike, cache_salt="tenant b"),
        "an image": replace(alike, mm_features=[object()]),
        "embeddings": replace(alike, prompt_embeds=object()),
        "mixed embeddings": replace(alike, prompt_is_token_ids=[True]),
        "no tokens": replace(alike, prompt_token_ids=None),
        "pooling": replace(alike, pooling_params=object()),
        "an adapter nobody can read": replace(alike, lora_request=lora("/nowhere")),
        "prompt logprobs": replace(alike, skip_reading_prefix_cache=True),
    }
    for what, request in unlike.items():
        half = half_of(pool)
        assert half.matched(request, 0) == (0, False), what
        half.allocated(request, [1, 2, 3], 0)
        saves = half.plan(step(new=[("r", [1, 2, 3], 0, 40)])).saves
        assert bool(saves) == (what in ("another salt", "prompt logprobs")), what


def lora(path: str, load_inplace: bool = False) -> SimpleNamespace:
    return SimpleNamespace(lora_name="a", lora_path=path, load_inplace=load_inplace)


def test_an_adapters_weights_make_a_space_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "adapter.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    known = spaces()
    plain, adapted = known.of(None), known.of(("a", str(tmp_path)))
    assert plain is not None
    assert adapted is not None
    assert plain.id != adapted.id
    ids = prompt(2.5)
    half = half_of(Has(*block_keys(ids, adapted)), known)
    assert half.matched(Request("r", ids, lora_request=lora(str(tmp_path))), 0) == (2 * SIZE, True)
    assert half.matched(Request("s", ids), 0) == (0, False)
    in_place = Request("t", ids, lora_request=lora(str(tmp_path), load_inplace=True))
    assert half.matched(in_place, 0) == (0, False)


def test_whatever_changes_the_bytes_makes_another_space() -> None:
    def space(ranks: int = 1, shape: Shape = SHAPE, **changes: object) -> KeySpace:
        known = Spaces(msgspec.structs.replace(MODEL, **changes))
        known.learn({(0, rank): shape for rank in range(ranks)})
        found = known.of(None)
        assert found is not None
        return found

    assert space() == space()
    assert (space().runs, space().run_bytes, space().block_tokens) == (LAYERS, RUN_BYTES, SIZE)
    assert space(ranks=2).runs == 2 * LAYERS
    others = [
        space(ranks=2),
        space(shape=msgspec.structs.replace(SHAPE, layout="another")),
        *(space(**{name: "x"}) for name in ("weights", "settings", "dtype")),
        space(block_tokens=32),
    ]
    assert len({other.id for other in others} | {space().id}) == len(others) + 1


def test_ranks_that_differ_or_are_pipeline_stages_are_refused() -> None:
    with pytest.raises(ConfigError, match="pipeline"):
        Spaces(MODEL).learn({(0, 0): SHAPE, (1, 0): SHAPE})
    with pytest.raises(ConfigError, match="differ"):
        Spaces(MODEL).learn({(0, 0): SHAPE, (0, 1): msgspec.structs.replace(SHAPE, run_bytes=1)})


def test_nothing_is_done_before_the_workers_have_said_what_their_blocks_look_like() -> None:
    half = half_of(Has(), Spaces(MODEL))
    assert half.matched(Request("r", prompt(2.5)), 0) == (0, False)


def test_a_producer_loads_nothing_and_a_consumer_stores_nothing() -> None:
    ids = prompt(2.5)
    for loads, saves in ((False, True), (True, False)):
        half, request = half_of(Has(*keys_of(ids)[:1]), loads=loads, saves=saves), Request("r", ids)
        assert half.matched(request, 0) == (SIZE * loads, loads)
        half.allocated(request, [1, 2, 3], SIZE * loads)
        plan = half.plan(step(new=[("r", [1, 2, 3], SIZE * loads, 40 - SIZE * loads)]))
        assert (len(plan.loads), len(plan.saves)) == (loads, saves)


def test_an_instance_tells_its_key_space_to_whoever_asks() -> None:
    half = half_of(Has())
    assert half.finished(Request("r", [1])) is None
    assert half.finished(Request("r", [1], kv_transfer_params={"do_remote_decode": True})) is None
    told = half.finished(Request("r", [1], kv_transfer_params={TELL_SPACE: True}))
    assert told is not None
    assert msgspec.convert(told[TELL_SPACE], KeySpace) == spaces().of(None)
    assert half_of(Has(), Spaces(MODEL)).finished(Request("r", [1], kv_transfer_params={TELL_SPACE: True})) is None
