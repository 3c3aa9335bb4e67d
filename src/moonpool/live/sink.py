"""Where the KV of one prompt goes while it is computed (PAPER §3, layer-wise prefill).

Decode on the same node: straight into the room that the request holds there, where decode will read it; once complete
the blocks are ordinary cached blocks. Decode on another node: over Messenger into the room there, and into this node's
pool as far as it has space.

The stages of a pipeline do so for their own layers: blocks are complete when all have. The leader opens the room for
caching on its node, which the others join, or write into over Messenger from another node.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Sequence

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
        for layer in engine.layers:
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


async def keep(
    engine: Engine, node: NodeClient, keys: Sequence[BlockKey], tokens: Sequence[int], pages: Sequence[int]
) -> int:
    """Put the blocks of these keys, which lie in the first pages, into the node's pool as far as it has room.

    `tokens`: of the prompt, from its first one on. Returns how many were new. Raises PoolError when the node refuses
    or is gone.
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
        node.tell_tokens(room, tokens)
        return await in_thread(copy_out)
    finally:
        node.close_room(room)


class Sink:
    """`store_*` run on the store thread, everything else on the event loop."""

    def __init__(
        self,
        engine: Engine,
        node: NodeClient,
        here: NodePeer,
        messenger: TcpMessenger,
        work: Work,
        is_shared: bool = False,
        home: NodePeer | None = None,
        caching: Sequence[int] = (),
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        """`is_shared`: the rest of a pipeline group fills the same blocks. `home`: this is its further stage, and of
        the node there; `caching`: of the leader's sink. `is_wanted`: False ends what is on its way elsewhere.
        """
        self._engine = engine
        self._node = node
        self._messenger = messenger
        self._work = work
        self._is_wanted = is_wanted
        decode = work.place.decode_node
        at_home = home is None or home.id == here.id
        self._remote = "" if decode.id == here.id and at_home else decode.data_address
        self._lacking = frozenset(work.place.lacking)
        self._is_shared = is_shared
        self._joins = not self._remote or (home is not None and at_home and len(caching) > 0)
        self._is_stage = home is not None
        self._home = "" if home is None or home.id in (here.id, decode.id) else home.data_address
        self._caching = frozenset(caching)
        self._room: Room | None = None
        self._stores: list[concurrent.futures.Future[None]] = []
        self._writes: list[concurrent.futures.Future[None]] = []
        self._stored: set[tuple[int, int]] = set()
        """(index, layer): what is computed again is not stored again, its checksum might be another."""
        self._copies: list[concurrent.futures.Future[None]] = []
        """To `home`, as far as it has room."""
        self.bytes_stored = 0

    async def open(self, hit_blocks: int) -> None:
        """Raises PoolError if the room that decode waits for is gone. Space for caching is best effort."""
        work = self._work
        name = work.request, work.attempt
        if self._joins:
            self._room = await awaited(self._node.join_room(*name))
        elif len(work.keys) > hit_blocks and not self._is_stage:
            self._room = await awaited(
                self._node.open_room(work.place.space, work.keys, name=name if self._is_shared else None)
            )
        if self._room is not None and not self._is_stage:
            self._node.tell_tokens(self._room, work.tokens)

    @property
    def caching(self) -> tuple[int, ...]:
        """Indices of the blocks that its room for caching has place for."""
        if self._room is None or not self._remote:
            return ()
        return tuple(index for index in range(len(self._room)) if self._room.view(index) is not None)

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
        copies: list[RoomWrite] = []
        complete: list[tuple[int, int, int]] = []
        checksums: list[int] = []
        for index, page in blocks:
            if (index, layer) in self._stored:
                continue
            self._stored.add((index, layer))
            view = room.run(index, layer) if room is not None else None
            is_sent = bool(self._remote) and index in self._lacking
            is_copied = bool(self._home) and index in self._caching and not are_hits
            if view is None and not is_sent and not is_copied:
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
            if is_copied:
                copies.append(self._write(index, layer, [run], digest))
        if copies:
            self._copies.append(self._send(self._home, copies, time_left))
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

    def _send(self, address: str, writes: Sequence[RoomWrite], time_left: float) -> concurrent.futures.Future[None]:
        return self._messenger.write(address, writes, time_left, is_wanted=self._is_wanted)

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
            self._writes.append(self._send(self._remote, writes, time_left))

    async def settle(self) -> str | None:
        """Wait until no I/O touches the engine's pages. Returns why the KV did not arrive, or None."""
        problem: str | None = None
        for futures in (self._stores, self._writes):
            for future in list(futures):
                try:
                    await asyncio.wrap_future(future)
                except MoonpoolError as e:
                    problem = problem or str(e)
        await asyncio.gather(*map(asyncio.wrap_future, self._copies), return_exceptions=True)
        return problem

    async def drain(self) -> str | None:
        """`settle`, and no more comes."""
        problem = await self.settle()
        if self._room is not None:
            self._node.close_room(self._room)
        return problem
