"""Orders that the Conductor gives, imperative. They go on the wire as they are (docs/protocol.md)."""

from __future__ import annotations

from msgspec import Struct

from moonpool.core.directory import IndexHealth
from moonpool.core.vocabulary import (
    BlockKey,
    Capacity,
    Count,
    KeySpace,
    NodePeer,
    PartId,
    PartKind,
    Peer,
    RejectReason,
    RequestId,
    Seconds,
    TimeLeft,
)


class Fetch(Struct, frozen=True):
    """Copy the chain's blocks `first .. first + count` from another node before computing."""

    source: NodePeer
    first: Count
    count: Count


class Place(Struct, frozen=True, tag=True):
    """To the gateway: prefill there, decode there. Room on the decode node is confirmed already."""

    request: RequestId
    attempt: Count
    gateway: Peer
    space: KeySpace
    prefill: Peer
    prefill_node: NodePeer
    decode: Peer
    decode_node: NodePeer
    hit_blocks: Count
    """Leading blocks expected to be readable on the prefill node, after the fetch."""
    fetch: Fetch | None
    lacking: tuple[Count, ...]
    """Whole blocks that must be sent to the decode node; the tail always is."""
    expected_ttft: float
    time_left: TimeLeft
    priority: str = ""
    """The class it is in."""
    rank: int = 0
    """Of that class: the smaller, the sooner."""
    ttft_left: TimeLeft | None = None
    """Seconds in which the first token must come; None: it has no such limit (any more)."""
    compute_seconds: float = 0.0
    """Predicted for prefill alone."""
    tbt_limit: Seconds | None = None
    """The decode instance refuses the request if it cannot keep this many seconds between tokens; None: it takes it."""
    awaits: tuple[RequestId, int] | None = None
    """An attempt before this one at the same prefill worker that computes some of the hit blocks: load once it is over.

    One that is not there is not waited for.
    """
    index: IndexHealth = IndexHealth.EXACT
    """The worst of what the directory knew of the nodes that this counts on."""


class Reject(Struct, frozen=True, tag=True):
    """To the gateway: the request is over."""

    request: RequestId
    attempt: Count
    gateway: Peer
    reason: RejectReason
    message: str
    retry_after: float | None
    """Seconds; None where waiting does not help."""


class Hold(Struct, frozen=True, tag=True):
    """To the gateway: queued at the Conductor; a `Place` or a `Reject` follows."""

    request: RequestId
    attempt: Count
    gateway: Peer
    reason: str


class Resubmit(Struct, frozen=True, tag=True):
    """To the gateway: attempt `attempt` is over; send `RequestArrived` with attempt + 1 and all tokens so far."""

    request: RequestId
    attempt: Count
    gateway: Peer
    reason: str


class ExpectEnd(Struct, frozen=True, tag=True):
    """To the gateway: the attempt's worker is done with it and has sent all tokens; what does not come is lost."""

    request: RequestId
    attempt: Count
    gateway: Peer


class Cancel(Struct, frozen=True, tag=True):
    """To a worker: drop this request, attempts up to `attempt`. Gateways send it to their workers too."""

    request: RequestId
    attempt: Count
    to: Peer


class ReserveRoom(Struct, frozen=True, tag=True):
    """To the decode node: room for all of a prompt's KV or nothing. Unused, it ends with its gateway."""

    node: NodePeer
    request: RequestId
    attempt: Count
    gateway: Peer
    space: KeySpace
    keys: tuple[BlockKey, ...]
    tail_tokens: Count
    time_left: TimeLeft


class ReleaseRoom(Struct, frozen=True, tag=True):
    """To the decode node: the attempt is over. Unknown rooms are ignored."""

    node: NodePeer
    request: RequestId
    attempt: Count


class Replicate(Struct, frozen=True, tag=True):
    """To a node: have a copy of these blocks, each by itself, as far as there is room and time."""

    node: NodePeer
    space: KeySpace
    keys: tuple[BlockKey, ...]
    source: NodePeer
    time_left: TimeLeft


class Demote(Struct, frozen=True, tag=True):
    """To a node: these blocks go to its SSD and leave DRAM, unless somebody uses them or it has no SSD."""

    node: NodePeer
    space: KeySpace
    keys: tuple[BlockKey, ...]


class DropReplica(Struct, frozen=True, tag=True):
    """To a node: forget these blocks, unless somebody uses them. Others have them."""

    node: NodePeer
    space: KeySpace
    keys: tuple[BlockKey, ...]


class ReplicasOrdered(Struct, frozen=True, tag=True):
    """The answer to `ReplicasWanted`."""

    to: Peer
    serial: Count
    copies: tuple[Count, ...]
    """Of each key: nodes that hold it, or will if they can. 0: it is nowhere."""


class SendSnapshot(Struct, frozen=True, tag=True):
    """To a node: a directory event is missing."""

    node: NodePeer


class RegisterAgain(Struct, frozen=True, tag=True):
    """To a part whose heartbeat came but which this Conductor does not know."""

    to: Peer


class IdTaken(Struct, frozen=True, tag=True):
    """To a part that is not in the fleet because another process, which is there, has its id."""

    to: Peer
    by: Peer


class FleetPart(Struct, frozen=True):
    kind: PartKind
    peer: Peer
    capacity: Capacity
    node: PartId | None
    model: str


class FleetChanged(Struct, frozen=True, tag=True):
    """To a gateway (and to every newly registered part): who is there now."""

    to: Peer
    parts: tuple[FleetPart, ...]
    nodes: tuple[NodePeer, ...]
    spaces: tuple[KeySpace, ...]
    context_tokens: Count
    """The longest prompt + output that some prefill and some decode instance both take."""


class WakeAt(Struct, frozen=True, tag=True):
    """Feed `Woke` at this time of the driver's clock."""

    at: float


Action = (
    Place
    | Reject
    | Hold
    | Resubmit
    | ExpectEnd
    | Cancel
    | ReserveRoom
    | ReleaseRoom
    | Replicate
    | Demote
    | DropReplica
    | ReplicasOrdered
    | SendSnapshot
    | RegisterAgain
    | IdTaken
    | FleetChanged
    | WakeAt
)
