"""The Conductor's state as plain data, for /cluster."""

from __future__ import annotations

from msgspec import Struct, structs

from moonpool.core.directory import Directory
from moonpool.core.fleet import Fleet, Part
from moonpool.core.outlook import step_of
from moonpool.core.requests import Phase, Requests
from moonpool.core.settings import ConductorConfig, Decisions
from moonpool.core.vocabulary import Capacity, KeySpace, PartKind, Slo


class PartState(Struct, frozen=True, omit_defaults=True):
    """What does not apply to a part's kind is left out."""

    id: str
    kind: str
    incarnation: str
    address: str
    health: str
    """`up`, or `waiting for its node`."""
    silent_seconds: float
    capacity: Capacity
    model: str = ""
    node: str = ""
    layers: tuple[int, int] | None = None
    """Stages: of the model, from the first one on, up to but without the second."""
    stages: int | None = None
    """Prefill: of its pipeline, where it is one."""
    space: KeySpace | None = None
    """Workers: what their blocks look like and which key space they are in."""
    queued: int | None = None
    running: int | None = None
    pages_free: int | None = None
    context_tokens: int | None = None
    used_bytes: int | None = None
    """The five above as last reported by the part itself."""
    assigned: int | None = None
    """Requests that the Conductor has placed there and that are not over."""
    queue_seconds: float | None = None
    """Prefill: predicted until its queue is computed."""
    step_seconds: float | None = None
    """Decode: predicted of a step with all that are assigned there."""
    committed_pages: int | None = None
    """Decode: pages booked for the requests assigned there."""
    cost: tuple[float, float, float] | None = None
    """Coefficients fitted so far (`core/cost.py`)."""
    rooms: int | None = None
    room_bytes: int | None = None
    """Nodes: rooms that requests have reserved and not yet left."""
    blocks: dict[str, int] | None = None
    """Nodes: whole blocks in the directory, by tier."""
    index: str | None = None
    """Nodes: `exact`, `catching-up` or `degraded`."""


class HoldState(Struct, frozen=True):
    request: str
    attempt: int
    held_seconds: float
    time_left: float
    prompt_tokens: int
    priority: str = ""


class ClassState(Struct, frozen=True):
    """A priority class, the soonest first."""

    name: str
    rank: int
    slo: Slo
    """Of its requests that have no limits of their own."""
    share: float
    queued: int
    """Held, reserving or in prefill."""


class ConductorState(Struct, frozen=True):
    placement: str
    admission: str
    context_tokens: int
    parts: tuple[PartState, ...]
    requests: dict[str, int]
    """By phase."""
    holds: tuple[HoldState, ...]
    decisions: Decisions
    classes: tuple[ClassState, ...] = ()
    counters: dict[str, dict[str, float]] = {}
    """By part, as it sends them; filled in by the driver."""


class BlockState(Struct, frozen=True):
    """A whole block that is in the pool."""

    key: str
    """Hex."""
    space: str
    dram: tuple[str, ...]
    """Nodes that have it there."""
    ssd: tuple[str, ...]


class PrefixCopy(Struct, frozen=True):
    """What a node has of a prefix."""

    node: str
    blocks: int
    """From its first one on."""
    ssd_blocks: int
    """Those of them that are on its SSD only."""


class HotPrefix(Struct, frozen=True):
    """What several of the prompts that were placed last begin with."""

    key: str
    """Hex, of its last block."""
    blocks: int
    tokens: int
    uses: int
    """Placements that begin with it."""
    seconds_ago: float
    """Since the last of them."""
    copies: tuple[PrefixCopy, ...]
    """The longest first."""


class BlocksPage(Struct, frozen=True):
    """Of all blocks in the pool, as the directory knows it."""

    blocks: tuple[BlockState, ...]
    next: str
    """Where the next page begins; empty: this is the last."""


def describe(
    config: ConductorConfig, fleet: Fleet, directory: Directory, requests: Requests, decisions: Decisions, now: float
) -> ConductorState:
    return ConductorState(
        placement=config.placement,
        admission=config.admission,
        context_tokens=fleet.context_tokens,
        parts=tuple(_part(p, fleet, directory, now) for p in sorted(fleet.parts.values(), key=lambda p: p.id)),
        requests={phase.value: requests.count(phase) for phase in Phase},
        holds=tuple(
            HoldState(r.id, r.attempt, now - r.held_since, r.deadline - now, r.arrived.prompt_tokens, r.priority.name)
            for r in requests.held()
        ),
        decisions=decisions,
        classes=tuple(
            ClassState(c.name, c.rank, requests.classes.limits(Slo(), c), c.share, requests.queued(c.rank))
            for c in requests.classes.all
        ),
    )


def _part(part: Part, fleet: Fleet, directory: Directory, now: float) -> PartState:
    up = part.node_id in fleet.nodes or part.registered.node is None
    reported = part.reported
    state = PartState(
        id=part.id,
        kind=part.kind.value,
        incarnation=part.peer.incarnation,
        address=part.peer.address,
        health="up" if up else "waiting for its node",
        silent_seconds=max(now - part.heard_at, 0.0),
        capacity=part.capacity,
        model=part.registered.model,
        node=part.registered.node or "",
        space=part.registered.space,
        queued=reported.queued,
        running=reported.running,
    )
    match part.kind:
        case PartKind.PREFILL:
            prefill = fleet.prefill[part.id]
            return structs.replace(
                state,
                pages_free=reported.pages_free,
                stages=part.registered.stages if part.registered.stages > 1 else None,
                assigned=len(prefill.queue),
                queue_seconds=prefill.seconds(now),
                cost=prefill.cost.fit.coefficients,
            )
        case PartKind.DECODE:
            decode = fleet.decode[part.id]
            return structs.replace(
                state,
                pages_free=reported.pages_free,
                context_tokens=reported.context_tokens,
                assigned=len(decode.assigned),
                step_seconds=step_of(decode),
                committed_pages=decode.committed_pages,
                cost=decode.cost.fit.coefficients,
            )
        case PartKind.COUPLED:
            prefill, decode = fleet.prefill[part.id], fleet.decode[part.id]
            return structs.replace(
                state,
                pages_free=reported.pages_free,
                context_tokens=reported.context_tokens,
                assigned=len(decode.assigned),
                step_seconds=step_of(decode),
                committed_pages=decode.committed_pages,
                queue_seconds=prefill.seconds(now),
                cost=(*prefill.cost.fit.coefficients, *decode.cost.fit.coefficients),
            )
        case PartKind.NODE:
            node = fleet.nodes[part.id]
            return structs.replace(
                state,
                used_bytes=reported.used_bytes,
                rooms=len(node.rooms),
                room_bytes=node.room_bytes,
                blocks={tier.value: n for tier, n in directory.counts(part.id).items()},
                index=directory.health(part.id).value,
            )
        case PartKind.STAGE:
            return structs.replace(
                state,
                pages_free=reported.pages_free,
                layers=(part.registered.first_layer, part.registered.last_layer),
            )
        case PartKind.GATEWAY:
            return state
