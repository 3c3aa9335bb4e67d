"""What a placement takes of each part's ledger, and giving it back."""

from __future__ import annotations

from moonpool.core.fleet import Fleet, NodeLoad, Share
from moonpool.core.options import Options
from moonpool.core.placement import Choice
from moonpool.core.requests import Placement, Request


def book(request: Request, options: Options, choice: Choice, fleet: Fleet, now: float) -> Placement:
    """Load counts from here on, before any part has heard of the request."""
    id_, fetch = request.id, choice.fetch
    fleet.prefill[choice.prefill.id].add(id_, choice.prefill_seconds, options.keys, now)
    fleet.decode[choice.decode.id].assigned[id_] = Share(options.pages, request.arrived.prompt_tokens)
    fleet.nodes[choice.decode.node].rooms[id_] = options.room_bytes
    if fetch is not None:
        fleet.nodes[fetch.source].sending[id_] = fetch.count * options.space.block_bytes
    return Placement(choice, options.space, options.keys, options.pages, options.room_bytes, now)


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
        node.rooms.pop(request.id, None)
    return node


def unbook(request: Request, placed: Placement, fleet: Fleet, now: float, pages: int = 0) -> None:
    """All of it. `pages`: how many it held in the end, if known."""
    unbook_prefill(request, placed, fleet, now)
    unbook_room(request, placed, fleet)
    decode = fleet.decode.get(placed.choice.decode.id)
    if decode is not None:
        decode.remove(request.id, pages)
