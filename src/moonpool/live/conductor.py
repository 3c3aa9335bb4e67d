"""The Conductor's driver: envelopes in, `Conductor.handle`, actions out to their addressees, timers.

All decisions are in `core/conductor.py`. What goes wrong in there ends the process (its supervisor starts it
again and the parts register anew): a Conductor that lost a fact must not go on deciding.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import OrderedDict

import msgspec

from moonpool.core import actions as act
from moonpool.core import events as ev
from moonpool.core.conductor import Conductor, ConductorConfig
from moonpool.core.state import BlockState
from moonpool.core.vocabulary import BlockKey, KeySpaceId, NodePeer, PartId, Peer, RequestId
from moonpool.live.decided import Decisions
from moonpool.live.kv_events.publisher import KvPublisher
from moonpool.live.kv_events.schema import hash_of
from moonpool.live.kv_events.stream import StreamConfig
from moonpool.wire.link import Link
from moonpool.wire.membership import Books
from moonpool.wire.messages import Counters, Describe, Description, Envelope, Locate, Located
from moonpool.wire.recorder import JournalConfig, Recorder
from moonpool.wire.story import Stories

log = logging.getLogger(__name__)

BURST = 64
"""Envelopes handled in a row before timers get their turn."""
REMEMBERED_LABELS = 8192
BLOCKS_A_PAGE = 4096
"""Of /cluster/blocks, and what one shard of the directory has more."""
RECENT_REQUESTS = 16
"""In /cluster, with what decided their fate."""
HOTTEST_PREFIXES = 8


async def run_conductor(
    link: Link,
    config: ConductorConfig,
    *,
    seed: int | None = None,
    journal: JournalConfig | None = None,
    events: StreamConfig | None = None,
    token: str | None = None,
) -> None:
    """Runs until cancelled. `events`: where KV events are published; `token`: the cluster's, with which nodes are asked
       for them. Raises ConfigError where they cannot be.
    An exception from the decision core is logged with its event and passes through."""
    core = Conductor(config, secrets.randbits(32) if seed is None else seed)
    recorder = None if journal is None else Recorder(journal, config, core, link.me.incarnation)
    publisher = None if events is None else KvPublisher(events, core.held, token)
    driver = _Driver(link, core, recorder, publisher)
    log.info("conductor at %s: placement %s, admission %s", link.me.address, config.placement, config.admission)
    if journal is not None:
        log.info("journal in %s", journal.directory)
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(driver.receive())
            tasks.create_task(driver.wake())
            if publisher is not None:
                tasks.create_task(publisher.run())
    except* Exception as group:
        raise group.exceptions[0] from None
    finally:
        if recorder is not None:
            recorder.close()


class _Driver:
    def __init__(
        self, link: Link, conductor: Conductor, recorder: Recorder | None, publisher: KvPublisher | None
    ) -> None:
        self._link = link
        self._conductor = conductor
        self._recorder = recorder
        self._publisher = publisher
        self._stories = Stories()
        self._decided = Decisions()
        self._books = Books(conductor.check_integrity)
        self._changed = True
        """Something has happened since the books were checked."""
        self._clock = asyncio.get_running_loop().time
        self._wake_at: float | None = None
        self._wake_changed = asyncio.Event()
        self._counters: dict[PartId, Counters] = {}
        self._labels: OrderedDict[RequestId, str] = OrderedDict()
        self._there: dict[PartId, str] = {}
        self._spaces: dict[PartId, tuple[str, KeySpaceId]] = {}
        """Model and key space of each worker that is there."""

    async def receive(self) -> None:
        while True:
            for _ in range(BURST):
                envelope = await self._link.receive()
                self._take(envelope)
                if isinstance(envelope.body, ev.Snapshot | ev.BlocksStored | ev.BlocksRemoved):
                    # It may have been thousands of blocks, and a gateway in the same process waits.
                    break
            await asyncio.sleep(0)

    async def wake(self) -> None:
        while True:
            delay = None if self._wake_at is None else max(self._wake_at - self._clock(), 0.0)
            self._wake_changed.clear()
            try:
                async with asyncio.timeout(delay):
                    await self._wake_changed.wait()
            except TimeoutError:
                self._wake_at = None
                self._apply(ev.Woke(), self._link.me)

    def _take(self, envelope: Envelope) -> None:
        body = envelope.body
        if isinstance(body, ev.Event):
            self._apply(body, envelope.sender)
        elif isinstance(body, Counters):
            self._counters[body.id] = body
        elif isinstance(body, Describe):
            if body.blocks_after is not None:
                state = self.blocks(body.blocks_after)
            else:
                state = self.stories(body.request) if body.request else self.describe(body.live)
            self._link.post(body.to, Description(body.serial, state))
        elif isinstance(body, Locate):
            self._link.post(body.to, Located.of(body.serial, self._conductor.holders(body.space, body.unpacked())))
        else:
            log.warning("%s from %s is nothing for a Conductor, dropped", type(body).__name__, envelope.sender.id)

    def describe(self, live: bool) -> bytes:
        """The body of GET /cluster: `core.state.ConductorState` as JSON, with the counters of its parts.

        `live`: what the dashboard shows beside it in place of `recent`; asked for every second, it checks no books.
        """
        state = self._conductor.describe(self._clock())
        if self._changed and not live and not any(state.requests.values()):
            self._changed = False
            self._books.audit()
        counters = {
            part.id: self._counters[id_].values
            for part in state.parts
            if (id_ := PartId(part.id)) in self._counters and self._counters[id_].incarnation == part.incarnation
        }
        counters["conductor"] = {"integrity_failures": float(self._books.failures)}
        if self._recorder is not None:
            counters["conductor"] |= self._recorder.counters()
        if self._publisher is not None:
            counters["conductor"] |= self._publisher.counters()
        now, more = self._clock(), dict[str, object]()
        if live:
            more["decided"] = self._decided.look(self._stories, self._conductor, now)
            more["prefixes"] = self._conductor.hottest(HOTTEST_PREFIXES, now)
        else:
            more["recent"] = self._stories.latest(RECENT_REQUESTS, now)
        return msgspec.json.encode(msgspec.structs.asdict(state) | {"counters": counters} | more)

    def stories(self, request: str) -> bytes:
        """Of this request, or of those with this x-request-id: JSON, an empty list where none is remembered."""
        return msgspec.json.encode(self._stories.find(request, self._conductor))

    def blocks(self, after: str) -> bytes:
        """The body of GET /cluster/blocks: a page, each block with its name in KV events; or null."""
        try:
            page = self._conductor.blocks(after, BLOCKS_A_PAGE)
        except ValueError:
            return b"null"
        blocks = [self._shown(block) for block in page.blocks]
        return msgspec.json.encode({"blocks": blocks, "next": page.next or None})

    def _shown(self, block: BlockState) -> dict[str, object]:
        key = BlockKey(bytes.fromhex(block.key))
        shown = msgspec.structs.asdict(block) | {"hash": hash_of(key)}
        if self._publisher is not None:
            shown["published"] = self._publisher.is_told(KeySpaceId(block.space), key)
        return shown

    def _apply(self, event: ev.Event, sender: Peer) -> None:
        self._note(event)
        now = self._clock()
        try:
            actions = self._conductor.handle(event, now)
        except Exception:
            log.exception("the decision core failed on %r from %s; the Conductor ends", event, sender.id)
            if self._recorder is not None:
                self._recorder.record(now, event, ())
            raise
        if self._recorder is not None:
            self._recorder.record(now, event, actions)
        self._stories.note(now, event, actions)
        if self._publisher is not None:
            self._publisher.note(event)
        if isinstance(event, ev.Registered | ev.Lost | ev.Woke):
            self._note_fleet()
        self._changed |= not isinstance(event, ev.Reported | ev.Woke)
        for action in actions:
            self._perform(action, sender)

    def _perform(self, action: act.Action, sender: Peer) -> None:
        match action:
            case act.WakeAt(at=at):
                self._wake_at = at
                self._wake_changed.set()
                return
            case act.Place(gateway=to) | act.Reject(gateway=to) | act.Hold(gateway=to) | act.Resubmit(gateway=to):
                self._note_answer(action)
            case act.ReserveRoom(node=node) | act.ReleaseRoom(node=node) | act.SendSnapshot(node=node):
                to = _control(node)
            case act.Replicate(node=node) | act.Demote(node=node) | act.DropReplica(node=node):
                to = _control(node)
            case act.RegisterAgain(to=to) | act.IdTaken(to=to):
                # The core has no address of a part that it does not know; the heartbeat's envelope has.
                to = to if to.address else sender
            case act.FleetChanged(to=to) | act.Cancel(to=to) | act.ExpectEnd(gateway=to) | act.ReplicasOrdered(to=to):
                pass
        log.debug("-> %s %s", to.id, _brief(action))
        self._link.post(to, action)

    # What an operator reads

    def _note(self, event: ev.Event) -> None:
        arrived = event.arrived if isinstance(event, ev.PlacedBefore) else event
        if isinstance(arrived, ev.RequestArrived):
            self._labels[arrived.request] = arrived.label
            self._labels.move_to_end(arrived.request)
            if len(self._labels) > REMEMBERED_LABELS:
                self._labels.popitem(last=False)
        if isinstance(event, ev.Registered):
            self._note_space(event)
        if isinstance(event, ev.Lost):
            log.info("%s reported lost: %s", event.id, event.reason)
        elif log.isEnabledFor(logging.DEBUG) and not isinstance(event, ev.Woke | ev.Reported):
            log.debug("%s %s", _brief(event), self._label(getattr(event, "request", None)))

    def _note_space(self, event: ev.Registered) -> None:
        """Workers of one model that cannot share KVCache are never placed together, which looks like idleness."""
        if event.space is None:
            return
        others = [
            id_ for id_, (model, space) in self._spaces.items() if model == event.model and space != event.space.id
        ]
        if others and self._spaces.get(event.peer.id) != (event.model, event.space.id):
            log.warning(
                "%s cannot share KVCache with %s: its model, dtype, quantization, layout or block size is another one",
                event.peer.id,
                ", ".join(others),
            )
        self._spaces[event.peer.id] = event.model, event.space.id

    def _note_answer(self, action: act.Place | act.Reject | act.Hold | act.Resubmit) -> None:
        label = self._label(action.request)
        match action:
            case act.Reject():
                log.info("%s rejected %s: %s: %s", _brief(action), label, action.reason.value, action.message)
            case act.Resubmit():
                log.info("%s placed again %s: %s", _brief(action), label, action.reason)
            case act.Hold():
                log.debug("%s held %s: %s", _brief(action), label, action.reason)
            case act.Place():
                log.debug(
                    "%s placed %s: prefill %s, decode %s, %d blocks hit, %d fetched, first token in %.3f s",
                    *(_brief(action), label, action.prefill.id, action.decode.id, action.hit_blocks),
                    *(action.fetch.count if action.fetch else 0, action.expected_ttft),
                )

    def _note_fleet(self) -> None:
        now: dict[PartId, str] = {part.id: part.incarnation for part in self._conductor.parts()}
        for id_, incarnation in now.items():
            before = self._there.get(id_)
            if before is None:
                log.info("%s registered (%s)", id_, incarnation)
            elif before != incarnation:
                log.warning("%s registered (%s) in place of another process of this id (%s)", id_, incarnation, before)
        for id_, incarnation in self._there.items():
            if id_ not in now:
                log.info("%s lost", id_)
                self._spaces.pop(id_, None)
            if self._publisher is not None and now.get(id_) != incarnation:
                self._publisher.lost(id_)
        self._there = now

    def _label(self, request: RequestId | None) -> str:
        label = self._labels.get(request, "") if request is not None else ""
        return f"[{label}]" if label else "[-]"


def _control(node: NodePeer) -> Peer:
    return Peer(node.id, node.incarnation, node.address)


def _brief(message: ev.Event | act.Action) -> str:
    """Name, request and attempt: block keys would fill the log."""
    fields = (getattr(message, name, None) for name in ("request", "attempt", "node", "instance", "id"))
    known = (f if isinstance(f, str | int) else getattr(f, "id", "") for f in fields if f is not None)
    return " ".join((type(message).__name__, *map(str, known)))
