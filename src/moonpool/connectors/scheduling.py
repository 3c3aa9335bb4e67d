"""The half beside vLLM's scheduler: what of a prompt the pool has, which blocks to load, and which to store.

It knows vLLM's requests and step outputs by their attributes alone (those of `docs/vllm.md`'s versions), so it runs
without vLLM in tests.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from moonpool.connectors.counters import Counters
from moonpool.connectors.identity import Adapter, Spaces
from moonpool.connectors.lookup import Lookup
from moonpool.connectors.plan import Load, Save, StepPlan
from moonpool.core.blocks import extend_keys, hit_limit
from moonpool.core.vocabulary import BlockKey, KeySpace, KeySpaceId, RequestId

VllmRequest = Any
"""vllm.v1.request.Request"""
VllmStep = Any
"""vllm.v1.core.sched.output.SchedulerOutput"""

TELL_SPACE = "moonpool_key_space"
"""In a request's `kv_transfer_params`, true: which key space; in its answer's: that."""
NO_SPACE = KeySpace(KeySpaceId(""), 1, 1, 1)


@dataclass(slots=True, eq=False)
class _Known:
    """A request that is shared."""

    request: VllmRequest
    space: KeySpace
    keys: tuple[BlockKey, ...] = ()
    blocks: list[int] | None = None
    """vLLM's numbers of its blocks, once it has some."""
    local: int = 0
    """So many leading blocks vLLM had itself when the pool was asked."""
    stored: int = 0
    """So many leading blocks need not be stored (any more)."""
    failed: bool = False
    """A load failed: it is computed."""

    def chain(self, count: int) -> tuple[BlockKey, ...]:
        """Keys of its first blocks."""
        size = self.space.block_tokens
        if count > len(self.keys):
            tokens = self.request.all_token_ids[: count * size]
            self.keys = extend_keys(self.keys, tokens, self.space, self.request.cache_salt or "")
        return self.keys[:count]


