"""Nodes and prefill workers as real processes, and a bench that is their Conductor, gateway and decode worker.

So it says itself where a prompt's KVCache lies, and when: in DRAM, on another node, on SSD, or nowhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from moonpool.bench.process import running, tail
from moonpool.core.actions import Fetch, FleetChanged, FleetPart, Place, ReserveRoom
from moonpool.core.blocks import block_keys
from moonpool.core.events import Registered, RoomConfirmed, RoomRefused
from moonpool.core.vocabulary import Capacity, KeySpace, NodePeer, PartId, PartKind, Peer, RequestId
from moonpool.errors import MoonpoolError
from moonpool.store.client import NodeClient
from moonpool.wire.link import Link
from moonpool.wire.messages import Message, PrefillOrder, Sampling, Tokens, Work

SECONDS = 120.0
"""A hang guard: the longest prompt takes a tenth of that."""


class Stand:
    """Use `stand`."""

    def __init__(self, link: Link, folder: Path, stack: contextlib.ExitStack) -> None:
        self.link = link
        self.nodes: dict[str, NodePeer] = {}
        self.workers: dict[str, Registered] = {}
        self.heard: asyncio.Queue[tuple[float, Message]] = asyncio.Queue()
        """What is neither a registration nor a report, with the time."""
        self._folder = folder
        self._stack = stack
        self._numbers = itertools.count(1)
        self._changed = asyncio.Event()

    async def start_node(self, name: str, *options: str) -> NodePeer:
        run_dir = self._folder / "run"
        run_dir.mkdir(mode=0o700, exist_ok=True)
        await self._start("node", name, "--run-dir", str(run_dir), *options)
        return self.nodes[name]

    async def start_prefill(self, name: str, node: str, *options: str) -> Registered:
        await self._start("prefill", name, "--node", node, *options)
        return self.workers[name]

    async def _start(self, kind: str, name: str, *options: str) -> None:
        command = [sys.executable, "-P", "-m", "moonpool", kind, "--id", name]
        command += ["--conductor", self.link.me.address.removeprefix("tcp://"), *options]
        log = self._folder / f"{name}.log"
        process = self._stack.enter_context(running(command, log))
        until = time.monotonic() + SECONDS
        while name not in self.nodes and name not in self.workers:
            if process.poll() is not None or time.monotonic() > until:
                raise MoonpoolError(f"{name} did not come up\n{tail(log)}")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.2):
                    await self._changed.wait()
            self._changed.clear()

    async def listen(self) -> None:
        while True:
            envelope = await self.link.receive()
            match envelope.body:
                case Registered() as r if r.kind is PartKind.NODE:
                    self.nodes[r.peer.id] = NodePeer(
                        r.peer.id, r.peer.incarnation, r.peer.address, r.data_address, r.socket_path
                    )
                    self._tell_fleet(r.peer)
                case Registered() as r:
                    self._tell_fleet(r.peer)
                    if r.node is not None:
                        self.workers[r.peer.id] = r
                case body:
                    self.heard.put_nowait((time.perf_counter(), body))
            self._changed.set()

    def _tell_fleet(self, peer: Peer) -> None:
        me = FleetPart(PartKind.GATEWAY, self.link.me, Capacity(), None, "")
        self.link.post(peer, FleetChanged(peer, (me,), tuple(self.nodes.values()), (), 0))

    def tell(self, node: NodePeer, order: Message) -> None:
        self.link.post(Peer(node.id, node.incarnation, node.address), order)

    def request(self) -> RequestId:
        return RequestId(f"bench-{next(self._numbers)}")

    async def reserve(self, node: NodePeer, request: RequestId, space: KeySpace, prompt: Sequence[int]) -> list[int]:
        """The indices of the blocks that are lacking there."""
        keys = tuple(block_keys(prompt, space, ""))
        tail_tokens = len(prompt) % space.block_tokens
        self.tell(node, ReserveRoom(node, request, 1, self.link.me, space, keys, tail_tokens, SECONDS))
        while True:
            _, message = await self.next()
            if isinstance(message, RoomRefused):
                raise MoonpoolError(f"no room: {message.reason}; give the nodes more DRAM")
            if isinstance(message, RoomConfirmed) and message.request == request:
                return list(message.lacking)

    async def next(self) -> tuple[float, Message]:
        async with asyncio.timeout(SECONDS):
            return await self.heard.get()

    def work(
        self,
        request: RequestId,
        prompt: Sequence[int],
        space: KeySpace,
        prefill_node: NodePeer,
        decode_node: NodePeer,
        lacking: Sequence[int],
        fetch: Fetch | None = None,
        prefill: Peer | None = None,
    ) -> Work:
        me = self.link.me
        keys = tuple(block_keys(prompt, space, ""))
        place = Place(
            *(request, 1, me, space, prefill or me, prefill_node, me, decode_node),
            *(0 if fetch is None else fetch.count, fetch, tuple(lacking), 0.0, SECONDS),
        )
        sampling = Sampling(0, temperature=0.0, max_tokens=8, ignore_eos=True)
        return Work(request, 1, request, me, tuple(prompt), len(prompt), sampling, keys, "", place, SECONDS)

    async def first_token(
        self, worker: Registered, prompt: Sequence[int], decode_node: NodePeer, fetch: Fetch | None = None
    ) -> tuple[float, int]:
        """Seconds from the order to the first token, and how many tokens were cached; all KV is delivered then."""
        assert worker.space is not None
        assert worker.node is not None
        request = self.request()
        lacking = await self.reserve(decode_node, request, worker.space, prompt)
        home = self.nodes[worker.node]
        work = self.work(request, prompt, worker.space, home, decode_node, lacking, fetch, worker.peer)
        client = await asyncio.to_thread(
            NodeClient.connect, decode_node.socket_path, name="bench", incarnation=str(request)
        )
        try:
            delivered = client.await_room(request, 1, SECONDS)
            began = time.perf_counter()
            self.link.post(worker.peer, PrefillOrder(work))
            while True:
                at, message = await self.next()
                if isinstance(message, Tokens) and message.tokens[0].request == request:
                    break
            contents = await asyncio.wrap_future(delivered)
            if contents is None:
                raise MoonpoolError("the KVCache of a prompt was not delivered")
            contents.close()
            return at - began, message.tokens[0].cached_tokens or 0
        finally:
            await asyncio.to_thread(client.close)


@contextlib.asynccontextmanager
async def stand(folder: Path) -> AsyncIterator[Stand]:
    link = Link(PartId("conductor"), "127.0.0.1", 0, None)
    with contextlib.ExitStack() as stack:
        stack.callback(link.close)
        made = Stand(link, folder, stack)
        ears = asyncio.create_task(made.listen())
        try:
            yield made
        finally:
            ears.cancel()
            await asyncio.wait([ears])
            await asyncio.to_thread(stack.close)
