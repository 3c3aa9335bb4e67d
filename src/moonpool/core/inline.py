"""A short prompt that is computed within a decode batch (PAPER §3).

Where coupled instances stand beside prefill and decode instances, a prompt goes to one of them if it needs no chunking
there and does not endanger the time between tokens: then nothing has to move, and the prefill pool is left to prompts
that need it.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import structs

from moonpool.core.choice import View, Wanted
from moonpool.core.fleet import DecodeLoad
from moonpool.core.vocabulary import PartId


def inlining(view: View, wanted: Wanted, decode: Mapping[PartId, DecodeLoad]) -> View | None:
    """Of coupled instances those that can inline the prompt; None: none can.

    One step with the whole rest of the prompt in it keeps the limit of the request and of all that run there. Without
    any limit nobody says how long a step may be, so nothing is inlined.
    """
    steps = {option.id: option.tbt_seconds for option in view.decode}
    able = {}
    for option in view.prefill:
        load = decode[option.id]
        cached = min(option.held_blocks, wanted.hit_limit) * wanted.block_tokens
        limit = load.ahead.strictest(wanted.tbt_limit)
        if option.queue_seconds or limit is None or wanted.tokens - cached > load.part.capacity.step_tokens:
            continue
        if steps[option.id] + option.cost.seconds(wanted.tokens, cached) <= limit:
            able[option.id] = option
    if not able:
        return None
    return structs.replace(
        view, prefill=list(able.values()), decode=[option for option in view.decode if option.id in able]
    )
