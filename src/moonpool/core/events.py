"""Facts that reach the Conductor, past tense. They go on the wire as they are (docs/protocol.md).

`time_left` is the number of seconds the request still had when the message was sent: clocks of
different machines are never compared.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from moonpool.core.actions import Place
from moonpool.core.vocabulary import (
    MAX_ADDRESS_CHARS,
    BlockKey,
    Capacity,
    Chain,
    Count,
    Incarnation,
    KeySpace,
    KeySpaceId,
    PartId,
    PartKind,
    Peer,
    RequestId,
    Seconds,
    Slo,
    Tier,
    TimeLeft,
)


class Registered(Struct, frozen=True, tag=True):
    """A part has come up (or answers `RegisterAgain`). A new incarnation of an id ends the old one (of a node: one that
    does not live any more, `contest`)."""

    kind: PartKind
    peer: Peer
    capacity: Capacity = Capacity()
    space: KeySpace | None = None
    """Workers only."""
    first_layer: Count = 0
    last_layer: Count = 0
    """Workers only: the half-open range of layers held. A prefill instance has the whole model, in all its stages."""
    node: PartId | None = None
    """Workers only: the node whose arena this worker maps."""
    data_address: Annotated[str, Meta(max_length=MAX_ADDRESS_CHARS)] = ""
    """Nodes only: where Messenger's tcp transport listens."""
    socket_path: Annotated[str, Meta(max_length=MAX_ADDRESS_CHARS)] = ""
    """Nodes only: the Unix stream socket for clients on the same host."""
    model: Annotated[str, Meta(max_length=MAX_ADDRESS_CHARS)] = ""
    """Workers only: the served model's name."""
    stages: Annotated[int, Meta(ge=1, le=1 << 10)] = 1
    """Prefill instances only: that its layers are divided over."""
    private: bool = False
    """Nodes only: its blocks are for its own workers (the cache of an external instance); nobody else reads them."""


class Lost(Struct, frozen=True, tag=True):
    """A part's process is gone (reported by the supervisor) or silent past the heartbeat limit."""

    id: PartId
    incarnation: Incarnation
    reason: str


class Reported(Struct, frozen=True, tag=True):
    """A part's load, twice a second; it is also the heartbeat."""

    id: PartId
    incarnation: Incarnation
    queued: Count = 0
    running: Count = 0
    pages_free: Count = 0
    context_tokens: Count = 0
    """Tokens of KV held by the running batch."""
    used_bytes: Count = 0
    """Nodes: bytes of the arena in use."""
    announced: Count = 0
    """Nodes: `seq` of the last announcement that was sent before this report."""


class RequestArrived(Struct, frozen=True, tag=True):
    """A request, or (attempt > 1) the same request with the tokens it has produced so far appended."""

    request: RequestId
    attempt: Count
    gateway: Peer
    model: str
    prompt_tokens: Count
    """Tokens to have KV for before the next token: prompt, then output so far."""
    output_tokens: Count
    """How many of `prompt_tokens` are output of earlier attempts."""
    max_output_tokens: Count
    """Most tokens still to produce."""
    chains: tuple[Chain, ...]
    time_left: TimeLeft
    slo: Slo = Slo()
    """The request's own limits."""
    priority: str = ""
    """The class asked for, or an integer; empty: nothing is (`classes.py`)."""
    label: str = ""
    """The client's x-request-id, for logs."""
    waited: Seconds = 0.0
    """Seconds since it came to the gateway, which has read and tokenized it: they count for its first token."""


class PlacedBefore(Struct, frozen=True, tag=True):
    """An earlier Conductor has placed this request, and it goes on."""

    arrived: RequestArrived
    """As the next attempt would arrive now, with the number of this one."""
    place: Place
    tokens: Count
    """That this attempt has given its gateway."""


class RequestCancelled(Struct, frozen=True, tag=True):
    """The client went away, reads too slowly, or the deadline passed at the gateway."""

    request: RequestId
    reason: str


class RoomConfirmed(Struct, frozen=True, tag=True):
    """The decode node holds room for the whole prompt; of the whole blocks `lacking` it has no bytes."""

    node: PartId
    incarnation: Incarnation
    request: RequestId
    attempt: Count
    lacking: tuple[Count, ...]


