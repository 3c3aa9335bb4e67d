"""The Conductor: facts in, orders out. It keeps who is there, who holds which block, and every request's attempt.

Pure: no clock, no I/O. The driver stamps `now`, performs the actions and feeds every outcome back. The newest
`WakeAt` replaces an earlier one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from moonpool.core import actions as act
from moonpool.core import events as ev
from moonpool.core.attempts import Attempts
from moonpool.core.contest import Contests
from moonpool.core.cost import DecodeCost, PrefillCost
from moonpool.core.directory import Directory
from moonpool.core.fleet import Fleet, Part
from moonpool.core.keydump import KeyDump, KeyGroup
from moonpool.core.replication import order_copies
from moonpool.core.requests import Phase, Request
from moonpool.core.settings import ConductorConfig, Decisions
from moonpool.core.snapshot import Snapshot, freeze, thaw
from moonpool.core.state import BlocksPage, BlockState, ConductorState, HotPrefix, PrefixCopy, describe
from moonpool.core.vocabulary import BlockKey, Chain, KeySpaceId, NodePeer, PartId, PartKind, Peer, RequestId
from moonpool.core.why import Waiting, Weighing

__all__ = ["Conductor", "ConductorConfig", "Decisions"]

TICK_SECONDS = 1.0
HELD_TICK_SECONDS = 0.25
SNAPSHOT_SECONDS = 5.0
"""A snapshot that has not come after this long is asked for again."""
_TIMER_SLACK = 1e-3


class Conductor:
    """`seed` drives the `random` policy only; equal seeds and events give equal actions.

    `explains`: False where nobody asks for `weighings` and `waitings`, and nothing is noted for them.
    """

    def __init__(self, config: ConductorConfig, seed: int, *, explains: bool = True) -> None:
        self._config = config
        self._out: list[act.Action] = []
        self._fleet = Fleet()
        self._directory = Directory()
        self._contests = Contests()
        self._attempts = Attempts(config, seed, self._fleet, self._directory, self._out, explains)
        # A worker that restarts is as fast as it was, so what was learned of it stays; ids are configured names.
        self._prefill_costs: dict[PartId, PrefillCost] = {}
        self._decode_costs: dict[PartId, DecodeCost] = {}
        self._started = False
        self._fleet_changed = False
        self._wake_at: float | None = None

    def handle(self, event: ev.Event, now: float) -> tuple[act.Action, ...]:
        if not self._started:
            self._started, self._fleet.started_at = True, now
        self._dispatch(event, now)
        if self._fleet_changed:
            self._fleet_changed = False
            self._out += self._fleet.announcements(self.parts())
        if self._attempts.endings.may_serve:
            self._attempts.serve_held(now)
        self._plan_wake(now)
        actions = tuple(self._out)
        self._out.clear()
        return actions

    def describe(self, now: float) -> ConductorState:
        attempts = self._attempts
        return describe(self._config, self._fleet, self._directory, attempts.requests, attempts.endings.decisions, now)

    def weighings(self, request: RequestId) -> tuple[Weighing, ...]:
        """What was weighed when it was placed or refused; a memory of the most recent requests."""
        return self._attempts.why.weighings(request, self._config)

    def weighing(self, request: RequestId, after: float) -> Weighing | None:
        """The last of them, if it was later than `after`."""
        return self._attempts.why.newest(request, self._config, after)

    def waitings(self, request: RequestId) -> tuple[Waiting, ...]:
        """Why it was held."""
        return self._attempts.why.waitings(request)

    def snapshot(self) -> tuple[Snapshot, KeyDump]:
        """All that it knows, so that another goes on exactly as this one would; the keys of blocks come in steps.

        Whoever takes them says `end_dump` when it is done with them. Raises TypeError for what cannot be kept.
        """
        return freeze(self), self._directory.begin_dump()

    def end_dump(self) -> None:
        self._directory.end_dump()

    @classmethod
    def restored(cls, snapshot: Snapshot, keys: Iterable[KeyGroup]) -> Conductor:
        """The same again. Raises ValueError for a snapshot that is damaged, or of other code."""
        conductor = thaw(snapshot, cls)
        for group in keys:
            conductor._directory.load(group)
        return conductor

    def holders(self, space: KeySpaceId, keys: Sequence[BlockKey]) -> list[tuple[NodePeer, ...]]:
        """Of each block the nodes that have it for others, as far as the directory knows."""
        nodes, lends = self._fleet.nodes, self._fleet.lends
        holders = self._directory.holders(space, keys)
        return [tuple(nodes[node].peer for node in found if lends(node)) for found in holders]

    def held(
        self, space: KeySpaceId, keys: Sequence[BlockKey]
    ) -> list[tuple[tuple[NodePeer, ...], tuple[NodePeer, ...]]]:
        """Of each block the nodes that give it to others, in DRAM and on SSD."""
        peers = {id_: node.peer for id_, node in self._fleet.nodes.items()}
        giving = {id_: peer for id_, peer in peers.items() if self._fleet.lends(id_) and peer.data_address}
        return [
            (tuple(giving[n] for n in dram if n in giving), tuple(giving[n] for n in ssd if n in giving))
            for dram, ssd in self._directory.tiers(space, keys)
        ]

    def blocks(self, after: str, most: int) -> BlocksPage:
        """About `most` of the blocks that nodes give to others; `after`: where the page before said that it ends.

        Whatever is there all the while is on one page. Raises ValueError for a place that no page has named.
        """
        found, following = self._directory.page(after, most)
        return BlocksPage(
            tuple(
                BlockState(key.hex(), space, tuple(n.id for n in dram), tuple(n.id for n in ssd))
                for space, keys in found
                for key, (dram, ssd) in zip(keys, self.held(space, keys), strict=True)
                if dram or ssd
            ),
            following,
        )

    def hottest(self, most: int, now: float) -> tuple[HotPrefix, ...]:
        """What the prompts that were placed last begin with, and where that is."""
        found = []
        for space, keys, uses, used_at in self._attempts.sweeper.hottest(most):
            chain = Chain(space.id, keys)
            runs = self._directory.match(chain)
            slow = self._directory.slow_blocks(chain, runs)
            copies = tuple(PrefixCopy(node, blocks, slow.get(node, 0)) for node, blocks in runs.items())
            tokens = len(keys) * space.block_tokens
            found.append(HotPrefix(keys[-1].hex(), len(keys), tokens, uses, now - used_at, copies))
        return tuple(found)

    def parts(self) -> tuple[Peer, ...]:
        """Who is there now, in order of registration."""
        return tuple(part.peer for part in self._fleet.parts.values())

    def _dispatch(self, event: ev.Event, now: float) -> None:
        attempts = self._attempts
        match event:
            case ev.Reported():
                self._reported(event, now)
            case ev.RequestArrived():
                attempts.arrived(event, now)
            case ev.PlacedBefore():
                attempts.placed_before(event, now)
            case ev.RequestCancelled():
                attempts.cancelled(event, now)
            case ev.RoomConfirmed():
                attempts.room_confirmed(event, now)
            case ev.RoomRefused():
                attempts.room_refused(event, now)
            case ev.PrefillDone():
                attempts.prefill_done(event, now)
            case ev.PrefillFailed():
                attempts.prefill_failed(event, now)
            case ev.DecodeJoined():
                attempts.decode_joined(event, now)
            case ev.DecodeRefused():
                attempts.decode_refused(event, now)
            case ev.Preempted():
                attempts.preempted(event, now)
            case ev.Finished():
                attempts.finished(event, now)
            case ev.DecodeStepped():
                if load := self._fleet.decode.get(event.instance):
                    load.cost.observe(event.batch, event.context_tokens, event.seconds)
            case ev.BlocksStored() | ev.BlocksRemoved() | ev.Snapshot():
                self._announced(event, now)
            case ev.ReplicasWanted():
                orders = order_copies(event, self._fleet, self._directory, attempts.endings.decisions)
                self._out.extend(orders)
            case ev.Registered():
                self._registered(event, now)
            case ev.Lost():
                self._lost(event, now)
            case ev.Woke():
                self._woke(now)

    # Who is there

    def _registered(self, event: ev.Registered, now: float) -> None:
        if event.space is None and (event.kind.prefills or event.kind.decodes):
            return
        id_ = event.peer.id
        known = self._fleet.parts.get(id_)
        if known is not None and _is_same(known.registered, event):
            known.heard_at, changed = now, known.registered != event
            self._fleet.update(known, event)
            self._fleet_changed |= changed
            if not changed:
                self._out += self._fleet.announcements([known.peer])
            return
        if known is not None:
            if not self._contests.may_replace(known, event, now):
                return
            self._lose([known], now, proven=True)
        prefill = self._prefill_costs.setdefault(id_, PrefillCost(self._config.prefill_cost.shared(1 / event.stages)))
        decode = self._decode_costs.setdefault(id_, DecodeCost(self._config.decode_cost))
        self._fleet.add(event, prefill, decode, now)
        if event.kind is PartKind.NODE:
            self._directory.join(id_)
            self._ask_snapshot(id_, now)
        self._fleet_changed = self._attempts.endings.may_serve = True

    def _reported(self, event: ev.Reported, now: float) -> None:
        part = self._fleet.find(event.id, event.incarnation)
        if part is None:
            self._reported_by_stranger(event, now)
            return
        if (refused := self._contests.refused_by(part, now)) is not None:
            self._out.append(act.IdTaken(refused, part.peer))
        before, part.reported, part.heard_at = part.reported, event, now
        if part.kind.decodes:
            self._fleet.decode[part.id].correct(event)
        elif part.kind is PartKind.NODE:
            node = self._fleet.nodes[part.id]
            if event.used_bytes < before.used_bytes:
                node.ceiling = None
            overdue = self._directory.awaits_snapshot(part.id) and now - node.snapshot_asked_at >= SNAPSHOT_SECONDS
            if overdue or self._directory.lacks(part.id, event.announced):
                self._ask_snapshot(part.id, now)
        if _has_less_to_do(before, event):
            self._attempts.endings.may_serve = True

    def _reported_by_stranger(self, event: ev.Reported, now: float) -> None:
        sender, there = Peer(event.id, event.incarnation, ""), self._fleet.parts.get(event.id)
        if there is None:
            self._out.append(act.RegisterAgain(sender))
        elif (slow := self._contests.returning(event.id, event.incarnation, now)) is not None:
            self._lose([there], now, proven=False)
            self._out += (act.IdTaken(there.peer, slow), act.RegisterAgain(sender))
        else:
            # Two processes of one id would throw each other out for ever: the one that is there stays.
            self._out.append(act.IdTaken(sender, there.peer))

    def _lost(self, event: ev.Lost, now: float) -> None:
        self._contests.withdraw(event.id, event.incarnation)
        part = self._fleet.find(event.id, event.incarnation)
        if part is not None:
            self._lose([part], now, proven=True)
            self._settle_claims(now)

    def _settle_claims(self, now: float) -> None:
        for event in self._contests.ripe(self._fleet, now):
            self._registered(event, now)

    def _lose(self, parts: list[Part], now: float, *, proven: bool) -> None:
        """A node takes its workers with it: they map its arena. Who may still live is told to drop its work."""
        silent = [] if proven else list(parts)
        gone = list(parts) if proven else []
        for node in [p for p in parts if p.kind is PartKind.NODE]:
            silent += [w for w in self._fleet.workers_of(node.id) if w not in parts]
        for part in gone:
            self._drop(part, now)
        for part in gone + silent:
            self._attempts.endings.part_lost(part, now)
        for part in silent:
            self._drop(part, now)
        self._fleet_changed = True

    def _drop(self, part: Part, now: float) -> None:
        self._fleet.remove(part.id, now)
        self._attempts.endings.decisions.parts_lost += 1
        if part.kind is PartKind.NODE:
            self._directory.forget(part.id)

    # Who holds which block

    def _announced(self, event: ev.BlocksStored | ev.BlocksRemoved | ev.Snapshot, now: float) -> None:
        if not self._fleet.is_node(event.node, event.incarnation):
            return
        missing = False
        match event:
            case ev.BlocksStored(node=node, seq=seq, space=space, tier=tier, keys=keys, more=more):
                missing = self._directory.stored(node, seq, space, tier, keys, more)
            case ev.BlocksRemoved(node=node, seq=seq, space=space, tier=tier, keys=keys):
                missing = self._directory.removed(node, seq, space, tier, keys)
                self._fleet.nodes[node].ceiling = None
                self._attempts.endings.may_serve = True
            case ev.Snapshot():
                self._directory.replace(event.node, event.seq, event.blocks, event.more)
        if missing:
            self._ask_snapshot(event.node, now)

    def _ask_snapshot(self, id_: PartId, now: float) -> None:
        node = self._fleet.nodes[id_]
        node.snapshot_asked_at = now
        self._attempts.endings.decisions.snapshots_asked += 1
        self._out.append(act.SendSnapshot(node.peer))

    # Time

    def _woke(self, now: float) -> None:
        if self._wake_at is not None and now >= self._wake_at - _TIMER_SLACK:
            self._forgive(now - self._wake_at)
            self._wake_at = None
        limit = self._config.heartbeat_limit
        silent = [p for p in self._fleet.parts.values() if now - p.heard_at >= limit]
        if silent:
            self._lose(silent, now, proven=False)
        self._settle_claims(now)
        self._attempts.time_out_rooms(now)
        self._attempts.expire(now)
        for node in self._fleet.nodes.values():
            if node.ceiling is not None and now - node.refused_at >= HELD_TICK_SECONDS:
                node.ceiling = None
        self._attempts.sweeper.sweep(now)
        self._attempts.endings.may_serve = True

    def _forgive(self, late: float) -> None:
        """If this process was stopped itself, heartbeats wait unread: nobody was silent for that long."""
        if late >= TICK_SECONDS:
            for part in self._fleet.parts.values():
                part.heard_at += late

    def _plan_wake(self, now: float) -> None:
        requests = self._attempts.requests
        at = now + (HELD_TICK_SECONDS if requests.count(Phase.HELD) else TICK_SECONDS)
        asking = requests.first_in_room()
        if asking is not None and asking.placement is not None:
            at = min(at, max(asking.placement.asked_at + self._config.room_timeout, now))
        if (claim := self._contests.next_at(self._fleet)) is not None:
            at = min(at, max(claim, now))
        if self._wake_at is None or at < self._wake_at - _TIMER_SLACK:
            self._wake_at = at
            self._out.append(act.WakeAt(at))

    def check_integrity(self) -> None:
        """Raises AssertionError where the ledgers of parts and requests disagree."""
        requests = self._attempts.requests
        requests.check_integrity()
        self._attempts.sweeper.check_integrity()
        self._fleet.check_integrity()
        self._directory.check_integrity()
        assert sorted(self._directory.nodes()) == sorted(self._fleet.nodes)
        assert not self._out
        prefill, decode, rooms = _booked(requests.all())
        for id_, load in self._fleet.prefill.items():
            assert sorted(load.queue) == sorted(prefill.pop(id_, [])), f"queue of {id_}"
        for id_, share in self._fleet.decode.items():
            assert sorted(share.assigned) == sorted(decode.pop(id_, [])), f"requests of {id_}"
        for id_, node in self._fleet.nodes.items():
            assert sorted(node.rooms) == sorted(rooms.pop(id_, [])), f"rooms of {id_}"
        left = {**prefill, **decode, **rooms}
        assert not left, f"requests are placed on parts that are gone: {left}"


_Table = dict[PartId, list[RequestId]]


def _booked(requests: list[Request]) -> tuple[_Table, _Table, _Table]:
    """What the loads of prefill, decode and rooms must be, as the requests say."""
    tables: tuple[_Table, _Table, _Table] = ({}, {}, {})
    for request in requests:
        if (placed := request.placement) is None:
            continue
        choice = placed.choice
        in_prefill = request.phase in (Phase.ROOM, Phase.PREFILL)
        holders = (
            choice.prefill.id if in_prefill else None,
            choice.decode.id,
            choice.decode.node if request.phase is not Phase.DECODING else None,
        )
        for table, holder in zip(tables, holders, strict=True):
            if holder is not None:
                table.setdefault(holder, []).append(request.id)
    return tables


def _is_same(a: ev.Registered, b: ev.Registered) -> bool:
    """One life of one process; its capacity or addresses may have changed, or it has found its node."""
    if a.node is not None and a.node != b.node:
        return False
    return (a.peer.incarnation, a.kind, a.space) == (b.peer.incarnation, b.kind, b.space)


def _has_less_to_do(before: ev.Reported, now: ev.Reported) -> bool:
    return (
        now.pages_free > before.pages_free
        or now.queued < before.queued
        or now.running < before.running
        or now.used_bytes < before.used_bytes
    )
