"""Where the KV of one prompt goes while it is computed (PAPER §3, layer-wise prefill).

Decode on the same node: straight into the room that the request holds there, where decode will read it; once complete
the blocks are ordinary cached blocks. Decode on another node: over Messenger into the room there, and into this node's
pool as far as it has space.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Sequence

from moonpool.core.vocabulary import BlockKey, NodePeer
from moonpool.engine.engine import Bytes, Engine
from moonpool.errors import MoonpoolError
from moonpool.live.worker import in_thread
from moonpool.messenger.tcp import TcpMessenger
from moonpool.messenger.transfer import TAIL, RoomWrite, checksum
from moonpool.store.client import NodeClient
from moonpool.store.pending import awaited
from moonpool.store.views import Room, RoomContents
from moonpool.wire.messages import Work


def copy_in(engine: Engine, views: Sequence[Bytes], pages: Sequence[int]) -> None:
    """Whole blocks of the arena into the engine's pages; blocking, for a thread."""
    run_bytes = engine.space.run_bytes
    for view, page in zip(views, pages, strict=False):
        for layer in range(engine.space.runs):
            engine.run(layer, page)[:] = view[layer * run_bytes : (layer + 1) * run_bytes]


def copy_in_room(engine: Engine, contents: RoomContents, tokens: int, pages: Sequence[int]) -> None:
    """The KV of `tokens` tokens into the engine's pages: whole blocks, then the tail's valid tokens; blocking."""
    blocks, tail = contents.blocks, contents.tail
    copy_in(engine, blocks, pages)
    for page in pages[len(blocks) :]:
        engine.clear(page)
    if tail is None:
        return
    rest = tokens - len(blocks) * engine.space.block_tokens
    run_bytes = engine.space.tail_run_bytes(rest)
    for layer in range(engine.space.runs):
        keys, values = engine.tail_runs(layer, pages[len(blocks)], rest)
        start = layer * run_bytes
        keys[:] = tail[start : start + keys.nbytes]
        values[:] = tail[start + keys.nbytes : start + run_bytes]


async def keep(engine: Engine, node: NodeClient, keys: Sequence[BlockKey], pages: Sequence[int]) -> int:
    """Put the blocks of these keys, which lie in the first pages, into the node's pool as far as it has room.

    Returns how many were new. Raises PoolError when the node refuses or is gone.
    """
    space = engine.space
    room = await awaited(node.open_room(space, keys))

    def copy_out() -> int:
        kept = 0
        for index in range(len(keys)):
            if room.view(index) is None:
                continue
            kept += 1
            checksums = []
            for layer in range(space.runs):
                run = engine.run(layer, pages[index])
                if (view := room.run(index, layer)) is not None:
                    view[:] = run
                checksums.append(checksum(run))
            node.complete(room, [(index, 0, space.runs)], checksums)
        return kept

    try:
        return await in_thread(copy_out)
    finally:
        node.close_room(room)


class Sink:
    """`store_*` run on the store thread, everything else on the event loop."""

    def __init__(self, engine: Engine, node: NodeClient, here: NodePeer, messenger: TcpMessenger, work: Work) -> None:
        self._engine = engine
        self._node = node
        self._messenger = messenger
        self._work = work
        self._remote = "" if work.place.decode_node.id == here.id else work.place.decode_node.data_address
        self._lacking = frozenset(work.place.lacking)
        self._room: Room | None = None
        self._stores: list[concurrent.futures.Future[None]] = []
        self._writes: list[concurrent.futures.Future[None]] = []
        self._stored: set[tuple[int, int]] = set()
        """(index, layer): what is computed again is not stored again, its checksum might be another."""
        self.bytes_stored = 0

    async def open(self, hit_blocks: int) -> None:
        """Raises PoolError if the room that decode waits for is gone. Space for caching is best effort."""
        work = self._work
        if not self._remote:
            self._room = await awaited(self._node.join_room(work.request, work.attempt))
        elif len(work.keys) > hit_blocks:
            self._room = await awaited(self._node.open_room(work.place.space, work.keys))

    def after(self, store: concurrent.futures.Future[None]) -> None:
        """`drain` waits for this job of the store thread."""
        self._stores.append(store)

    def store_blocks(
        self, layer: int, blocks: Sequence[tuple[int, int]], time_left: float, are_hits: bool = False
    ) -> None:
        """Layer `layer` of these (block index, page) is final: copy and send it.

        `are_hits`: this node's pool has them, or is just getting them.
        """
        room = None if are_hits and self._remote else self._room
        writes: list[RoomWrite] = []
        complete: list[tuple[int, int, int]] = []
        checksums: list[int] = []
        for index, page in blocks:
            if (index, layer) in self._stored:
                continue
            self._stored.add((index, layer))
            view = room.run(index, layer) if room is not None else None
            is_sent = bool(self._remote) and index in self._lacking
            if view is None and not is_sent:
                continue
            run = self._engine.run(layer, page)
            digest = checksum(run)
            if view is not None:
                view[:] = run
                self.bytes_stored += run.nbytes
                complete.append((index, layer, 1))
                checksums.append(digest)
            if is_sent:
                writes.append(self._write(index, layer, [run], digest))
        self._finish(complete, checksums, writes, time_left)

    def store_tail(self, layer: int, page: int, tokens: int, time_left: float) -> None:
        """Layer `layer` of the partial last block: only its valid tokens travel."""
        if (TAIL, layer) in self._stored:
            return
        self._stored.add((TAIL, layer))
        keys, values = self._engine.tail_runs(layer, page, tokens)
        digest = checksum(keys, values)
        if self._remote:
            self._finish([], [], [self._write(TAIL, layer, [keys, values], digest)], time_left)
        elif self._room is not None and (run := self._room.run(TAIL, layer)) is not None:
            run[: keys.nbytes] = keys
            run[keys.nbytes :] = values
            self._finish([(TAIL, layer, 1)], [digest], [], time_left)

    def _write(self, index: int, layer: int, buffers: list[Bytes], digest: int) -> RoomWrite:
        work = self._work
        return RoomWrite(work.request, work.attempt, index, layer, 1, buffers, [digest])

    def _finish(
        self,
        complete: list[tuple[int, int, int]],
        checksums: list[int],
        writes: list[RoomWrite],
        time_left: float,
    ) -> None:
        if complete and self._room is not None:
            self._node.complete(self._room, complete, checksums)
        if writes:
            self._writes.append(self._messenger.write(self._remote, writes, time_left))

    async def settle(self) -> str | None:
        """Wait until no I/O touches the engine's pages. Returns why the KV did not arrive, or None."""
        problem: str | None = None
        for futures in (self._stores, self._writes):
            for future in list(futures):
                try:
                    await asyncio.wrap_future(future)
                except MoonpoolError as e:
                    problem = problem or str(e)
        return problem

    async def drain(self) -> str | None:
        """`settle`, and no more comes."""
        problem = await self.settle()
        if self._room is not None:
            self._node.close_room(self._room)
        return problem
