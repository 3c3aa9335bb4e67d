"""A cluster around one Conductor, in virtual time: gateway, nodes and workers that follow docs/protocol.md.

Messages of one sender to one receiver keep their order and take a random while. Whatever may go wrong is
asked for by the test: parts die, fall silent, refuse, forget to answer; messages come twice.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from moonpool.core import actions as act
from moonpool.core import events as ev
from moonpool.core.blocks import block_keys
from moonpool.core.conductor import Conductor, ConductorConfig
from moonpool.core.vocabulary import (
    Capacity,
    Chain,
    Incarnation,
    KeySpace,
    KeySpaceId,
    PartId,
    PartKind,
    Peer,
    RequestId,
    Tier,
)

SPACE = KeySpace(KeySpaceId("space"), block_tokens=16, runs=2, run_bytes=1024)
MODEL = "tiny"
GATEWAY = PartId("gateway-0")


def peer(id_: str, life: int = 1) -> Peer:
    return Peer(PartId(id_), Incarnation(f"{id_}.{life}"), f"tcp://127.0.0.1:{abs(sum(map(ord, id_)))}")


def node(index: int, life: int = 1, dram_bytes: int = 1 << 30) -> ev.Registered:
    return ev.Registered(
        PartKind.NODE,
        peer(f"node-{index}", life),
        Capacity(dram_bytes=dram_bytes),
        data_address="127.0.0.1:1",
        socket_path=f"/run/node-{index}",
    )


def worker(
    kind: PartKind,
    index: int,
    on: int = 0,
    life: int = 1,
    *,
    pages: int = 64,
    slots: int = 0,
    context: int = 1024,
    step: int = 0,
) -> ev.Registered:
    capacity = Capacity(pages=pages, slots=slots, context_tokens=context, step_tokens=step)
    return ev.Registered(
        kind, peer(f"{kind.value}-{index}", life), capacity, SPACE, node=PartId(f"node-{on}"), model=MODEL
    )


def gateway(life: int = 1) -> ev.Registered:
    return ev.Registered(PartKind.GATEWAY, peer(GATEWAY, life))


def arrival(name: str, tokens: int = 40, output: int = 8, attempt: int = 1, **more: object) -> ev.RequestArrived:
    """A prompt whose tokens are all `name`-specific unless `family` says otherwise."""
    family = str(more.pop("family", name))
    seed = sum(ord(c) * 131**i for i, c in enumerate(family)) % 50_000
    keys = block_keys([seed + i for i in range(tokens)], SPACE)
    given = {"time_left": 60.0, "output_tokens": 0, "chains": (Chain(SPACE.id, keys),), **more}
    return ev.RequestArrived(
        request=RequestId(name),
        attempt=attempt,
        gateway=peer(GATEWAY),
        model=MODEL,
        prompt_tokens=tokens,
        max_output_tokens=output,
        **given,  # type: ignore[arg-type]
    )


@dataclass
class Stream:
    """One request as its gateway sees it."""

    arrived: ev.RequestArrived
    deadline: float
    attempt: int = 1
    produced: int = 0
    outcome: str | None = None
    place: act.Place | None = None
    begin: int = 0
    """What was produced before the attempt."""
    known_to: int = 1
    """The life of the Conductor that knows of `place`."""
    bereft: int = 0
    """Looks in a row at which a worker that it needs was gone."""


@dataclass
class Odds:
    """Chances of misbehaviour, each per opportunity."""

    room_refused: float = 0.0
    room_silent: float = 0.0
    prefill_failed: float = 0.0
    decode_refused: float = 0.0
    preempted: float = 0.0
    ends_in_prefill: float = 0.0
    twice: float = 0.0


@dataclass
class Scene:
    """`feed` gives the Conductor an event and performs its actions; `run` lets time pass."""

    seed: int = 0
    config: ConductorConfig = field(default_factory=ConductorConfig)
    odds: Odds = field(default_factory=Odds)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.conductor = Conductor(self.config, self.seed)
        self.lives = 1
        self.told: dict[Peer, list[ev.Event]] = {}
        """Of the Conductor."""
        self.now = 100.0
        self.journal: list[tuple[float, ev.Event, tuple[act.Action, ...]]] = []
        self.parts: dict[PartId, ev.Registered] = {}
        self.silent: set[PartId] = set()
        self.streams: dict[RequestId, Stream] = {}
        self.rooms: dict[tuple[PartId, RequestId, int], None] = {}
        self.cancelled: dict[tuple[PartId, RequestId], int] = {}
        self.blocks: dict[PartId, dict[bytes, None]] = {}
        self.seqs: dict[PartId, int] = {}
        self.holding: dict[PartId, dict[RequestId, int]] = {}
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._counter = 0
        self._last: dict[tuple[str, str], float] = {}
        self._wake = 0
        self._at(self.now + 0.5, self._beat)

    # Time and messages

    def _at(self, when: float, what: Callable[[], None]) -> None:
        self._counter += 1
        heapq.heappush(self._heap, (when, self._counter, what))

    def _send(self, source: str, target: str, what: Callable[[], None], after: float = 0.0) -> None:
        """Ordered per (source, target) from the moment of sending on. What a dead Conductor has not read is lost."""

        def leave() -> None:
            arrives = max(self.now + self.rng.uniform(0.0001, 0.02), self._last.get((source, target), 0.0))
            self._last[source, target] = arrives
            life = self.lives
            self._at(arrives, lambda: what() if target != "conductor" or life == self.lives else None)

        self._at(self.now + after, leave)

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self._heap and self._heap[0][0] <= end:
            when, _, what = heapq.heappop(self._heap)
            self.now = max(self.now, when)
            what()
        self.now = end

    def feed(self, event: ev.Event) -> tuple[act.Action, ...]:
        actions = self.conductor.handle(event, self.now)
        self.journal.append((self.now, event, actions))
        self.conductor.check_integrity()
        for action in actions:
            self._perform(action)
        if self.rng.random() < self.odds.twice and not isinstance(event, ev.Woke | ev.Registered | ev.Lost):
            self.feed(event)
        return actions

    def _report(self, part: Peer, event: ev.Event, after: float = 0.0) -> None:
        """A fact from a part, if that life of it is still there when it is sent and heard."""
        if isinstance(event, ev.PrefillFailed | ev.DecodeRefused | ev.Preempted | ev.Finished):
            self.told.setdefault(part, []).append(event)
        self._deliver(part, event, after)

    def _deliver(self, part: Peer, event: ev.Event, after: float = 0.0) -> None:
        def deliver() -> None:
            if self._is_alive(part) and part.id not in self.silent:
                self.feed(event)

        self._send(part.id, "conductor", deliver, after)

    def _is_alive(self, part: Peer) -> bool:
        return part.id in self.parts and self.parts[part.id].peer.incarnation == part.incarnation

    def _beat(self) -> None:
        for id_, part in list(self.parts.items()):
            held = self.holding.get(id_, {})
            free = max(part.capacity.pages - sum(held.values()), 0)
            reported = ev.Reported(id_, part.peer.incarnation, running=len(held), pages_free=free)
            self._report(part.peer, reported)
        self._watch()
        self._at(self.now + 0.5, self._beat)

    # The fleet

    def start(self, part: ev.Registered) -> None:
        self.parts[part.peer.id] = part
        self.silent.discard(part.peer.id)
        self.holding[part.peer.id] = {}
        if part.kind is PartKind.NODE:
            self.blocks[part.peer.id], self.seqs[part.peer.id] = {}, 0
        self.feed(part)

    def kill(self, id_: PartId, *, noticed: bool = True) -> None:
        part = self.parts.pop(id_)
        self.silent.discard(id_)
        self.rooms = {room: None for room in self.rooms if room[0] != id_}
        if part.kind is PartKind.NODE:
            for other in [p for p in self.parts.values() if p.node == id_]:
                self.kill(other.peer.id, noticed=noticed)
        if noticed:
            self.feed(ev.Lost(id_, part.peer.incarnation, "killed"))

    # Requests

    def request(self, event: ev.RequestArrived) -> Stream:
        stream = self.streams[event.request] = Stream(event, self.now + event.time_left)
        self._send(GATEWAY, "conductor", lambda: self.feed(event) and None)
        self._at(stream.deadline, lambda: self.cancel(event.request, "deadline"))
        return stream

    def cancel(self, id_: RequestId, outcome: str = "cancelled") -> None:
        stream = self.streams[id_]
        if stream.outcome is None:
            stream.outcome = outcome
            self._send(GATEWAY, "conductor", lambda: self.feed(ev.RequestCancelled(id_, outcome)) and None)

    def _perform(self, action: act.Action) -> None:
        match action:
            case act.WakeAt(at=at):
                assert at >= self.now - 1e-6
                self._wake += 1
                mine = self._wake
                self._at(at, lambda: self.feed(ev.Woke()) and None if mine == self._wake else None)
            case act.FleetChanged(to=to) if to.id == GATEWAY:
                there = {part.peer for part in action.parts}
                self._send("conductor", GATEWAY, lambda: self._tell_placed(there))
            case act.ReserveRoom():
                self._send("conductor", action.node.id, lambda: self._reserve(action))
            case act.ReleaseRoom(node=where, request=request, attempt=attempt):
                self._send("conductor", where.id, lambda: self.rooms.pop((where.id, request, attempt), None) and None)
            case act.Cancel():
                self._send("conductor", action.to.id, lambda: self._drop(action))
            case act.SendSnapshot():
                self._send("conductor", action.node.id, lambda: self._snapshot(action))
            case act.RegisterAgain(to=to):
                if self._is_alive(to):
                    self._register_again(to)
            case act.Place() | act.Reject() | act.Resubmit() | act.ExpectEnd():
                self._send("conductor", GATEWAY, lambda: self._answer(action))
            case act.Hold() | act.FleetChanged() | act.IdTaken():
                pass

    def _reserve(self, order: act.ReserveRoom) -> None:
        where = order.node
        part = Peer(where.id, where.incarnation, where.address)
        if not self._is_alive(part) or self.rng.random() < self.odds.room_silent:
            return
        key = where.id, order.request, order.attempt
        if key not in self.rooms and self.rng.random() < self.odds.room_refused:
            refused = ev.RoomRefused(where.id, where.incarnation, order.request, order.attempt, "no room")
            self._report(part, refused)
            return
        self.rooms[key] = None
        held = self.blocks[where.id]
        lacking = tuple(i for i, k in enumerate(order.keys) if k not in held)
        self._report(part, ev.RoomConfirmed(where.id, where.incarnation, order.request, order.attempt, lacking))

    def _snapshot(self, order: act.SendSnapshot) -> None:
        where = order.node
        if self._is_alive(part := Peer(where.id, where.incarnation, where.address)):
            keys = tuple(self.blocks[where.id])
            blocks = ((SPACE.id, Tier.DRAM, keys),)
            self._report(part, ev.Snapshot(where.id, where.incarnation, self.seqs[where.id], blocks))

    def _store(self, where: PartId, keys: tuple[bytes, ...]) -> None:
        new = tuple(k for k in keys if k not in self.blocks.get(where, {}))
        if where in self.parts and new:
            self.seqs[where] += 1
            self.blocks[where].update(dict.fromkeys(new))
            incarnation = self.parts[where].peer.incarnation
            stored = ev.BlocksStored(where, incarnation, self.seqs[where], SPACE.id, Tier.DRAM, new)
            self._report(self.parts[where].peer, stored)

    def _answer(self, action: act.Place | act.Reject | act.Resubmit | act.ExpectEnd) -> None:
        stream = self.streams[action.request]
        if action.attempt != stream.attempt:
            return
        match action:
            case act.Reject(reason=reason):
                if stream.outcome is None:
                    stream.outcome = f"rejected {reason.value}"
            case act.Resubmit() if stream.outcome is not None:
                cancelled = ev.RequestCancelled(action.request, "over")
                self._send(GATEWAY, "conductor", lambda: self.feed(cancelled) and None)
            case act.Resubmit():
                self._next_attempt(stream)
            case act.ExpectEnd():
                self._end_soon(stream)
            case act.Place() if stream.outcome is None:
                stream.place, stream.known_to = action, self.lives
                self._send(GATEWAY, action.prefill.id, lambda: self._prefill(action, stream))

    def _end_soon(self, stream: Stream) -> None:
        attempt = stream.attempt

        def check() -> None:
            if stream.outcome is None and stream.attempt == attempt:
                self._next_attempt(stream)

        self._at(self.now + 5.0, check)

    def _next_attempt(self, stream: Stream) -> None:
        stream.attempt += 1
        stream.begin, stream.place = stream.produced, None
        again = self._as_it_is(stream)
        self._send(GATEWAY, "conductor", lambda: self.feed(again) and None)

    def _as_it_is(self, stream: Stream) -> ev.RequestArrived:
        return arrival(
            stream.arrived.request,
            stream.arrived.prompt_tokens + stream.produced,
            stream.arrived.max_output_tokens - stream.produced,
            stream.attempt,
            time_left=stream.deadline - self.now,
            output_tokens=stream.produced,
        )

    # The Conductor's death

    def restart_conductor(self) -> None:
        """Another one, which knows nothing. Parts register when they hear so, gateways tell what they have."""
        self.lives += 1
        self.conductor = Conductor(self.config, self.seed + self.lives)
        self._wake += 1
        for part in list(self.parts.values()):
            self._register_again(part.peer, self.rng.uniform(0.0, 0.5))
        for stream in self.streams.values():
            if stream.outcome is None and stream.place is None:
                self._send(GATEWAY, "conductor", lambda s=stream: self._arrive_anew(s), after=0.6)

    def _register_again(self, part: Peer, after: float = 0.0) -> None:
        for event in (self.parts[part.id], *self.told.get(part, [])):
            self._deliver(part, event, after)

    def _arrive_anew(self, stream: Stream) -> None:
        if stream.outcome is None and stream.place is None:
            self.rooms = {room: None for room in self.rooms if room[1:] != (stream.arrived.request, stream.attempt)}
            self._next_attempt(stream)

    def _tell_placed(self, there: set[Peer]) -> None:
        for stream in self.streams.values():
            place = stream.place
            if stream.outcome is not None or place is None or stream.known_to == self.lives:
                continue
            drawn = stream.produced - stream.begin
            if there.issuperset(_needed(place, drawn)):
                stream.known_to = self.lives
                told = ev.PlacedBefore(self._as_it_is(stream), place, drawn)
                self._send(GATEWAY, "conductor", lambda t=told: self.feed(t) and None)

    def _watch(self) -> None:
        """Workers that nobody noticed to be gone, for long enough for a Conductor to notice it."""
        for stream in self.streams.values():
            place = stream.place
            if stream.outcome is not None or place is None:
                stream.bereft = 0
                continue
            needed = _needed(place, stream.produced - stream.begin)
            stream.bereft = 0 if all(self._is_alive(peer) for peer in needed) else stream.bereft + 1
            if stream.bereft > 22:
                self._next_attempt(stream)

    def _drop(self, order: act.Cancel) -> None:
        key = order.to.id, order.request
        self.cancelled[key] = max(order.attempt, self.cancelled.get(key, 0))
        self.holding.get(order.to.id, {}).pop(order.request, None)

    def _works(self, part: Peer, action: act.Place) -> bool:
        return self._is_alive(part) and self.cancelled.get((part.id, action.request), 0) < action.attempt

    def _prefill(self, place: act.Place, stream: Stream) -> None:
        part = place.prefill
        if not self._is_alive(part):
            failed = ev.PrefillFailed(place.request, place.attempt, part.id, "unreachable")
            self._end_soon(stream)
            self._send(GATEWAY, "conductor", lambda: self.feed(failed) and None)
        elif self._works(part, place):
            self._at(self.now + self.rng.uniform(0.01, 0.3), lambda: self._prefilled(place, stream))

    def _prefilled(self, place: act.Place, stream: Stream) -> None:
        part = place.prefill
        if not self._works(part, place):
            return
        ids = place.request, place.attempt, part.id
        if self.rng.random() < self.odds.prefill_failed:
            self._report(part, ev.PrefillFailed(*ids, "broken"))
            return
        keys = stream.arrived.chains[0].keys
        self._store(place.prefill_node.id, keys)
        tokens = stream.arrived.prompt_tokens + stream.produced
        last = stream.arrived.max_output_tokens - stream.produced == 1
        self._report(part, ev.PrefillDone(*ids, tokens, 0, 0.0, 0.1))
        self._token(stream, place, 1)
        if last or self.rng.random() < self.odds.ends_in_prefill:
            self._finish(part, place, stream)
        else:
            self._send(part.id, place.decode.id, lambda: self._join(place, stream))

    def _join(self, place: act.Place, stream: Stream) -> None:
        part = place.decode
        if not self._works(part, place):
            return
        ids = place.request, place.attempt, part.id
        room = place.decode_node.id, place.request, place.attempt
        if room not in self.rooms or self.rng.random() < self.odds.decode_refused:
            self._report(part, ev.DecodeRefused(*ids, "late"))
            return
        del self.rooms[room]
        total = stream.arrived.prompt_tokens + stream.arrived.max_output_tokens
        self.holding[part.id][place.request] = -(-total // SPACE.block_tokens)
        self._report(part, ev.DecodeJoined(*ids))
        self._at(self.now + self.rng.uniform(0.01, 1.0), lambda: self._decoded(place, stream))

    def _decoded(self, place: act.Place, stream: Stream) -> None:
        part = place.decode
        if not self._works(part, place):
            return
        self.holding[part.id].pop(place.request, None)
        left = stream.arrived.max_output_tokens - stream.produced
        if left > 1 and self.rng.random() < self.odds.preempted:
            self._token(stream, place, 1)
            self._report(part, ev.Preempted(place.request, place.attempt, part.id))
            return
        self._token(stream, place, left)
        self._store(place.decode_node.id, stream.arrived.chains[0].keys)
        self._finish(part, place, stream)

    def _token(self, stream: Stream, place: act.Place, count: int) -> None:
        if stream.attempt == place.attempt and stream.outcome is None:
            stream.produced += count

    def _finish(self, part: Peer, place: act.Place, stream: Stream) -> None:
        if stream.attempt == place.attempt and stream.outcome is None:
            stream.outcome = "finished"
        produced = stream.produced
        self._report(part, ev.Finished(place.request, place.attempt, part.id, produced, "length"))


def _needed(place: act.Place, drawn: int) -> list[Peer]:
    nodes = [place.decode_node] if drawn > 1 else [place.decode_node, place.prefill_node]
    workers = [place.decode] if drawn > 1 else [place.decode, place.prefill]
    return workers + [Peer(node.id, node.incarnation, node.address) for node in nodes]