class RoomRefused(Struct, frozen=True, tag=True):
    node: PartId
    incarnation: Incarnation
    request: RequestId
    attempt: Count
    reason: str
    is_lasting: bool = False
    """What ends with other requests makes no room for it: pinned blocks take the rest of the arena."""


class PrefillDone(Struct, frozen=True, tag=True):
    """All prompt tokens are computed and the first token is out."""

    request: RequestId
    attempt: Count
    instance: PartId
    computed_tokens: Count
    cached_tokens: Count
    queue_seconds: Seconds
    compute_seconds: Seconds


class PrefillFailed(Struct, frozen=True, tag=True):
    """The attempt is over before a decode instance took it; the request may be placed again."""

    request: RequestId
    attempt: Count
    instance: PartId
    reason: str
    late: bool = False
    """It waited until it could not have its first token in time any more: it is refused instead."""
    unservable: bool = False
    """The request itself is to blame: another instance would not take it either, so it is refused."""


class DecodeJoined(Struct, frozen=True, tag=True):
    """All KV is in the decode instance's pages; the room on its node is closed."""

    request: RequestId
    attempt: Count
    instance: PartId


class DecodeRefused(Struct, frozen=True, tag=True):
    """The decode instance re-checked load and room and will not take the request (or its KV did not come)."""

    request: RequestId
    attempt: Count
    instance: PartId
    reason: str
    limit: bool = False
    """Its limit, or that of others there, could not be kept: it is not placed again."""


class Preempted(Struct, frozen=True, tag=True):
    """Pages ran out: the request left the batch, its whole blocks went to the node."""

    request: RequestId
    attempt: Count
    instance: PartId


class Finished(Struct, frozen=True, tag=True):
    """The request is complete on its worker (which may be the prefill worker, after one token)."""

    request: RequestId
    attempt: Count
    instance: PartId
    output_tokens: Count
    reason: str
    """`stop` or `length`."""


class DecodeStepped(Struct, frozen=True, tag=True):
    """Measured decode steps, for the cost model; sent with every few heartbeats, not every step."""

    instance: PartId
    batch: Count
    context_tokens: Count
    seconds: Seconds


class BlocksStored(Struct, frozen=True, tag=True):
    """Whole blocks became readable on a node. `seq` counts a node's directory events from 1 without gaps."""

    node: PartId
    incarnation: Incarnation
    seq: Count
    space: KeySpaceId
    tier: Tier
    keys: tuple[BlockKey, ...]
    more: bool = False
    """It is a part of a snapshot that did not fit into one message, and not the last."""


class BlocksRemoved(Struct, frozen=True, tag=True):
    node: PartId
    incarnation: Incarnation
    seq: Count
    space: KeySpaceId
    tier: Tier
    keys: tuple[BlockKey, ...]


class Snapshot(Struct, frozen=True, tag=True):
    """The readable blocks of a node after its event `seq`; they replace what the directory knew of it."""

    node: PartId
    incarnation: Incarnation
    seq: Count
    blocks: tuple[tuple[KeySpaceId, Tier, tuple[BlockKey, ...]], ...]
    more: bool = False
    """The others follow, as `BlocksStored`."""


class ReplicasWanted(Struct, frozen=True, tag=True):
    """A client of a node wants each of these blocks on `copies` nodes."""

    to: Peer
    """Who is answered (`ReplicasOrdered`)."""
    serial: Count
    space: KeySpace
    keys: tuple[BlockKey, ...]
    """At most 4096 (`replication.KEYS_A_QUESTION`)."""
    copies: Count
    at_most: Count | None = None
    """Copies beyond so many are dropped, but never the last; None: none are."""


class Woke(Struct, frozen=True, tag=True):
    """The time asked for by `WakeAt` has come."""


Event = (
    Registered
    | Lost
    | Reported
    | RequestArrived
    | PlacedBefore
    | RequestCancelled
    | RoomConfirmed
    | RoomRefused
    | PrefillDone
    | PrefillFailed
    | DecodeJoined
    | DecodeRefused
    | Preempted
    | Finished
    | DecodeStepped
    | BlocksStored
    | BlocksRemoved
    | Snapshot
    | ReplicasWanted
    | Woke
)
