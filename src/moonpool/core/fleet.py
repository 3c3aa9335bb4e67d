"""Who is there, and what the Conductor has given each part to do.

Load is booked at the moment of placement, not when a part reports it; reports only correct it (and show
work of which this Conductor does not know, after its own restart).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from moonpool.core.actions import FleetChanged, FleetPart
from moonpool.core.coming import Coming
from moonpool.core.cost import DecodeCost, PrefillCost
from moonpool.core.events import Registered, Reported
from moonpool.core.forecast import Ahead
from moonpool.core.vocabulary import (
    BlockKey,
    Capacity,
    Incarnation,
    KeySpace,
    NodePeer,
    PartId,
    PartKind,
    Peer,
    RequestId,
)

_UNLIMITED = 1 << 53
EXPECTED_SECONDS = 60.0
"""A part that was there this recently is expected back; so is every part of a cluster that just started."""


@dataclass(slots=True)
class Part:
    registered: Registered
    """Changed by `register` only; what follows is taken from it, for a placement asks it of every part."""
    heard_at: float
    reported: Reported
    id: PartId = field(init=False)
    peer: Peer = field(init=False)
    kind: PartKind = field(init=False)
    capacity: Capacity = field(init=False)
    node_id: PartId = field(init=False)
    """The node whose arena it maps; for a node its own id."""

    def __post_init__(self) -> None:
        self.register(self.registered)

    def register(self, event: Registered) -> None:
        self.registered = event
        self.id, self.peer, self.kind, self.capacity = event.peer.id, event.peer, event.kind, event.capacity
        self.node_id = event.node or self.id


@dataclass(slots=True)
class Tally:
    """What the requests of one rank take."""

    count: int = 0
    amount: float = 0.0

    def add(self, count: int, amount: float) -> None:
        self.count += count
        # What rounding has left goes with the last.
        self.amount = self.amount + amount if self.count else 0.0


@dataclass(slots=True)
class PrefillLoad:
    part: Part
    space: KeySpace
    cost: PrefillCost
    longest: int
    """Tokens of the longest sequence, prompt and output, that it takes when it has nothing else to do."""
    queue: dict[RequestId, float] = field(default_factory=dict)
    """Estimated seconds of computing, in order of placement."""
    coming: Coming = field(default_factory=Coming)
    """What its node does not hold yet, but will once they are computed."""
    head: RequestId | None = None
    """The first of the soonest rank in the queue: others give way to it."""
    head_since: float = 0.0
    _head_seconds: float = 0.0
    _queued_seconds: float = 0.0
    """Of all in the queue."""
    placed: int = 0
    """Requests since it came."""
    _ranks: dict[RequestId, int] = field(default_factory=dict)
    """Of those that are not of rank 0."""
    _by_rank: dict[int, Tally] = field(default_factory=dict)
    """Those ranks."""

    def add(
        self,
        request: RequestId,
        seconds: float,
        tokens: int,
        keys: tuple[BlockKey, ...],
        now: float,
        rank: int = 0,
    ) -> None:
        """`tokens` to compute; `keys`: the blocks of the prompt that its node lacks."""
        if rank:
            self._ranks[request] = rank
            self._by_rank.setdefault(rank, Tally()).add(1, seconds)
        self.queue[request] = seconds
        self._queued_seconds += seconds
        if self.head is None:
            self._begin(request, now)
        elif rank < self._rank_of(self.head):
            self._pause(self.head, now)
            self._begin(request, now)
        self.coming.add(request, tokens, keys)
        self.placed += 1

    def remove(self, request: RequestId, now: float, is_computed: bool = False) -> None:
        """`is_computed`: else it was given up."""
        if request not in self.queue:
            return
        queue = self.queue
        if (rank := self._ranks.pop(request, 0)) != 0:
            self._by_rank[rank].add(-1, -queue[request])
        seconds = queue.pop(request)
        self._queued_seconds -= seconds
        if not queue:
            # What rounding has left goes as well.
            self.head, self._queued_seconds, self._head_seconds = None, 0.0, 0.0
        elif request == self.head:
            self._begin(min(queue, key=self._rank_of) if self._ranks else next(iter(queue)), now)
        elif is_computed:
            # It has passed the first one, which was not computed meanwhile.
            self.head_since = min(self.head_since + seconds, now)
        self.coming.remove(request)

    def _begin(self, head: RequestId, now: float) -> None:
        self.head, self.head_since, self._head_seconds = head, now, self.queue[head]

    def _pause(self, head: RequestId, now: float) -> None:
        """What was computed of it is no longer queued."""
        done = min(max(now - self.head_since, 0.0), self._head_seconds)
        self.queue[head] -= done
        self._queued_seconds -= done
        if (rank := self._rank_of(head)) != 0:
            self._by_rank[rank].add(0, -done)

    def _rank_of(self, request: RequestId) -> int:
        return self._ranks.get(request, 0)

    def seconds(self, now: float) -> float:
        """Until all that is queued is computed."""
        if not self.queue:
            return 0.0
        passed = now - self.head_since
        if passed >= self._head_seconds:
            return self._queued_seconds - self._head_seconds
        return self._queued_seconds - passed if passed > 0.0 else self._queued_seconds

    def seconds_before(self, rank: int, now: float) -> float:
        """Until all that is queued of this rank and of sooner ones is computed: the others give way to it."""
        if rank >= 0 and not self._ranks:
            return self.seconds(now)
        passed_over = sum([tally.amount for other, tally in self._by_rank.items() if other > rank])
        if rank < 0:
            passed_over += self._queued_seconds - sum([tally.amount for tally in self._by_rank.values()])
        return max(self.seconds(now) - passed_over, 0.0)

    def taken(self, rank: int) -> float:
        """The share of its slots that this rank has; 0 where their number is unknown."""
        slots = self.part.capacity.slots
        return self.count(rank) / slots if slots else 0.0

    def count(self, rank: int) -> int:
        if rank:
            return self._by_rank[rank].count if rank in self._by_rank else 0
        return len(self.queue) - len(self._ranks)

    @property
    def queued_seconds(self) -> float:
        """Of computing all that is queued, the first of it from its beginning."""
        return self._queued_seconds

    def has_slot(self, kept: float = 0.0) -> bool:
        """`kept`: the share of slots that must stay free."""
        slots = self.part.capacity.slots
        return slots == 0 or len(self.queue) < slots * (1.0 - kept)

    def check_integrity(self) -> None:
        seconds = list(self.queue.values())
        assert all(some >= 0 for some in seconds)
        assert math.isclose(self._queued_seconds, sum(seconds), rel_tol=1e-6, abs_tol=1e-9)
        assert self._ranks.keys() <= self.queue.keys()
        assert self.head == min(self.queue, key=self._rank_of, default=None)
        assert self._head_seconds == (0.0 if self.head is None else self.queue[self.head])
        for rank, tally in self._by_rank.items():
            own = [self.queue[request] for request, other in self._ranks.items() if other == rank]
            assert tally.count == len(own)
            assert math.isclose(tally.amount, sum(own), rel_tol=1e-6, abs_tol=1e-6)


@dataclass(slots=True)
class Share:
    """What one request takes of a decode instance."""

    pages: int
    tokens: int
    joined: bool = False
    rank: int = 0


@dataclass(slots=True)
class DecodeLoad:
    part: Part
    space: KeySpace
    cost: DecodeCost
    longest: int
    """As in `PrefillLoad`."""
    assigned: dict[RequestId, Share] = field(default_factory=dict)
    """Changed by `assign`, `join` and `remove` only, which keep the sums over it."""
    ahead: Ahead = field(default_factory=Ahead)
    """What it will have to do."""
    pages_used: int = 0
    """By requests that have joined: the last report, moved on by what happened since."""
    strangers: int = 0
    """Requests it works on of which this Conductor does not know."""
    _tokens: int = 0
    _pages: int = 0
    _pages_to_join: int = 0
    """Of those that have not joined yet."""
    _by_rank: dict[int, Tally] = field(default_factory=dict)
    """Pages."""

    @property
    def batch(self) -> int:
        return len(self.assigned) + self.strangers

    @property
    def context_tokens(self) -> int:
        return max(self._tokens, self.part.reported.context_tokens)

    @property
    def committed_pages(self) -> int:
        return max(self._pages, self.pages_used + self._pages_to_join)

    def taken(self, rank: int) -> float:
        """The share of its pages, or of its slots if that is more, that this rank has."""
        tally, capacity = self._by_rank.get(rank), self.part.capacity
        if tally is None:
            return 0.0
        return max(tally.amount / max(capacity.pages, 1), tally.count / capacity.slots if capacity.slots else 0.0)

    @property
    def is_over(self) -> bool:
        """Somebody will have to wait for a slot or for pages."""
        slots = self.part.capacity.slots
        return (slots > 0 and self.batch > slots) or self.committed_pages > self.part.capacity.pages

    def has_room(self, pages: int, batch_ahead: float, kept: float = 0.0) -> bool:
        """`kept`: the share that must stay free. An empty instance takes whatever fits alone: nobody waits for ever."""
        if self.batch == 0:
            return True
        slots = self.part.capacity.slots
        has_slot = slots == 0 or self.batch < slots * (1 + batch_ahead) * (1.0 - kept)
        return has_slot and self.committed_pages + pages <= self.part.capacity.pages * (1.0 - kept)

    def assign(self, request: RequestId, share: Share) -> None:
        """`share` has not joined yet."""
        self.assigned[request] = share
        self._by_rank.setdefault(share.rank, Tally()).add(1, share.pages)
        self._tokens += share.tokens
        self._pages += share.pages
        self._pages_to_join += share.pages

    def join(self, request: RequestId) -> None:
        share = self.assigned[request]
        if not share.joined:
            share.joined = True
            self._pages_to_join -= share.pages
            self.pages_used += share.pages

    def remove(self, request: RequestId, pages: int = 0) -> None:
        """`pages`: how many it held in the end, where that is known to be more than was booked."""
        share = self.assigned.pop(request, None)
        self.ahead.leave(request)
        if share is None:
            return
        self._by_rank[share.rank].add(-1, -share.pages)
        self._tokens -= share.tokens
        self._pages -= share.pages
        if share.joined:
            self.pages_used = max(self.pages_used - max(share.pages, pages), 0)
        else:
            self._pages_to_join -= share.pages

    def correct(self, reported: Reported) -> None:
        self.pages_used = max(self.part.capacity.pages - reported.pages_free, 0)
        self.strangers = max(reported.running + reported.queued - len(self.assigned), 0)

    def check_integrity(self) -> None:
        shares = self.assigned.values()
        assert self.pages_used >= 0
        assert self.strangers >= 0
        assert all(share.pages > 0 for share in shares)
        assert self._tokens == sum(share.tokens for share in shares)
        assert self._pages == sum(share.pages for share in shares)
        assert self._pages_to_join == sum(share.pages for share in shares if not share.joined)
        assert self.ahead.joined.keys() == {id_ for id_, share in self.assigned.items() if share.joined}
        assert self.ahead.coming.keys() == {id_ for id_, share in self.assigned.items() if not share.joined}
        self.ahead.check_integrity()
        for rank, tally in self._by_rank.items():
            own = [share.pages for share in shares if share.rank == rank]
            assert (tally.count, tally.amount) == (len(own), sum(own))


@dataclass(slots=True)
class NodeLoad:
    part: Part
    rooms: dict[RequestId, int] = field(default_factory=dict)
    """Bytes of the rooms that requests have reserved here and not yet left. Changed by `reserve` and `leave` only."""
    room_bytes: int = 0
    """Of all of them."""
    link_free_at: float = 0.0
    """When it will have sent and received what placements have ordered so far."""
    ceiling: int | None = None
    """A room of this many bytes was refused and nothing has come free since: do not ask for as many."""
    refused_at: float = 0.0
    snapshot_asked_at: float = 0.0
    _peer: NodePeer | None = None
    _peer_of: Registered | None = None
    """What `_peer` was made of."""

    @property
    def peer(self) -> NodePeer:
        r = self.part.registered
        if self._peer is None or self._peer_of is not r:
            self._peer_of = r
            self._peer = NodePeer(r.peer.id, r.peer.incarnation, r.peer.address, r.data_address, r.socket_path)
        return self._peer

    @property
    def free_bytes(self) -> int:
        """Of the arena, as last reported: what holds no block at all, not even one that could go."""
        return self.part.capacity.dram_bytes - self.part.reported.used_bytes

    def has_room(self, nbytes: int) -> bool:
        if self.ceiling is not None and nbytes >= self.ceiling:
            return False
        return self.room_bytes + nbytes <= self.part.capacity.dram_bytes

    def reserve(self, request: RequestId, nbytes: int) -> None:
        self.rooms[request] = nbytes
        self.room_bytes += nbytes

    def leave(self, request: RequestId) -> None:
        self.room_bytes -= self.rooms.pop(request, 0)

    def refuse(self, nbytes: int, now: float) -> None:
        self.ceiling = nbytes if self.ceiling is None else min(self.ceiling, nbytes)
        self.refused_at = now


@dataclass(slots=True)
class Fleet:
    started_at: float = 0.0
    parts: dict[PartId, Part] = field(default_factory=dict)
    prefill: dict[PartId, PrefillLoad] = field(default_factory=dict)
    decode: dict[PartId, DecodeLoad] = field(default_factory=dict)
    nodes: dict[PartId, NodeLoad] = field(default_factory=dict)
    coupled: int = 0
    """Instances that are in `prefill` and in `decode`."""
    private: int = 0
    """Nodes from which nothing is fetched or copied."""
    _lost_at: dict[tuple[PartKind, str], float] = field(default_factory=dict)
    """When an instance of this kind and model last went away."""
    _prefill_of: dict[str, tuple[PrefillLoad, ...]] = field(default_factory=dict)
    """By model, since the fleet changed last; the answers of `prefill_for`."""
    _decode_of: dict[str, tuple[DecodeLoad, ...]] = field(default_factory=dict)

    def add(self, event: Registered, prefill: PrefillCost, decode: DecodeCost, now: float) -> Part:
        """The costs are used where the part is of that kind. Raises ValueError for a worker without key space."""
        peer = event.peer
        part = Part(event, now, Reported(peer.id, peer.incarnation, pages_free=event.capacity.pages))
        if event.kind.prefills:
            self.prefill[peer.id] = PrefillLoad(part, _space_of(event), prefill, _takes(event))
        if event.kind.decodes:
            self.decode[peer.id] = DecodeLoad(part, _space_of(event), decode, _takes(event))
        if event.kind is PartKind.NODE:
            self.nodes[peer.id] = NodeLoad(part)
        self.coupled += event.kind is PartKind.COUPLED
        self.private += event.private
        self.parts[peer.id] = part
        self._changed()
        return part

    def update(self, part: Part, event: Registered) -> None:
        """The same process registers again; its capacity or addresses may have changed, or it has found its node."""
        self.private += event.private - part.registered.private
        part.register(event)
        for load in (self.prefill.get(part.id), self.decode.get(part.id)):
            if load is not None:
                load.longest = _takes(event)
        self._changed()

    def remove(self, id_: PartId, now: float) -> Part:
        part = self.parts.pop(id_)
        self.coupled -= part.kind is PartKind.COUPLED
        self.private -= part.registered.private
        self.prefill.pop(id_, None)
        self.decode.pop(id_, None)
        self.nodes.pop(id_, None)
        self._lost_at[part.kind, part.registered.model] = now
        self._changed()
        return part

    def _changed(self) -> None:
        self._prefill_of.clear()
        self._decode_of.clear()

    def find(self, id_: PartId, incarnation: Incarnation) -> Part | None:
        part = self.parts.get(id_)
        return part if part is not None and part.peer.incarnation == incarnation else None

    def is_node(self, id_: PartId, incarnation: Incarnation) -> bool:
        """Whether this is a node that is there: what only nodes say counts from nobody else."""
        part = self.find(id_, incarnation)
        return part is not None and part.kind is PartKind.NODE

    def lends(self, node: PartId) -> bool:
        """Whether others may have copies of its blocks, and it copies of theirs, by order of the Conductor."""
        load = self.nodes.get(node)
        return load is not None and not load.part.registered.private

    def workers_of(self, node: PartId) -> list[Part]:
        return [p for p in self.parts.values() if p.registered.node == node]

    def prefill_for(self, model: str) -> tuple[PrefillLoad, ...]:
        """Those that serve it and whose node is there."""
        found = self._prefill_of.get(model)
        if found is None:
            found = tuple(p for p in self.prefill.values() if self._is_up(p.part, model))
            if found:
                self._prefill_of[model] = found
        return found

    def decode_for(self, model: str) -> tuple[DecodeLoad, ...]:
        found = self._decode_of.get(model)
        if found is None:
            found = tuple(d for d in self.decode.values() if self._is_up(d.part, model))
            if found:
                self._decode_of[model] = found
        return found

    def _is_up(self, part: Part, model: str) -> bool:
        return _serves(part, model) and part.node_id in self.nodes

    def is_expected(self, kind: PartKind, model: str, now: float) -> bool:
        """Whether one may come (back) soon."""
        waits_for_node = any(p.kind is kind and _serves(p, model) for p in self.parts.values())
        starting = now - self.started_at < EXPECTED_SECONDS
        return waits_for_node or starting or self.lost_recently(kind, model, now)

    def lost_recently(self, kind: PartKind, model: str, now: float) -> bool:
        """Whether an instance that was there may come back."""
        lost_at = self._lost_at.get((kind, model))
        return lost_at is not None and now - lost_at < EXPECTED_SECONDS

    @property
    def context_tokens(self) -> int:
        """The longest prompt + output that some prefill and some decode instance both take, pages and arena counted."""
        prefill = max((_longest(p) for p in self.prefill.values()), default=0)
        decode = 0
        for load in self.decode.values():
            node = self.nodes.get(load.part.node_id)
            arena = node.part.capacity.dram_bytes if node is not None else 0
            decode = max(decode, min(_longest(load), arena // load.space.block_bytes * load.space.block_tokens))
        return min(prefill, decode)

    def announcements(self, to: Iterable[Peer]) -> list[FleetChanged]:
        """The same to each."""
        parts = sorted(self.parts.values(), key=lambda p: p.id)
        spaces = {p.space.id: p.space for p in self.prefill.values()}
        spaces |= {d.space.id: d.space for d in self.decode.values()}
        told = (
            tuple([FleetPart(p.kind, p.peer, p.capacity, p.registered.node, p.registered.model) for p in parts]),
            tuple([self.nodes[p.id].peer for p in parts if p.kind is PartKind.NODE]),
            tuple([spaces[id_] for id_ in sorted(spaces)]),
            self.context_tokens,
        )
        return [FleetChanged(peer, *told) for peer in to]

    def check_integrity(self) -> None:
        """Raises AssertionError where the tables of loads and parts disagree."""
        parts = self.parts.items()
        assert list(self.prefill) == [id_ for id_, part in parts if part.kind.prefills]
        assert list(self.decode) == [id_ for id_, part in parts if part.kind.decodes]
        assert list(self.nodes) == [id_ for id_, part in parts if part.kind is PartKind.NODE]
        assert self.private == sum(part.registered.private for _, part in parts)
        for prefill in self.prefill.values():
            prefill.coming.check_integrity(prefill.queue)
            prefill.check_integrity()
        for decode in self.decode.values():
            decode.check_integrity()
        for node in self.nodes.values():
            assert all(n >= 0 for n in node.rooms.values())
            assert node.room_bytes == sum(node.rooms.values())


def _takes(event: Registered) -> int:
    """Tokens; a capacity of 0 pages or context is unknown."""
    pages = event.capacity.pages * _space_of(event).block_tokens
    return min(event.capacity.context_tokens or _UNLIMITED, pages or _UNLIMITED, _UNLIMITED)


def _longest(load: PrefillLoad | DecodeLoad) -> int:
    """Tokens of the longest sequence that its context and its pages take; 0 pages: unknown."""
    capacity = load.part.capacity
    return min(capacity.context_tokens, capacity.pages * load.space.block_tokens or capacity.context_tokens)


def _serves(part: Part, model: str) -> bool:
    return part.registered.model == model


def _space_of(event: Registered) -> KeySpace:
    if event.space is None:
        raise ValueError(f"{event.peer.id} registers as a {event.kind.value} worker without a key space")
    return event.space
