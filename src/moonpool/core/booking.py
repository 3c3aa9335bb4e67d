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
    choice = placed.choice
    fleet.prefill[choice.prefill.id].add(request.id, choice.prefill_seconds, placed.keys, now)
    if choice.fetch is not None:
        sending = choice.fetch.count * placed.space.block_bytes
        fleet.nodes[choice.fetch.source].sending[request.id] = sending


def book_decode(request: Request, placed: Placement, fleet: Fleet) -> None:
    share = Share(placed.pages, request.arrived.prompt_tokens)
    fleet.decode[placed.choice.decode.id].assign(request.id, share)


def book_room(request: Request, placed: Placement, fleet: Fleet) -> None:
    fleet.nodes[placed.choice.decode.node].reserve(request.id, placed.room_bytes)


def unbook_prefill(request: Request, placed: Placement, fleet: Fleet, now: float) -> None:
    """The prompt is computed or will not be."""
    prefill = fleet.prefill.get(placed.choice.prefill.id)
    if prefill is not None:
        prefill.remove(request.id, now)
    fetch = placed.choice.fetch
    if fetch is not None and fetch.source in fleet.nodes:
        fleet.nodes[fetch.source].sending.pop(request.id, None)


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
