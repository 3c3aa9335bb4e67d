"""Follows the Conductor's directory and tells subscribers what is in the pool.

It is told which blocks something has happened to, and looks where they are: the directory alone says what is so, and
nothing is counted here that could differ from it. What a block is of it asks one of the nodes that have it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from moonpool.core import events as ev
from moonpool.core.vocabulary import BlockKey, BlockMeta, KeySpaceId, NodePeer, PartId
from moonpool.errors import TransferError
from moonpool.live.kv_events.schema import Change, batches
from moonpool.live.kv_events.stream import EventStream, Made, StreamConfig
from moonpool.live.kv_events.table import IN_DRAM, IN_SSD, Space
from moonpool.messenger.asking import ask
from moonpool.messenger.channel import Channel
from moonpool.messenger.questions import DescribeBlocks, Described, packed
from moonpool.messenger.tcp import TcpMessenger
from moonpool.messenger.waiting import RefusedError

log = logging.getLogger(__name__)

KEYS_A_STEP = 128
"""Looked at before others have their turn."""
KEYS_A_QUESTION = 64
KEYS_A_SNAPSHOT_BATCH = 256
ASK_SECONDS = 2.0
RETRY_SECONDS = (0.5, 4.0, 30.0)
"""After which a block whose tokens nobody knew is asked for again: whoever reads it may tell the node later."""
SNAPSHOT_SECONDS = 10.0
"""The most that a node's snapshot is waited for to be whole."""

Held = Callable[[KeySpaceId, Sequence[BlockKey]], Sequence[tuple[Sequence[NodePeer], Sequence[NodePeer]]]]
"""Of each block the nodes that give it to others, in DRAM and on SSD: `Conductor.held`."""
_Wanted = tuple[KeySpaceId, BlockKey, int]
"""A block, and how often it was asked for in vain."""


