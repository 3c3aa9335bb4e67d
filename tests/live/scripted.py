"""A prefill worker with a real engine, whose node and Messenger a test scripts: when which layer comes, or does not."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, cast

import numpy as np

from moonpool.core.actions import Place
from moonpool.core.blocks import block_keys
from moonpool.core.vocabulary import Incarnation, NodePeer, PartId, Peer, RequestId
from moonpool.engine.engine import Bytes, Engine
from moonpool.live.prefill import PrefillConfig, PrefillWorker
from moonpool.messenger.transfer import TAIL
from moonpool.store.views import Room, Stream
from moonpool.wire.link import Link
from moonpool.wire.messages import Envelope, HandOver, Message, PrefillOrder, Sampling, TokenOut, Tokens, Work

SECONDS = 60.0
GARBAGE = 0xEE


def peer(name: str) -> Peer:
    return Peer(PartId(name), Incarnation("1"), "tcp://127.0.0.1:9")


NODE = NodePeer(PartId("node-0"), Incarnation("1"), "tcp://127.0.0.1:9", "127.0.0.1:9", "/nowhere")


class Layers:
    """What is on its way to one prompt: the test says what of it comes; until then there is garbage in its place."""

    def __init__(self, blocks: Sequence[Bytes], runs: int) -> None:
        self._blocks = blocks
        self.runs = runs
        self._there = np.zeros((len(blocks), runs), bool)
        self.views = [np.full(block.nbytes, GARBAGE, np.uint8) for block in blocks]
        self.closed = False
        self.stream = Stream(self._close, 0, self.views, 0 if blocks else runs, 0, not blocks)

    def _close(self) -> None:
        self.closed = True

    def comes(self, layer: int, blocks: range | None = None) -> None:
        """One layer of these blocks, or of all."""
        for index in range(len(self.views)) if blocks is None else blocks:
            size = self.views[index].nbytes // self.runs
            run = slice(layer * size, (layer + 1) * size)
            self.views[index][run] = self._blocks[index][run]
            self._there[index, layer] = True
        self._change(False)

    def ends(self) -> None:
        self._change(True)

    def _change(self, is_over: bool) -> None:
        runs = int(np.argmin([*self._there.all(0), False]))
        whole = int(np.argmin([*self._there.all(1), False]))
        self.stream.change(runs, whole, is_over)


Script = Callable[[Layers], None]
"""Called on a thread of its own when the worker has asked for the prefix."""


def all_at_once(layers: Layers) -> None:
    for layer in range(layers.runs):
        layers.comes(layer)
    layers.ends()


class ScriptedNode:
    """A `NodeClient`, as far as a prefill worker asks: blocks of one prompt, and a room on this very node."""

    def __init__(self, engine: Engine, blocks: Sequence[Bytes], count: int, tail_bytes: int, script: Script) -> None:
        space = engine.space
        self.layers = Layers(blocks, space.runs)
        self.room = Room(lambda: None, 1, space, [np.zeros(space.block_bytes, np.uint8) for _ in range(count)], None)
        if tail_bytes:
            self.room.tail = np.zeros(tail_bytes, np.uint8)
        self.completed: set[tuple[int, int]] = set()
        self.repeated: list[tuple[int, int]] = []
        self.told: tuple[int, ...] = ()
        """Tokens of the room's blocks."""
        self._script = script
        self._threads: list[threading.Thread] = []

    def stream(self, *_: object) -> Future[Stream]:
        future: Future[Stream] = Future()
        future.set_result(self.layers.stream)
        thread = threading.Thread(target=self._script, args=(self.layers,))
        self._threads.append(thread)
        thread.start()
        return future

    def join_room(self, *_: object) -> Future[Room]:
        future: Future[Room] = Future()
        future.set_result(self.room)
        return future

    def tell_tokens(self, room: Room | Stream, tokens: Sequence[int]) -> None:
        self.told = tuple(tokens)

    def complete(self, room: Room, runs: Sequence[tuple[int, int, int]], checksums: Sequence[int]) -> None:
        for index, first, _ in runs:
            if (index, first) in self.completed:
                self.repeated.append((index, first))
            self.completed.add((index, first))

    def close_room(self, room: Room) -> None:
        room.close()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(SECONDS)
            assert not thread.is_alive()