class SchedulerHalf:
    """Used by one thread, the scheduler's."""

    def __init__(self, spaces: Spaces, lookup: Lookup, counters: Counters, loads: bool, saves: bool) -> None:
        self._spaces = spaces
        self._lookup = lookup
        self._counters = counters
        self._does_load = loads
        self._does_save = saves
        self._requests: dict[RequestId, _Known] = {}
        self._to_load: list[Load] = []
        self._loading: dict[RequestId, frozenset[int]] = {}
        """Blocks that workers are loading."""
        self._step = 0

    def matched(self, request: VllmRequest, computed: int) -> tuple[int | None, bool]:
        """(tokens that the pool has beyond the first `computed`, they are loaded between steps); None: ask again."""
        known = self._know(request)
        if known is None or not self._does_load or known.failed or request.skip_reading_prefix_cache:
            return 0, False
        size = known.space.block_tokens
        keys = known.chain(hit_limit(request.num_tokens, size))
        if len(keys) * size <= computed:
            return 0, False
        found = self._lookup.leading(RequestId(request.request_id), known.space, keys)
        if found is None:
            return None, False
        known.local, known.stored = computed // size, found
        more = max(0, found * size - computed)
        return more, more > 0

    def allocated(self, request: VllmRequest, blocks: Sequence[int], external: int) -> None:
        """vLLM has given the request these blocks; `external` tokens of them are to be loaded."""
        known = self._know(request)
        if known is None:
            return
        known.blocks = list(blocks)
        if not external:
            return
        size, name = known.space.block_tokens, RequestId(request.request_id)
        first = known.local
        end = first + external // size
        keys, places = known.chain(end)[first:], tuple(blocks[first:end])
        self._counters.add("hit_blocks", len(keys))
        self._to_load.append(Load(name, known.space, keys, places))
        self._loading[name] = frozenset(places)

    def give_up(self, request: VllmRequest, blocks: Sequence[int]) -> None:
        """`allocated` failed: vLLM, which may wait for a load, is to hear that nothing came."""
        name = RequestId(request.request_id)
        self._to_load = [load for load in self._to_load if load.request != name]
        self._to_load.append(Load(name, NO_SPACE, (), tuple(blocks)))

    def plan(self, step: VllmStep) -> StepPlan:
        """What the workers do beside this step. Never raises: loads that vLLM waits for have to reach them."""
        self._step += 1
        loads, self._to_load = tuple(self._to_load), []
        try:
            saves = self._saves(step)
        except Exception:
            self._counters.add("faults")
            self._counters.say("plan fault", "the blocks of a step are not stored", is_fault=True)
            saves = ()
        return StepPlan(loads, saves)

    def heard(self, arrived: Iterable[str], invalid: Collection[int]) -> None:
        """The workers are through with these requests' loads; these blocks did not come."""
        bad = frozenset(invalid)
        for name, blocks in self._loading.items():
            known = self._requests.get(name)
            if known is not None and blocks & bad:
                known.failed, known.stored = True, 0
        for req_id in arrived:
            self._loading.pop(RequestId(req_id), None)

    def finished(self, request: VllmRequest) -> dict[str, Any] | None:
        """`kv_transfer_params` of its answer: the key space of this instance, for whoever has asked for that."""
        name = RequestId(request.request_id)
        self._requests.pop(name, None)
        self._lookup.forget(name)
        asked = request.kv_transfer_params or {}
        space = self._spaces.of(None) if asked.get(TELL_SPACE) and self._spaces.is_known else None
        return None if space is None else {TELL_SPACE: msgspec.to_builtins(space)}

    def _know(self, request: VllmRequest) -> _Known | None:
        """None for a request whose tokens do not say all that its KV depends on."""
        name = RequestId(request.request_id)
        known = self._requests.get(name)
        if known is None and self._spaces.is_known and _is_told_by_tokens(request):
            space = self._spaces.of(_adapter(request))
            if space is not None:
                known = self._requests[name] = _Known(request, space)
        return known

    def _saves(self, step: VllmStep) -> tuple[Save, ...]:
        cached = step.scheduled_cached_reqs
        found = [
            *(
                self._save(new.req_id, new.block_ids, new.num_computed_tokens, step, is_all=True)
                for new in step.scheduled_new_reqs
            ),
            *(
                self._save(req_id, blocks, computed, step, req_id in cached.resumed_req_ids)
                for req_id, blocks, computed in zip(
                    cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
                )
            ),
        ]
        return tuple(save for save in found if save is not None)

    def _save(
        self, name: str, blocks: Sequence[Sequence[int]] | None, computed: int, step: VllmStep, is_all: bool
    ) -> Save | None:
        known = self._requests.get(RequestId(name))
        if known is None:
            return None
        if blocks is not None:
            known.blocks = list(blocks[0]) if is_all or known.blocks is None else [*known.blocks, *blocks[0]]
        # Some of what a step computes is not known yet: drafts, and where vLLM schedules ahead, its own last token.
        tokens = min(computed + step.num_scheduled_tokens.get(name, 0), len(known.request.all_token_ids))
        whole = min(tokens // known.space.block_tokens, len(known.blocks or ()))
        if not self._does_save or whole <= known.stored or known.blocks is None:
            return None
        fresh, known.stored = whole - known.stored, whole
        keys, places = known.chain(whole), tuple(known.blocks[:whole])
        ids = tuple(known.request.all_token_ids[: whole * known.space.block_tokens])
        return Save(RequestId(name), self._step, known.space, keys, places, fresh, ids)


def _is_told_by_tokens(request: VllmRequest) -> bool:
    return (
        request.prompt_token_ids is not None
        and request.prompt_embeds is None
        and request.prompt_is_token_ids is None
        and not request.mm_features
        and request.pooling_params is None
        and not (request.lora_request is not None and request.lora_request.load_inplace)
    )


def _adapter(request: VllmRequest) -> Adapter | None:
    lora = request.lora_request
    return None if lora is None else (lora.lora_name, lora.lora_path)
