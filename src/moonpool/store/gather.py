"""Gets blocks into a node's DRAM, each by itself: from an SSD, from another node, or from whoever writes it now."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Sequence

from moonpool.core.vocabulary import BlockKey, KeySpace, NodePeer
from moonpool.errors import PoolError, TransferError
from moonpool.messenger import asking
from moonpool.messenger.channel import Channel
from moonpool.messenger.questions import YES, GetBlocks, Given, packed, unpacked
from moonpool.messenger.tcp import Priority, TcpMessenger
from moonpool.messenger.transfer import Bytes
from moonpool.store.arena import Arena
from moonpool.store.blocks import Name
from moonpool.store.catalogue import HERE, Place
from moonpool.store.ledger import Ledger
from moonpool.store.loader import Hold, Loader
from moonpool.store.neighbours import Neighbours
from moonpool.store.rooms import ClientId, Room

log = logging.getLogger(__name__)

PART_BYTES = 4 << 20
"""Fetched over one connection; of more every part goes for itself."""
LOOK_SECONDS = 0.25
"""How often it is looked whether the nodes that blocks come from are in the fleet still."""
GONE_SECONDS = 2.0
"""So long after a node has left the fleet nothing is expected of it: sooner, it may only be registering anew."""


class Gatherer:
    """On the node's loop. A block is fetched once, however many ask for it at a time."""

    def __init__(
        self, arena: Arena, ledger: Ledger, loader: Loader, neighbours: Neighbours, messenger: TcpMessenger
    ) -> None:
        self._arena = arena
        self._ledger = ledger
        self._loader = loader
        self._neighbours = neighbours
        self._messenger = messenger
        self._fetching: dict[Name, asyncio.Future[None]] = {}

    async def bring(self, space: KeySpace, keys: Sequence[BlockKey], seconds: float, waits: bool) -> Hold:
        """What can be got within so many seconds, and has room, stays in DRAM until the hold is closed."""
        until = time.monotonic() + seconds
        with contextlib.ExitStack() as holds:
            kept = [key for key, place in self._placed(space, keys) if place in HERE]
            if self._loader.is_needed(space.id, kept):
                holds.enter_context(await self._loader.load(space, kept, seconds))
            if waits:
                await self._watch(space, keys, until)
            holds.callback((await self._fetch(space, keys, until)).close)
            return Hold(holds.pop_all().close)

    async def copy(self, node: NodePeer, space: KeySpace, keys: Sequence[BlockKey], until: float) -> int:
        """Blocks that another node has, behind all that somebody waits for; how many came."""
        came = 0
        if not self._takes(space):
            return came
        for part in _parts(space, keys):
            missing = [
                key
                for key, place in self._placed(space, part)
                if place is Place.NOWHERE and (space.id, key) not in self._fetching
            ]
            if not missing or time.monotonic() >= until:
                continue
            pull = self._pull(node, space, missing, until, Priority.BACKGROUND)
            try:
                await self._arrive([pull], [], until)
            finally:
                pull.let_go()
            came += sum(place in HERE for _, place in self._placed(space, missing))
        return came

    def _takes(self, space: KeySpace) -> bool:
        """Looked at before a peer is asked: what it sent could not be kept."""
        try:
            self._ledger.check_takes(space)
        except PoolError as e:
            log.warning("no blocks of key space %s are fetched: %s", space.id, e)
            return False
        return True

    def _placed(self, space: KeySpace, keys: Sequence[BlockKey]) -> list[tuple[BlockKey, Place]]:
        return list(zip(keys, self._ledger.catalogue.places(space.id, keys), strict=True))

    async def _watch(self, space: KeySpace, keys: Sequence[BlockKey], until: float) -> None:
        filling = [(space.id, key) for key, place in self._placed(space, keys) if place is Place.FILLING]
        if filling:
            watch = self._ledger.watches.watch(filling)
            try:
                await asyncio.wait([asyncio.wrap_future(watch)], timeout=max(0.0, until - time.monotonic()))
            finally:
                self._ledger.watches.end(watch)

    async def _fetch(self, space: KeySpace, keys: Sequence[BlockKey], until: float) -> Hold:
        """From one node after another that has them, where one turns out not to, or fails."""
        known: dict[BlockKey, list[NodePeer]] = {}
        """Of each block that somebody may have: who, the one to be asked first in front."""
        with contextlib.ExitStack() as holds:
            missing = [key for key, place in self._placed(space, keys) if place not in HERE]
            if missing and not self._takes(space):
                return Hold()
            while missing and not self._neighbours.is_alone and time.monotonic() < until:
                others = [future for key in missing if (future := self._fetching.get((space.id, key))) is not None]
                new = [key for key in missing if key not in known and (space.id, key) not in self._fetching]
                if new:
                    holders = await self._neighbours.holders(space.id, new, until - time.monotonic())
                    known |= {key: _in_turn(key, nodes) for key, nodes in zip(new, holders, strict=True)}
                by_node: dict[NodePeer, list[BlockKey]] = {}
                for key in missing:
                    if known.get(key) and (space.id, key) not in self._fetching:
                        by_node.setdefault(known[key].pop(0), []).append(key)
                pulls = [
                    self._pull(node, space, part, until)
                    for node, found in by_node.items()
                    for part in _parts(space, found)
                ]
                for pull in pulls:
                    holds.callback(pull.let_go)
                if not (others or pulls):
                    break
                await self._arrive(pulls, others, until)
                full = {key for pull in pulls for key in pull.without_room}
                missing = [key for key, place in self._placed(space, missing) if place not in HERE and key not in full]
            return Hold(holds.pop_all().close)

    async def _arrive(self, pulls: Sequence[_Pull], others: Sequence[asyncio.Future[None]], until: float) -> None:
        """Until all of it is over; who has left the fleet is not waited for."""
        waiting = {*others, *(pull.finished for pull in pulls)}
        gone_since: dict[NodePeer, float] = {}
        while waiting and (now := time.monotonic()) < until:
            _, waiting = await asyncio.wait(waiting, timeout=min(LOOK_SECONDS, until - now))
            for node in {pull.node: None for pull in pulls}:
                if self._neighbours.is_there(node):
                    gone_since.pop(node, None)
                elif now - gone_since.setdefault(node, now) >= GONE_SECONDS:
                    self._give_up(node, [pull for pull in pulls if pull.node == node and not pull.finished.done()])

    def _give_up(self, node: NodePeer, pulls: Sequence[_Pull]) -> None:
        if pulls:
            log.warning("%s left the fleet while %d blocks came from it", node.id, sum(len(p.keys) for p in pulls))
        for pull in pulls:
            self._forget(pull)

    def _forget(self, pull: _Pull) -> None:
        """Nobody waits for it any more, and its blocks may be fetched from elsewhere."""
        for key in pull.keys:
            if self._fetching.get((pull.space.id, key)) is pull.finished:
                del self._fetching[pull.space.id, key]
        if not pull.finished.done():
            pull.finished.set_result(None)

    def _pull(
        self,
        node: NodePeer,
        space: KeySpace,
        keys: Sequence[BlockKey],
        until: float,
        priority: Priority = Priority.URGENT,
    ) -> _Pull:
        pull = _Pull(self._arena, self._ledger, node, space, keys, until)
        nbytes = len(keys) * space.block_bytes
        transfer = self._messenger.carry(node.data_address, pull, until - time.monotonic(), nbytes, priority)
        finished = asyncio.wrap_future(transfer)
        for key in keys:
            self._fetching[space.id, key] = pull.finished

        def over(done: asyncio.Future[None]) -> None:
            error = None if done.cancelled() else done.exception()
            if isinstance(error, TransferError | PoolError):
                log.warning("fetch of %d blocks from %s failed: %s", len(keys), node.id, error)
            elif error is not None:
                log.error("fetch of %d blocks from %s failed", len(keys), node.id, exc_info=error)
            self._forget(pull)
            pull.end()

        finished.add_done_callback(over)
        return pull