class ScriptedLink:
    """A `Link` that keeps what is said."""

    def __init__(self) -> None:
        self.me = peer("prefill-0")
        self.said: list[Message] = []

    def post(self, to: Peer, message: Message) -> None:
        self.said.append(message)

    async def send(self, to: Peer, message: Message) -> None:
        self.said.append(message)


class Answer:
    """What became of a prompt."""

    def __init__(self, node: ScriptedNode, said: Sequence[Message], counters: dict[str, float]) -> None:
        self.node = node
        self.said = said
        self.counters = counters
        tokens = [token for message in said if isinstance(message, Tokens) for token in message.tokens]
        self.first: TokenOut | None = tokens[0] if tokens else None
        self.is_handed_over = any(isinstance(message, HandOver) for message in said)

    def kv(self, index: int) -> Bytes:
        view = self.node.room.view(index)
        assert view is not None
        return view


def prefill(
    engine: Engine,
    prompt: Sequence[int],
    blocks: Sequence[Bytes],
    script: Script = all_at_once,
    chunk: int = 512,
    drop: Callable[[Layers], bool] | None = None,
) -> Answer:
    """One prompt, of which these leading blocks are on their way. `drop`: cancel it once that says so.

    Raises TimeoutError where the worker hangs.
    """
    return asyncio.run(_prefill(engine, prompt, blocks, script, chunk, drop))


async def _prefill(
    engine: Engine,
    prompt: Sequence[int],
    blocks: Sequence[Bytes],
    script: Script,
    chunk: int,
    drop: Callable[[Layers], bool] | None,
) -> Answer:
    space = engine.space
    whole, rest = divmod(len(prompt), space.block_tokens)
    node = ScriptedNode(engine, blocks, whole, space.tail_run_bytes(rest) * space.runs if rest else 0, script)
    link = ScriptedLink()
    worker = PrefillWorker(cast(Link, link), "tcp://127.0.0.1:9", PrefillConfig("m", chunk_tokens=chunk), engine)
    life: Any = worker._life
    life._node, life._here = node, NODE
    worker._hear(Envelope(peer("gateway-0"), "", PrefillOrder(_work(engine, prompt))))
    try:
        async with asyncio.timeout(SECONDS):
            while worker._jobs:
                if drop is not None and drop(node.layers):
                    worker._drop_up_to(RequestId("r-1"), 1)
                    drop = None
                await asyncio.sleep(0.002)
        worker._instance.check_integrity()
        assert worker._instance.pool.used == 0
        counters = worker._counters()
        assert not counters["integrity_failures"]
    finally:
        await asyncio.to_thread(worker._quiesce)
        await asyncio.to_thread(node.join)
    assert node.layers.closed
    assert not node.repeated, "a run was stored twice, perhaps with other bytes"
    return Answer(node, link.said, counters)


def _work(engine: Engine, prompt: Sequence[int]) -> Work:
    request, gateway, space = RequestId("r-1"), peer("gateway-0"), engine.space
    keys = tuple(block_keys(prompt, space, ""))
    place = Place(request, 1, gateway, space, peer("prefill-0"), NODE, peer("decode-0"), NODE, 0, None, (), 0.0, 600.0)
    sampling = Sampling(0, temperature=0.0, max_tokens=8, ignore_eos=True)
    return Work(request, 1, "r-1", gateway, tuple(prompt), len(prompt), sampling, keys, "", place, 600.0)


__all__ = ["TAIL", "Answer", "Layers", "Script", "all_at_once", "prefill"]