class KvPublisher:
    """Everything runs on one event loop; `run` does the work, `close` ends it."""

    def __init__(self, config: StreamConfig, held: Held, token: str | None) -> None:
        """`token`: the cluster's. Raises ConfigError where a port is taken."""
        self._held = held
        self._spaces: dict[KeySpaceId, Space] = {}
        self._touched: dict[KeySpaceId, dict[BlockKey, None]] = {}
        self._lists: deque[tuple[KeySpaceId, list[BlockKey]]] = deque()
        """To be looked at now, the first one from `_at` on."""
        self._at = 0
        self._sweeps = False
        """All that is told of has to be looked at: some node has lost what it had."""
        self._announced: set[PartId] = set()
        self._unfinished: set[PartId] = set()
        """Nodes whose snapshots have more parts to come: a block may come before the one it continues."""
        self._to_ask: dict[NodePeer, deque[_Wanted]] = {}
        self._asking: dict[NodePeer, asyncio.Task[None]] = {}
        self._news = asyncio.Event()
        self._unknown = self._failed = 0
        """Blocks of which nobody knew the tokens when asked; questions that nobody answered."""
        self._closed = self._has_failed = False
        self._messenger = TcpMessenger(token, 1)
        try:
            self.stream = EventStream(config, self._snapshot)
        except BaseException:
            self._messenger.close()
            raise

    # ---- what the Conductor's driver says

    def note(self, event: ev.Event) -> None:
        """The directory has heard this."""
        if self._closed:
            return
        match event:
            case ev.BlocksStored(node=node, space=space, keys=keys, more=more):
                self._touch(space, keys)
                self._heard(node, is_whole=not more)
            case ev.BlocksRemoved(node=node, space=space, keys=keys):
                self._touch(space, keys)
                self._heard(node, is_whole=node not in self._unfinished)
            case ev.Snapshot(node=node, blocks=blocks, more=more):
                self._sweeps |= node in self._announced
                for space, _, keys in blocks:
                    self._touch(space, keys)
                self._heard(node, is_whole=not more)
            case _:
                pass

    def lost(self, part: PartId) -> None:
        """A part is gone, or another process has its place."""
        if part in self._announced:
            self._announced.discard(part)
            self._sweeps = True
            self._go_on_without(part)

    def is_told(self, space: KeySpaceId, key: BlockKey) -> bool:
        """Subscribers know where it is in the pool."""
        return space in self._spaces and self._spaces[space].is_told(key)

    def counters(self) -> dict[str, float]:
        """Blocks are counted once a tier, as `/cluster` counts them."""
        return self.stream.counters() | {
            "kv_events_blocks": float(sum(space.told_tiers for space in self._spaces.values())),
            "kv_events_blocks_without_tokens": float(self._unknown),
            "kv_events_questions_failed": float(self._failed),
            "kv_events_stopped": float(self._has_failed),
        }

    # ---- its work

    async def run(self) -> None:
        """Until cancelled. A mistake in here ends the stream and nothing else."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.stream.run())
                tasks.create_task(self._work(tasks))
        except Exception:
            log.exception("KV events are published no more; start this process again for them")
            self._has_failed = True
        finally:
            self.close()

    def close(self) -> None:
        self._closed = True
        self.stream.close()
        self._messenger.close()

    def _touch(self, space: KeySpaceId, keys: Sequence[BlockKey]) -> None:
        self._touched.setdefault(space, {}).update(dict.fromkeys(keys))

    def _heard(self, node: PartId, is_whole: bool) -> None:
        self._announced.add(node)
        if is_whole:
            self._go_on_without(node)
        elif node not in self._unfinished:
            self._unfinished.add(node)
            asyncio.get_running_loop().call_later(SNAPSHOT_SECONDS, self._go_on_without, node)

    def _go_on_without(self, node: PartId) -> None:
        """Nobody waits for more parts of its snapshot."""
        self._unfinished.discard(node)
        if not self._unfinished:
            self._news.set()

    async def _work(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            while not self._unfinished and (some := self._some()) is not None:
                self._look(some[0], dict.fromkeys(some[1], 0))
                await asyncio.sleep(0)
            # All blocks that have come are known of: none is told of before the one it continues.
            for node in self._to_ask:
                if node not in self._asking:
                    self._asking[node] = tasks.create_task(self._ask_all(node))

    def _some(self) -> tuple[KeySpaceId, list[BlockKey]] | None:
        """The next blocks to be looked at."""
        if not self._lists:
            self._lists.extend((id_, list(keys)) for id_, keys in self._touched.items())
            self._touched.clear()
        if not self._lists and self._sweeps:
            self._sweeps = False
            self._lists.extend((id_, space.keys()) for id_, space in self._spaces.items())
        if not self._lists:
            return None
        id_, keys = self._lists[0]
        some = keys[self._at : self._at + KEYS_A_STEP]
        self._at += KEYS_A_STEP
        if self._at >= len(keys):
            self._lists.popleft()
            self._at = 0
        return id_, some

    def _look(self, id_: KeySpaceId, keys: dict[BlockKey, int]) -> None:
        """Where are they now? `keys`: how often each was asked for in vain."""
        space = self._spaces.get(id_)
        if space is None:
            space = self._spaces[id_] = Space(id_)
        changes: list[Change] = []
        for (key, tries), (dram, ssd) in zip(keys.items(), self._held(id_, list(keys)), strict=True):
            there = (IN_DRAM if dram else 0) | (IN_SSD if ssd else 0)
            if space.look(key, there, changes):
                self._to_ask.setdefault((dram or ssd)[0], deque()).append((id_, key, tries))
        self._publish(id_, changes)
        if not space:
            del self._spaces[id_]

    def _publish(self, id_: KeySpaceId, changes: Sequence[Change]) -> None:
        for events in batches(changes):
            self.stream.publish(_topic(id_), events)

    # ---- what blocks are of

    async def _ask_all(self, node: NodePeer) -> None:
        wanted = self._to_ask[node]
        try:
            while wanted:
                id_ = wanted[0][0]
                asked: list[_Wanted] = []
                while wanted and wanted[0][0] == id_ and len(asked) < KEYS_A_QUESTION:
                    asked.append(wanted.popleft())
                metas = await self._ask(node, id_, [key for _, key, _ in asked])
                if metas is None:
                    # Others may have them, or it may be there again later.
                    asked += wanted
                    wanted.clear()
                    metas = [None] * len(asked)
                self._learn(asked, metas)
        finally:
            del self._to_ask[node], self._asking[node]

    async def _ask(
        self, node: NodePeer, space: KeySpaceId, keys: Sequence[BlockKey]
    ) -> Sequence[BlockMeta | None] | None:
        """None: it does not answer."""
        question = _Question(DescribeBlocks(space, packed(keys)), len(keys), time.monotonic() + ASK_SECONDS)
        try:
            return await asyncio.wrap_future(self._messenger.carry(node.data_address, question, ASK_SECONDS))
        except (TransferError, RefusedError) as e:
            log.info("%s does not say what its blocks are of: %s", node.id, e)
            self._failed += 1
            return None

    def _learn(self, asked: Sequence[_Wanted], metas: Sequence[BlockMeta | None]) -> None:
        changes: dict[KeySpaceId, list[Change]] = {}
        again: dict[tuple[KeySpaceId, int], dict[BlockKey, int]] = {}
        for (id_, key, tries), meta in zip(asked, metas, strict=True):
            space = self._spaces.get(id_)
            if space is not None and not space.learn(key, meta, changes.setdefault(id_, [])):
                self._unknown += 1
                if tries < len(RETRY_SECONDS):
                    again.setdefault((id_, tries), {})[key] = tries + 1
        for id_, own in changes.items():
            self._publish(id_, own)
        for (id_, tries), keys in again.items():
            asyncio.get_running_loop().call_later(RETRY_SECONDS[tries], self._again, id_, keys)

    def _again(self, id_: KeySpaceId, keys: dict[BlockKey, int]) -> None:
        if not self._closed:
            self._look(id_, keys)
            self._news.set()

    # ---- for those who come late

    def _snapshot(self) -> tuple[int, Iterator[Made]]:
        lists = [(id_, space.keys()) for id_, space in self._spaces.items()]
        parts = [
            (id_, keys[start : start + KEYS_A_SNAPSHOT_BATCH])
            for id_, keys in lists
            for start in range(0, len(keys), KEYS_A_SNAPSHOT_BATCH)
        ]
        return len(parts), self._made(parts)

    def _made(self, parts: Sequence[tuple[KeySpaceId, list[BlockKey]]]) -> Iterator[Made]:
        done: dict[KeySpaceId, set[BlockKey]] = {}
        for id_, keys in parts:
            space = self._spaces.get(id_)
            changes = [] if space is None else list(space.stored(keys, done.setdefault(id_, set())))
            yield _topic(id_), [event for events in batches(changes) for event in events]


def _topic(space: KeySpaceId) -> bytes:
    return f"kv@moonpool@{space}".encode()


class _Question:
    """To one node; it may be asked twice."""

    def __init__(self, question: DescribeBlocks, count: int, until: float) -> None:
        self._question = question
        self._count = count
        self._until = until

    def __call__(self, channel: Channel) -> Sequence[BlockMeta | None]:
        reply = ask(channel, self._question, self._until)
        if not isinstance(reply, Described) or len(reply.metas) != self._count:
            raise TransferError(f"{type(reply).__name__} came as the answer to DescribeBlocks")
        return reply.metas
