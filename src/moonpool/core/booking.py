"""What a placement takes of each part's ledger, and giving it back."""

from __future__ import annotations

from moonpool.core.fleet import Fleet, NodeLoad, Share
from moonpool.core.requests import Placement, Request


def book(request: Request, placed: Placement, fleet: Fleet, now: float) -> None:
    """Load counts from here on, before any part has heard of the request."""
    book_prefill(request, placed, fleet, now)
    book_decode(request, placed, fleet)
    book_room(request, placed, fleet)


def book_prefill(request: Request, placed: Placement, fleet: Fleet, now: float) -> None:
    choice, rank = placed.choice, request.priority.rank
    prefill, lacking = choice.prefill, placed.keys[choice.prefill.resident_blocks :]
    tokens = request.arrived.prompt_tokens - choice.hit_blocks * placed.space.block_tokens
    fleet.prefill[prefill.id].add(request.id, choice.prefill_seconds, tokens, lacking, now, rank)
    if choice.fetch is not None:
        # Other transfers do not end before this one, which they would have to pass.
        for node in (fleet.nodes[choice.fetch.source], fleet.nodes.get(prefill.node)):
            if node is not None:
                node.link_free_at = max(node.link_free_at, now + choice.fetch_seconds)


def book_decode(request: Request, placed: Placement, fleet: Fleet) -> None:
    share = Share(placed.pages, request.arrived.prompt_tokens, rank=request.priority.rank)
    fleet.decode[placed.choice.decode.id].assign(request.id, share)


def book_room(request: Request, placed: Placement, fleet: Fleet) -> None:
    fleet.nodes[placed.choice.decode.node].reserve(request.id, placed.room_bytes)


def unbook_prefill(request: Request, placed: Placement, fleet: Fleet, now: float, is_computed: bool = False) -> None:
    """The prompt is computed or will not be."""
    prefill = fleet.prefill.get(placed.choice.prefill.id)
    if prefill is not None:
        prefill.remove(request.id, now, is_computed)


def unbook_room(request: Request, placed: Placement, fleet: Fleet) -> NodeLoad | None:
    """The room is closed or released; returns the node if it is still there."""
    node = fleet.nodes.get(placed.choice.decode.node)
    if node is not None:
        node.leave(request.id)
    return node


def unbook(request: Request, placed: Placement, fleet: Fleet, now: float, pages: int = 0) -> None:
    """All of it. `pages`: how many it held in the end, if known."""
    unbook_prefill(request, placed, fleet, now)
    unbook_room(request, placed, fleet)
    decode = fleet.decode.get(placed.choice.decode.id)
    if decode is not None:
        decode.remove(request.id, pages)
