"""What a request's placement can choose from now: the fleet, the directory and the request as one view.

The answer is `Options`, a `Refusal` (it can never fit) or a `Wait` (not now, and why).
"""

from __future__ import annotations

from typing import TypeVar

from msgspec import Struct

from moonpool.core.admission import Refusal, check_context, check_room
from moonpool.core.blocks import common_blocks
from moonpool.core.directory import Directory
from moonpool.core.fleet import DecodeLoad, Fleet, PrefillLoad
from moonpool.core.pages import pages_for
from moonpool.core.placement import DecodeOption, PrefillOption, Source, View, Wanted
from moonpool.core.requests import Request
from moonpool.core.settings import ConductorConfig
from moonpool.core.vocabulary import BlockKey, Chain, KeySpace, PartId, PartKind, RejectReason

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
    prefill = [p for p in fleet.prefill_for(model) if request.keys_in(p.space) is not None]
    decode = [d for d in fleet.decode_for(model) if request.keys_in(d.space) is not None]
    absent = _absent(fleet, model, prefill, decode, now)
    if absent is not None:
        return absent
    refusal = never_fits(request, fleet, prefill, decode)
    if refusal is not None:
        # A larger instance that just went away may come back; what was accepted is not thrown away before.
        lost = any(fleet.lost_recently(kind, model, now) for kind in (PartKind.PREFILL, PartKind.DECODE))
        return Wait(refusal.message) if request.accepted and lost else refusal
    free_decode = [d for d in decode if _takes(d, fleet, request, config, room_now)]
    if not free_decode:
        return Wait("no decode instance has room")
    free_prefill = [p for p in prefill if p.has_slot() and _fits(p, request.total_tokens)]
    if not free_prefill:
        return Wait("all prefill queues are full")
    for space in sorted({d.space.id: d.space for d in free_decode}.values(), key=lambda s: s.id):
        pair = [p for p in free_prefill if p.space == space], [d for d in free_decode if d.space == space]
        if all(pair):
            return _options(request, space, *pair, fleet, directory, config, now)
    return Wait("no prefill and decode instance of one key space are free together")


def never_fits(request: Request, fleet: Fleet, prefill: list[PrefillLoad], decode: list[DecodeLoad]) -> Refusal | None:
    """Refuses what no pair of these instances could ever hold to its end. A capacity of 0 pages or context is unknown.

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
    able = any(_fits(p, total) for p in prefill) and any(
        _fits(d, total) and room_bytes(d.space, total) <= fleet.nodes[d.part.node_id].part.capacity.dram_bytes
        for d in decode
    )
    if refusal is None and not able:
        message = f"no single instance has context, pages and node memory for {total} tokens; shorten the request"
        return Refusal(RejectReason.NEVER_FITS, message)
    return refusal


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


def _takes(load: DecodeLoad, fleet: Fleet, request: Request, config: ConductorConfig, room_now: bool) -> bool:
    node = fleet.nodes[load.part.node_id]
    return (
        _fits(load, request.total_tokens)
        and node.has_room(room_bytes(load.space, request.arrived.prompt_tokens))
        and (not room_now or load.has_room(booked_pages(request, load.space, config.output_share), config.batch_ahead))
    )


def _fits(load: PrefillLoad | DecodeLoad, tokens: int) -> bool:
    """Alone, in an empty engine."""
    capacity = load.part.capacity
    pages = pages_for(tokens, load.space.block_tokens)
    return pages <= (capacity.pages or _UNLIMITED) and tokens <= (capacity.context_tokens or _UNLIMITED)


def _options(
    request: Request,
    space: KeySpace,
    prefill: list[PrefillLoad],
    decode: list[DecodeLoad],
    fleet: Fleet,
    directory: Directory,
    config: ConductorConfig,
    now: float,
) -> Options:
    keys = request.keys_in(space) or ()
    tokens = request.arrived.prompt_tokens
    runs = directory.match(Chain(space.id, keys))
    held = dict(runs)
    view = View(
        tuple(
            _prefill_option(p, held, keys if config.count_coming_blocks else (), now)
            for p in _without(prefill, request.avoid)
        ),
        tuple(_decode_option(d, held, tokens) for d in _without(decode, request.avoid)),
        tuple(
            Source(node, blocks, sum(fleet.nodes[node].sending.values()))
            for node, blocks in runs
            if node in fleet.nodes
        ),
        config.transfer_cost,
    )
    wanted = Wanted(tokens, space.block_tokens, space.block_bytes)
    return Options(
        view, wanted, space, keys, booked_pages(request, space, config.output_share), room_bytes(space, tokens)
    )


def _without(loads: list[Load], avoid: PartId | None) -> list[Load]:
    return [load for load in loads if load.part.id != avoid] or loads


def _prefill_option(
    load: PrefillLoad, held: dict[PartId, int], keys: tuple[BlockKey, ...], now: float
) -> PrefillOption:
    # `keys` is empty where blocks that are still being computed there do not count (PAPER §9).
    coming = max((common_blocks(keys, chain) for chain in load.chains.values()), default=0)
    node = load.part.node_id
    return PrefillOption(load.part.id, node, load.seconds(now), max(held.get(node, 0), coming), load.cost)


def _decode_option(load: DecodeLoad, held: dict[PartId, int], tokens: int) -> DecodeOption:
    node = load.part.node_id
    tbt = load.cost.seconds(load.batch + 1, load.context_tokens + tokens)
    return DecodeOption(load.part.id, node, tbt, held.get(node, 0))
