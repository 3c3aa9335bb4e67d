"""What a request's placement can choose from now: the fleet, the directory and the request as one view.

The answer is `Options`, a `Refusal` (it can never fit) or a `Wait` (not now, and why).
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

from msgspec import Struct, structs

from moonpool.core.admission import Refusal, check_context, check_room
from moonpool.core.choice import Choice, DecodeOption, PrefillOption, View, Wanted
from moonpool.core.classes import BATCH, is_batch, kept
from moonpool.core.directory import Directory
from moonpool.core.fleet import DecodeLoad, Fleet, PrefillLoad
from moonpool.core.inline import inlining
from moonpool.core.pages import pages_for
from moonpool.core.requests import Request
from moonpool.core.settings import ConductorConfig
from moonpool.core.vocabulary import BlockKey, Chain, KeySpace, PartId, PartKind, RejectReason

BATCH_SPARES = 0.3
"""The share of a decode instance that batch work leaves free."""
_UNLIMITED = 1 << 62
Load = TypeVar("Load", PrefillLoad, DecodeLoad)


class Wait(Struct, frozen=True):
    reason: str


class Options(Struct, frozen=True):
    view: View
    wanted: Wanted
    space: KeySpace
    keys: tuple[BlockKey, ...]
    pages: int
    """To book on the decode instance."""
    room_bytes: int


def options_for(
    request: Request, fleet: Fleet, directory: Directory, config: ConductorConfig, now: float, room_now: bool = True
) -> Options | Refusal | Wait:
    """`room_now`: a decode instance must have room in its batch already."""
    model = request.arrived.model
    known = [chain.space for chain in request.arrived.chains]
    prefill = [p for p in fleet.prefill_for(model) if p.space.id in known]
    decode = [d for d in fleet.decode_for(model) if d.space.id in known]
    absent = _absent(fleet, model, prefill, decode, now)
    if absent is not None:
        return absent
    spaces = {load.space.id: load.space for load in prefill} | {load.space.id: load.space for load in decode}
    needs = {id_: _Needs.of(request, space, config.output_share) for id_, space in spaces.items()}
    total = request.total_tokens
    able_prefill = [p for p in prefill if p.longest >= total]
    able_decode = [d for d in decode if d.longest >= total]
    nodes = fleet.nodes
    if not able_prefill or not any(
        nodes[d.part.node_id].part.capacity.dram_bytes >= needs[d.space.id].all_bytes for d in able_decode
    ):
        # A larger instance that just went away may come back; what was accepted is not thrown away before.
        refusal = never_fits(request, fleet, prefill, decode)
        lost = any(fleet.lost_recently(kind, model, now) for kind in (PartKind.PREFILL, PartKind.DECODE))
        return Wait(refusal.message) if request.accepted and lost else refusal
    if request.too_small and not request.accepted:
        able_decode = [d for d in able_decode if d.part.node_id not in request.too_small]
        if not any(nodes[d.part.node_id].part.capacity.dram_bytes >= needs[d.space.id].all_bytes for d in able_decode):
            return Refusal(RejectReason.KV_ROOM, next(iter(request.too_small.values())))
    free_decode = [d for d in able_decode if nodes[d.part.node_id].has_room(needs[d.space.id].room_bytes)]
    if room_now:
        free_decode = [d for d in free_decode if _has_room(d, request, needs[d.space.id].booked_pages, config)]
    if not free_decode:
        return Wait("no decode instance has room")
    if request.sooner or is_batch(request.priority):
        free_prefill = [p for p in able_prefill if _has_slot(p, request)]
    else:
        free_prefill = [p for p in able_prefill if p.has_slot()]
    if not free_prefill:
        return Wait("all prefill queues are full")
    for id_ in sorted(spaces):
        pair = free_prefill, free_decode
        if len(spaces) > 1:
            pair = [p for p in free_prefill if p.space.id == id_], [d for d in free_decode if d.space.id == id_]
        groups = [g for g in ((_separate(*pair), _coupled(*pair)) if fleet.coupled else (pair,)) if all(g)]
        if not groups:
            continue
        found = [_options(request, spaces[id_], needs[id_], *g, fleet, directory, config, now) for g in groups]
        if len(found) > 1 and (view := inlining(found[1].view, found[1].wanted, fleet.decode)) is not None:
            return structs.replace(found[1], view=view)
        return found[0]
    return Wait("no prefill and decode instance of one key space are free together")


def together(choice: Choice, view: View) -> Choice:
    """A coupled instance that prefills a request decodes it as well, whatever the policy would have chosen for that."""
    twin = next((d for d in view.decode if d.id == choice.prefill.id), None)
    return choice if twin is None else structs.replace(choice, decode=twin)


def _separate(prefill: list[PrefillLoad], decode: list[DecodeLoad]) -> tuple[list[PrefillLoad], list[DecodeLoad]]:
    coupled = PartKind.COUPLED
    return [p for p in prefill if p.part.kind is not coupled], [d for d in decode if d.part.kind is not coupled]


def _coupled(prefill: list[PrefillLoad], decode: list[DecodeLoad]) -> tuple[list[PrefillLoad], list[DecodeLoad]]:
    """Those that can take a request on both sides."""
    both = {p.part.id for p in prefill} & {d.part.id for d in decode}
    return [p for p in prefill if p.part.id in both], [d for d in decode if d.part.id in both]


class _Needs(NamedTuple):
    """What a request takes in one key space."""

    booked_pages: int
    room_bytes: int
    all_bytes: int
    """Of a room for prompt and output."""

    @classmethod
    def of(cls, request: Request, space: KeySpace, output_share: float) -> _Needs:
        return cls(
            booked_pages(request, space, output_share),
            room_bytes(space, request.arrived.prompt_tokens),
            room_bytes(space, request.total_tokens),
        )


def never_fits(request: Request, fleet: Fleet, prefill: list[PrefillLoad], decode: list[DecodeLoad]) -> Refusal:
    """Why no pair of these instances could ever hold it to its end. A capacity of 0 pages or context is unknown.

    The whole output counts on the prefill side too: after a preemption all of it is prefilled again.
    """
    total = request.total_tokens
    context = min(
        max(p.part.capacity.context_tokens or _UNLIMITED for p in prefill),
        max(d.part.capacity.context_tokens or _UNLIMITED for d in decode),
    )
    refusal = check_context(request.arrived.prompt_tokens, request.arrived.max_output_tokens, context)
    for what, loads in (("KV pages for prefill", prefill), ("KV pages for decoding", decode)):
        pages = min(pages_for(total, load.space.block_tokens) for load in loads)
        limit = max(load.part.capacity.pages or _UNLIMITED for load in loads)
        refusal = refusal or check_room(what, pages, limit)
    nbytes = min(room_bytes(d.space, total) for d in decode)
    arena = max(fleet.nodes[d.part.node_id].part.capacity.dram_bytes for d in decode)
    refusal = refusal or check_room("bytes of KVCache", nbytes, arena)
    message = f"no single instance has context, pages and node memory for {total} tokens; shorten the request"
    return refusal or Refusal(RejectReason.NEVER_FITS, message)


def room_bytes(space: KeySpace, tokens: int) -> int:
    """Of a room for `tokens` tokens: whole blocks and a tail."""
    blocks, tail = divmod(tokens, space.block_tokens)
    return blocks * space.block_bytes + space.runs * space.tail_run_bytes(tail)


def booked_pages(request: Request, space: KeySpace, output_share: float) -> int:
    """Its tokens' pages, one page to grow into, and a share of the output to come.

    A request that was preempted books all it may need: it would be preempted again and again otherwise.
    """
    most = pages_for(request.total_tokens, space.block_tokens)
    if request.preemptions:
        return most
    expected = request.arrived.prompt_tokens + int(output_share * request.arrived.max_output_tokens)
    return min(pages_for(expected, space.block_tokens) + 1, most)


def _absent(
    fleet: Fleet, model: str, prefill: list[PrefillLoad], decode: list[DecodeLoad], now: float
) -> Refusal | Wait | None:
    for kind, loads in ((PartKind.PREFILL, prefill), (PartKind.DECODE, decode)):
        if loads:
            continue
        message = f"no {kind.value} instance of {model!r} is up"
        if fleet.is_expected(kind, model, now):
            return Wait(message)
        return Refusal(RejectReason.NO_INSTANCE, f"{message}; start one, or look at /cluster")
    return None


def _has_room(load: DecodeLoad, request: Request, pages: int, config: ConductorConfig) -> bool:
    """Batch work takes no more than a part of the batch, and nothing ahead of it."""
    reserved = kept(request.sooner, load.taken)
    if is_batch(request.priority):
        return load.has_room(pages, 0.0, min(reserved + BATCH_SPARES, 1.0))
    # Batch work gives way, so what it has is as good as free.
    return load.has_room(pages, config.batch_ahead, reserved - load.taken(BATCH.rank))


def _has_slot(load: PrefillLoad, request: Request) -> bool:
    """Batch work waits until there is nothing else to do, one after the other."""
    if is_batch(request.priority):
        return not load.queue
    return load.has_slot(kept(request.sooner, load.taken))


def _options(
    request: Request,
    space: KeySpace,
    needs: _Needs,
    prefill: list[PrefillLoad],
    decode: list[DecodeLoad],
    fleet: Fleet,
    directory: Directory,
    config: ConductorConfig,
    now: float,
) -> Options:
    keys = request.keys_in(space) or ()
    chain = Chain(space.id, keys)
    held = directory.match(chain)
    slow = directory.slow_blocks(chain, held)
    coming = keys if config.count_coming_blocks else ()
    view = View(
        _prefill_options(_without(prefill, request.avoid), held, slow, coming, request, now),
        _decode_options(_without(decode, request.avoid), held, request.arrived.prompt_tokens),
        {node: blocks for node, blocks in held.items() if fleet.lends(node)} if fleet.private else held,
        config.transfer_cost,
        {id_: node.link_free_at - now for id_, node in fleet.nodes.items() if node.link_free_at > now},
        slow,
    )
    limits, waited = request.limits, now - request.first_arrived_at
    left = limits.ttft - waited if limits.ttft is not None else None
    wanted = Wanted(request.arrived.prompt_tokens, space.block_tokens, space.block_bytes, limits.tbt, left)
    return Options(view, wanted, space, keys, needs.booked_pages, needs.room_bytes)


def _without(loads: list[Load], avoid: PartId | None) -> list[Load]:
    if avoid is None:
        return loads
    return [load for load in loads if load.part.id != avoid] or loads


def _prefill_options(
    loads: list[PrefillLoad],
    held: dict[PartId, int],
    slow: dict[PartId, int],
    keys: tuple[BlockKey, ...],
    request: Request,
    now: float,
) -> list[PrefillOption]:
    """`keys` is empty where blocks that are still being computed there do not count (PAPER §9)."""
    rank, count = request.priority.rank, len(keys)
    # What is of a later rank lets it pass, and those of sooner ranks will take their share.
    own = 1.0 - sum([c.share for c in request.sooner])
    options = []
    for load in loads:
        part, coming, queue = load.part, load.coming, load.queue
        resident = end = held.get(part.node_id, 0)
        producer = None
        if queue and resident < count:
            end, producer = coming.extend(keys, resident)
        options.append(
            PrefillOption(
                part.id,
                part.node_id,
                load.seconds_before(rank, now) / own if queue else 0.0,
                end,
                load.cost,
                resident,
                slow.get(part.node_id, 0) if slow else 0,
                producer,
                len(queue),
                coming.tokens,
                load.placed,
            )
        )
    return options


def _decode_options(loads: list[DecodeLoad], held: dict[PartId, int], tokens: int) -> list[DecodeOption]:
    options = []
    for load in loads:
        part, batch = load.part, load.batch
        tbt = load.cost.seconds(batch + 1, load.context_tokens + tokens)
        options.append(DecodeOption(part.id, part.node_id, tbt, held.get(part.node_id, 0), batch, load.committed_pages))
    return options
