"""A node pulls blocks from another node into its arena."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future

from moonpool.core.vocabulary import BlockKey, KeySpace, KeySpaceId, NodePeer
from moonpool.errors import TransferError
from moonpool.messenger.asking import ask
from moonpool.messenger.channel import Channel
from moonpool.messenger.questions import KEYS_A_QUESTION, YES, Exists, Marks, packed
from moonpool.messenger.receiving import ReadGroup
from moonpool.messenger.tcp import TcpMessenger
from moonpool.store.arena import Arena
from moonpool.store.ledger import Ledger
from moonpool.store.loader import Loader

log = logging.getLogger(__name__)


class Fetcher:
    def __init__(self, arena: Arena, ledger: Ledger, loader: Loader, messenger: TcpMessenger, own_address: str) -> None:
        """`own_address`: this node's data address; from itself there is nothing to fetch."""
        self._arena = arena
        self._ledger = ledger
        self._loader = loader
        self._messenger = messenger
        self._own_address = own_address

    async def fetch(self, source: NodePeer, space: KeySpace, keys: Sequence[BlockKey], time_left: float) -> int:
        """How many leading keys are readable here after the attempt. Raises PoolError for impossible keys or space."""
        with await self._loader.load(space, keys, time_left):
            return await self._fetch(source, space, keys, time_left)

    async def _fetch(self, source: NodePeer, space: KeySpace, keys: Sequence[BlockKey], time_left: float) -> int:
        readable = self._ledger.leading(space, keys)
        if readable == len(keys) or source.data_address == self._own_address:
            return readable
        self._ledger.check_takes(space)
        until = time.monotonic() + time_left
        there = There(space.id, keys, until)
        try:
            # Room is made only for what comes: that may cost other blocks.
            count = await asyncio.wrap_future(self._messenger.carry(source.data_address, there, time_left))
            if count > readable:
                await asyncio.wrap_future(self._pull(source, space, keys[:count], until - time.monotonic()))
        except TransferError as e:
            log.warning("fetch of %d blocks from %s failed: %s", len(keys) - readable, source.id, e)
        return self._ledger.leading(space, keys)

    def _pull(self, source: NodePeer, space: KeySpace, keys: Sequence[BlockKey], time_left: float) -> Future[int]:
        # The room has an owner of its own: whoever asked for the fetch may die while Messenger writes into the room.
        owner = self._ledger.own_client()
        copy = self._ledger.copies.begin(space.id, keys)
        try:
            room = self._ledger.rooms.open(owner, space, keys, gone=copy.gone)
        except BaseException:
            self._ledger.copies.end(copy)
            raise
        wanted: list[int] = []
        for index in room.lacking:
            if room.blocks[index] is None:
                break
            wanted.append(index)
        blocks = [block for index in wanted if (block := room.blocks[index]) is not None]

        def on_block(position: int, checksums: Sequence[int]) -> None:
            self._ledger.rooms.complete(owner, room.id, [(wanted[position], 0, space.runs)], checksums)

        def end() -> None:
            self._ledger.copies.end(copy)
            self._ledger.rooms.close(owner, room.id)

        try:
            pulled = self._messenger.read(
                source.data_address,
                space.id,
                [keys[index] for index in wanted],
                [self._arena.slice(block.offset, block.nbytes) for block in blocks],
                time_left,
                on_block,
                group=ReadGroup(space.runs),
            )
        except BaseException:
            end()
            raise
        # Only the future's end means that nothing is written any more, whether or not somebody still waits for it.
        pulled.add_done_callback(lambda _: end())
        return pulled


class There:
    """How many leading blocks another node has. It may be asked twice."""

    def __init__(self, space: KeySpaceId, keys: Sequence[BlockKey], until: float) -> None:
        self._space = space
        self._keys = keys
        self._until = until

    def __call__(self, channel: Channel) -> int:
        leading = 0
        for start in range(0, len(self._keys), KEYS_A_QUESTION):
            part = self._keys[start : start + KEYS_A_QUESTION]
            reply = ask(channel, Exists(self._space, packed(part), here=True), self._until)
            if not isinstance(reply, Marks) or len(reply.marks) != len(part):
                raise TransferError(f"{type(reply).__name__} came as the answer to Exists")
            found = next((count for count, mark in enumerate(reply.marks) if mark != YES), len(part))
            leading += found
            if found < len(part):
                break
        return leading