class _Pull:
    """Blocks that come from one node. Its rooms are closed when nothing is written any more and its holder let go."""

    def __init__(
        self,
        arena: Arena,
        ledger: Ledger,
        node: NodePeer,
        space: KeySpace,
        keys: Sequence[BlockKey],
        until: float,
    ) -> None:
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Nothing more is to be expected."""
        self.node = node
        self.space = space
        self.keys = keys
        self.without_room: Sequence[BlockKey] = ()
        """Those that could have come."""
        self._arena = arena
        self._ledger = ledger
        self._until = until
        self._owner: ClientId = ledger.own_client()
        self._copy = ledger.copies.begin(space.id, keys)
        self._rooms: list[Room] = []
        self._lock = threading.Lock()
        self._claims = 2
        """The holder and the transfer."""

    def __call__(self, channel: Channel) -> None:
        """On a thread of Messenger; again, on a new connection, where one broke."""
        places = self._ledger.catalogue.places(self.space.id, self.keys)
        keys = [key for key, place in zip(self.keys, places, strict=True) if place is not Place.DRAM]
        time_left = max(0.0, self._until - time.monotonic())
        request = GetBlocks(self.space, packed(keys), 0, self.space.runs, time_left, here=True)
        asking.get(channel, request, lambda given: self._open(request, given), self._landed, self._until)

    def end(self) -> None:
        """The transfer's end."""
        self._ledger.copies.end(self._copy)
        self.let_go()

    def let_go(self) -> None:
        with self._lock:
            self._claims -= 1
            is_over = not self._claims
        if is_over:
            for room in self._rooms:
                self._ledger.rooms.close(self._owner, room.id)

    def _open(self, request: GetBlocks, given: Given) -> list[list[Bytes] | None]:
        keys = [key for key, mark in zip(unpacked(request.keys), given.marks, strict=True) if mark == YES]
        room = self._ledger.rooms.open(self._owner, self.space, keys, metas=given.metas, gone=self._copy.gone)
        self._rooms.append(room)
        self.without_room = [key for key, block in zip(keys, room.blocks, strict=True) if block is None]
        return [
            None if block is None or block.resident else [self._arena.slice(block.offset, block.nbytes)]
            for block in room.blocks
        ]

    def _landed(self, position: int, checksums: Sequence[int]) -> None:
        self._ledger.rooms.complete(self._owner, self._rooms[-1].id, [(position, 0, self.space.runs)], checksums)


def _in_turn(key: BlockKey, nodes: Sequence[NodePeer]) -> list[NodePeer]:
    """Beginning at one that depends on the key: not all that a node asks for comes from the same other one."""
    first = key[0] % max(1, len(nodes))
    return [*nodes[first:], *nodes[:first]]


def _parts(space: KeySpace, keys: Sequence[BlockKey]) -> list[Sequence[BlockKey]]:
    size = max(1, PART_BYTES // space.block_bytes)
    return [keys[start : start + size] for start in range(0, len(keys), size)]
