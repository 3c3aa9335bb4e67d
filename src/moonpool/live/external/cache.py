"""What a server's own prefix cache holds, as a private node at the Conductor.

Where its KV events are followed (`follower.py`), it tells block by block. Else what was sent there is taken to be
there, as long as it had no reason to give it up: both sides evict what was used longest ago first, and a prompt's end
before its beginning.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence

from moonpool.core.actions import ReserveRoom, SendSnapshot
from moonpool.core.blocks import key_space_id
from moonpool.core.events import BlocksRemoved, BlocksStored, Registered, Reported, RoomConfirmed, Snapshot
from moonpool.core.vocabulary import BlockKey, Capacity, KeySpace, PartId, PartKind
from moonpool.errors import PeerUnavailableError
from moonpool.live.external.events import Known
from moonpool.store.announcements import Announcements
from moonpool.store.blocks import Change
from moonpool.wire.link import Link
from moonpool.wire.membership import Membership
from moonpool.wire.messages import Envelope

log = logging.getLogger(__name__)

CACHE = ".cache"
"""After the instance's id."""


POOL = "vllm-pool"


def space_of(model: str, block_tokens: int, kv_bytes_per_token: int = 1) -> KeySpace:
    """Of blocks that only servers move: how many bytes they have counts for predictions only."""
    id_ = key_space_id(
        model_fingerprint=f"external {model}",
        dtype="opaque",
        block_tokens=block_tokens,
        layers=1,
        kv_heads=1,
        head_dim=1,
    )
    return KeySpace(id_, block_tokens, 1, block_tokens * kv_bytes_per_token)


class PrefixCache:
    """Blocks by key, the least recently used first."""

    def __init__(self, capacity: int) -> None:
        """`capacity`: blocks; 0 where the server keeps none."""
        self._capacity = capacity
        self._blocks: OrderedDict[BlockKey, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[BlockKey]:
        return iter(self._blocks)

    def match(self, keys: Sequence[BlockKey]) -> int:
        """How many of the leading ones it has."""
        return next((at for at, key in enumerate(keys) if key not in self._blocks), len(keys))

    def put(self, keys: Iterable[BlockKey]) -> None:
        """As the server said: what has to go for them it says as well."""
        self._blocks.update(dict.fromkeys(keys))

    def remove(self, keys: Iterable[BlockKey]) -> None:
        for key in keys:
            self._blocks.pop(key, None)

    def use(self, keys: Sequence[BlockKey]) -> tuple[list[BlockKey], list[BlockKey]]:
        """A prompt's blocks, the first one first, are read or written now. Those that came, and those that went."""
        keys = keys[: self._capacity]
        came = [key for key in keys if key not in self._blocks]
        for key in reversed(keys):
            self._blocks[key] = None
            self._blocks.move_to_end(key)
        went = [self._blocks.popitem(last=False)[0] for _ in range(len(self._blocks) - self._capacity)]
        return came, went


class CachePart:
    """The node `<instance>.cache`: it announces blocks, and has no bytes."""

    def __init__(
        self,
        link: Link,
        conductor: str,
        space: KeySpace,
        blocks: int,
        caches: bool,
        counters: Callable[[], dict[str, float]] | None = None,
        *,
        is_pool: bool = False,
    ) -> None:
        """`blocks`: of KV that the server has. `counters`: of whoever tells what came and went; None: nobody does.

        `is_pool`: it is not a server's, but what several store and load by themselves: a fetch from it is that.
        """
        self._link = link
        self._space = space
        self._cache = PrefixCache(blocks if caches else 0)
        self._told = counters
        self._is_pool = is_pool
        # Nobody else is to send copies to the pool by way of this.
        self._bytes = 0 if is_pool else blocks * space.block_bytes
        self._pending = asyncio.Event()
        self._announced = 0
        self._announcements = Announcements(link.me.id, link.me.incarnation, self._pending.set)
        self._membership = Membership(link, conductor, self._describe, self._report, self._counters)
        self._membership.on_joined = self._announcements.ask_snapshot

    @property
    def id(self) -> PartId:
        return self._link.me.id

    async def run(self) -> None:
        """Until cancelled. Raises ConfigError where no Conductor answers."""
        ears = asyncio.create_task(self._listen())
        others: list[asyncio.Task[None]] = []
        try:
            await self._membership.join()
            others = [asyncio.create_task(self._membership.run()), asyncio.create_task(self._announce())]
            done, _ = await asyncio.wait((ears, *others), return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in (ears, *others):
                task.cancel()
            await asyncio.wait((ears, *others))

    def close(self) -> None:
        """After `run`."""
        self._link.close()

    def match(self, keys: Sequence[BlockKey]) -> int:
        return self._cache.match(keys)

    def use(self, keys: Sequence[BlockKey]) -> None:
        """These blocks of one prompt are in the server's cache now, if nobody tells better."""
        if self._told is None:
            came, went = self._cache.use(keys)
            self._note(came, went)

    def told(self, known: Known) -> None:
        """By the server."""
        self._cache.remove(known.went)
        self._cache.put(known.came)
        self._note(known.came, known.went)

    def _note(self, came: Iterable[BlockKey], went: Iterable[BlockKey]) -> None:
        changes = [Change(False, (self._space.id, key)) for key in went]
        changes += [Change(True, (self._space.id, key)) for key in came]
        self._announcements.note(changes)

    async def _listen(self) -> None:
        while True:
            envelope = await self._link.receive()
            if not self._membership.heard(envelope):
                self._hear(envelope)

    def _hear(self, envelope: Envelope) -> None:
        match envelope.body:
            case SendSnapshot():
                self._announcements.ask_snapshot()
            case ReserveRoom(request=request, attempt=attempt):
                # The server finds room by itself when the request comes.
                me = self._link.me
                self._link.post(self._membership.conductor, RoomConfirmed(me.id, me.incarnation, request, attempt, ()))
            case _:
                pass  # rooms are released, and copies are not for it

    async def _announce(self) -> None:
        while True:
            await self._pending.wait()
            self._pending.clear()
            while (message := self._next()) is not None:
                try:
                    await self._link.send(self._membership.conductor, message)
                except PeerUnavailableError as e:
                    log.info("%s not announced, a snapshot follows: %s", type(message).__name__, e)
                    self._announcements.ask_snapshot()
                else:
                    self._announced = message.seq

    def _next(self) -> BlocksStored | BlocksRemoved | Snapshot | None:
        return self._announcements.next((self._space.id, key) for key in self._cache)

    def _describe(self) -> Registered:
        return Registered(PartKind.NODE, self._link.me, Capacity(dram_bytes=self._bytes), private=not self._is_pool)

    def _report(self) -> Reported:
        me = self._link.me
        used = 0 if self._is_pool else len(self._cache) * self._space.block_bytes
        return Reported(me.id, me.incarnation, used_bytes=used, announced=self._announced)

    def _counters(self) -> dict[str, float]:
        own = {"blocks_known": float(len(self._cache)), "follows_kv_events": float(self._told is not None)}
        return own if self._told is None else own | self._told()
