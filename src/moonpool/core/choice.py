"""What placement chooses from, and its answer. The policies are in `policies.py` and `kvcentric.py`.

A view holds only instances that can take the request now.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from moonpool.core.blocks import hit_limit
from moonpool.core.cost import PrefillCost, TransferCost
from moonpool.core.vocabulary import PartId, RequestId


class PrefillOption(Struct, frozen=True, gc=False):
    id: PartId
    node: PartId
    queue_seconds: float
    """Until what is placed there already is computed."""
    held_blocks: int
    """Leading blocks that its node will hold when this request starts."""
    cost: PrefillCost
    resident_blocks: int = 0
    """Leading blocks that its node holds now; the rest of `held_blocks` is still being computed there."""
    slow_blocks: int = 0
    """So many of the resident ones, the last, are on SSD only."""
    producer: RequestId | None = None
    """Whose computing gives the last of `held_blocks`, where they are more than are resident."""
    requests: int = 0
    tokens: int = 0
    """Placed there and not computed yet."""
    placed: int = 0
    """Requests so far: among equals the one that got fewer comes first."""


class DecodeOption(Struct, frozen=True, gc=False):
    id: PartId
    node: PartId
    tbt_seconds: float
    """Predicted step with this request in the batch."""
    held_blocks: int
    """Leading blocks on its node: they need not move."""
    requests: int = 0
    pages: int = 0
    """Placed there and not over."""


class Wanted(Struct, frozen=True):
    tokens: int
    block_tokens: int
    block_bytes: int
    tbt_limit: float | None = None
    """Seconds; a decode instance predicted beyond it is taken only where all are."""
    ttft_left: float | None = None
    """Seconds from now in which its first token must come."""

    @property
    def hit_limit(self) -> int:
        return hit_limit(self.tokens, self.block_tokens)


class View(Struct, frozen=True):
    """Neither sequence of options is empty."""

    prefill: Sequence[PrefillOption]
    decode: Sequence[DecodeOption]
    held: dict[PartId, int]
    """Leading blocks of the prompt that can be fetched from a node now; the longest run first, then by id."""
    transfer: TransferCost
    link_waits: dict[PartId, float] = {}
    """Seconds until a node's link has moved what placements have ordered; nodes whose link is free are left out."""
    slow: dict[PartId, int] = {}
    """How many of the blocks that a node holds, the last, are on SSD only; nodes without any are left out."""


class FetchPlan(Struct, frozen=True):
    source: PartId
    first: int
    count: int


class Choice(Struct, frozen=True):
    prefill: PrefillOption
    decode: DecodeOption
    hit_blocks: int
    """After the fetch; at most the wanted hit limit."""
    fetch: FetchPlan | None
    prefill_seconds: float
    """Computing alone."""
    ttft_seconds: float
    """From now to the first token."""
    fetch_seconds: float = 0.0
    """From now until the fetch is over, other transfers before it included."""
    awaits: RequestId | None = None
    """The request at the same instance that computes some of `hit_blocks` before this one starts."""


def chosen(
    prefill: PrefillOption,
    decode: DecodeOption,
    hit: int,
    seconds: tuple[float, float],
    fetch: FetchPlan | None = None,
    fetch_seconds: float = 0.0,
) -> Choice:
    """`seconds`: computing, and from now to the first token."""
    own = hit if fetch is None else fetch.first
    awaits = prefill.producer if own > prefill.resident_blocks else None
    return Choice(prefill, decode, hit, fetch, *seconds, fetch_seconds, awaits)
