"""A gateway over real sockets, and a scripted cluster that speaks the real protocol to it over real Links.

The stage's Conductor and workers only say what a test tells them to: they stand in for a cluster in these unit tests.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import httpx

from moonpool.core.actions import Cancel, FleetChanged, FleetPart, Place, Reject, Resubmit
from moonpool.core.events import PrefillFailed, Registered, RequestArrived, RequestCancelled
from moonpool.core.vocabulary import (
    Capacity,
    KeySpace,
    KeySpaceId,
    NodePeer,
    PartId,
    PartKind,
    Peer,
    RejectReason,
)
from moonpool.gateway.config import GatewayConfig
from moonpool.gateway.serve import Gateway, listen
from moonpool.gateway.tokenizer import Tokenizer
from moonpool.wire.link import Link
from moonpool.wire.messages import (
    Describe,
    Description,
    Message,
    PrefillOrder,
    TokenOut,
    Tokens,
    Work,
)

HANG = 20.0
"""Nothing here takes a second; past this a test hangs."""
MODEL = "smollm2"
SPACE = KeySpace(KeySpaceId("5f"), block_tokens=64, runs=2, run_bytes=1024)
CONTEXT = 2048

T = TypeVar("T")
Answer = Callable[[Work], Sequence[int]]


def run(test: Coroutine[object, object, T]) -> T:
    async def bounded() -> T:
        async with asyncio.timeout(60):
            return await test

    return asyncio.run(bounded())


async def until(condition: Callable[[], object]) -> None:
    """Wait for a condition that becomes true by itself; fails after HANG seconds."""
    deadline = time.monotonic() + HANG
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true"
        await asyncio.sleep(0.002)


NODE = PartId("node-0")


class Stage:
    """What the test drives. `heard` holds, per part, what the gateway has sent it, oldest first."""

    will_be_ready = True
    """Whether its fleet can serve."""

    def __init__(self) -> None:
        self.conductor = Link(PartId("conductor"), "127.0.0.1", 0, None)
        self.prefill = Link(PartId("prefill-0"), "127.0.0.1", 0, None)
        self.decode = Link(PartId("decode-0"), "127.0.0.1", 0, None)
        self.node = NodePeer(NODE, self.prefill.me.incarnation, self.prefill.me.address, "127.0.0.1:9", "")
        self.heard: dict[str, list[Message]] = {"conductor": [], "prefill-0": [], "decode-0": []}
        self.client = httpx.AsyncClient(timeout=HANG, trust_env=False)
        self.gateway: Gateway
        self.front: Peer
        self.url = ""
        self.describes = True
        self.places = False
        self.answer: Answer | None = None
        self.cached_tokens = 0
        self._tasks: list[asyncio.Task[None]] = []

    # ---- the cluster's life

    def start(self) -> None:
        for link in (self.conductor, self.prefill, self.decode):
            self._tasks.append(asyncio.create_task(self._listen(link)))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for link in (self.conductor, self.prefill, self.decode):
            link.close()
        await self.client.aclose()

    def announce(
        self,
        *,
        parts: Sequence[Link] | None = None,
        spaces: tuple[KeySpace, ...] = (SPACE,),
        on: PartId | None = NODE,
    ) -> None:
        """Tell the gateway who is in the fleet."""
        kinds = {self.prefill: PartKind.PREFILL, self.decode: PartKind.DECODE}
        members = tuple(
            FleetPart(kinds[link], link.me, Capacity(pages=8, context_tokens=CONTEXT), on, MODEL)
            for link in (kinds if parts is None else parts)
        )
        node = Peer(self.node.id, self.node.incarnation, self.node.address)
        members += (FleetPart(PartKind.NODE, node, Capacity(dram_bytes=1 << 20), None, ""),)
        fleet = FleetChanged(self.front, members, (self.node,), spaces, CONTEXT if spaces else 0)
        self.conductor.post(self.front, fleet)

    async def restart_conductor(self) -> None:
        """Another incarnation at the same address."""
        host, port = self.conductor.me.address.removeprefix("tcp://").split(":")
        self._tasks.pop(0).cancel()
        self.conductor.close()
        self.conductor = Link(PartId("conductor"), host, int(port), None)
        self._tasks.insert(0, asyncio.create_task(self._listen(self.conductor)))

    async def _listen(self, link: Link) -> None:
        while True:
            envelope = await link.receive()
            self.heard[link.me.id].append(envelope.body)
            match envelope.body:
                case Registered(peer=peer):
                    self.front = peer
                    self.announce()
                case Describe(to, serial, _, str(after)) if self.describes:
                    self.conductor.post(to, Description(serial, PAGES.get(after, b"null")))
                case Describe(to, serial, request) if self.describes:
                    self.conductor.post(to, Description(serial, STORIES.get(request, b"[]") if request else STATE))
                case RequestArrived() if self.places:
                    self.place(envelope.body)
                case PrefillOrder(work) if self.answer is not None:
                    self.say(work, list(self.answer(work))[len(work.tokens) - work.prompt_tokens :])

    # ---- what it says

    def place(self, arrived: RequestArrived) -> None:
        place = Place(
            request=arrived.request,
            attempt=arrived.attempt,
            gateway=self.front,
            space=SPACE,
            prefill=self.prefill.me,
            prefill_node=self.node,
            decode=self.decode.me,
            decode_node=self.node,
            hit_blocks=0,
            fetch=None,
            lacking=(),
            expected_ttft=0.1,
            time_left=arrived.time_left,
        )
        self.conductor.post(self.front, place)

    def reject(self, arrived: RequestArrived, reason: RejectReason, retry_after: float | None = 2.2) -> None:
        said = Reject(arrived.request, arrived.attempt, self.front, reason, f"no: {reason.value}", retry_after)
        self.conductor.post(self.front, said)

    def resubmit(self, arrived: RequestArrived) -> None:
        self.conductor.post(self.front, Resubmit(arrived.request, arrived.attempt, self.front, "a worker died"))

    def say(self, work: Work, ids: Sequence[int], *, start: int | None = None, per_message: int = 1) -> None:
        """Tokens of one attempt, the first from the prefill worker; ends as the request's sampling says."""
        first = len(work.tokens) - work.prompt_tokens if start is None else start
        outs = [self.token(work, first + i, token) for i, token in enumerate(ids)]
        begins_attempt = start is None
        if begins_attempt and outs:
            self.prefill.post(self.front, Tokens((outs.pop(0),)))
        for at in range(0, len(outs), per_message):
            self.decode.post(self.front, Tokens(tuple(outs[at : at + per_message])))

    def token(self, work: Work, position: int, token: int) -> TokenOut:
        sampling = work.sampling
        finish = None
        if token == END and not sampling.ignore_eos:
            finish = "stop"
        elif position + 1 >= sampling.max_tokens:
            finish = "length"
        logprob: float | None = None
        top: tuple[tuple[int, float], ...] = ()
        if sampling.logprobs is not None:
            logprob = -0.25
            top = tuple((token + i, -0.25 - i) for i in range(sampling.logprobs))
        cached = self.cached_tokens if position == len(work.tokens) - work.prompt_tokens else None
        return TokenOut(work.request, work.attempt, position, token, logprob, top, finish, cached)

    # ---- what it heard

    def got(self, part: str, kind: type[T]) -> list[T]:
        return [message for message in self.heard[part] if isinstance(message, kind)]

    async def arrival(self, n: int = 1) -> RequestArrived:
        """The n-th `RequestArrived`, counted from 1."""
        await until(lambda: len(self.got("conductor", RequestArrived)) >= n)
        return self.got("conductor", RequestArrived)[n - 1]

    async def order(self, n: int = 1) -> Work:
        await until(lambda: len(self.got("prefill-0", PrefillOrder)) >= n)
        return self.got("prefill-0", PrefillOrder)[n - 1].work

    async def cancelled_everywhere(self) -> None:
        await until(lambda: self.got("conductor", RequestCancelled))
        await until(lambda: self.got("prefill-0", Cancel))
        await until(lambda: self.got("decode-0", Cancel))

    async def failure(self) -> PrefillFailed:
        await until(lambda: self.got("conductor", PrefillFailed))
        return self.got("conductor", PrefillFailed)[0]

    # ---- what clients do

    async def post(self, path: str, body: object, **headers: str) -> httpx.Response:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.client.post(self.url + path, json=body, headers=names)

    async def chat(self, text: str = "Hi", **fields: Any) -> httpx.Response:
        return await self.post("/v1/chat/completions", chat_body(text, **fields))

    async def complete(self, prompt: object = "Hi", **fields: object) -> httpx.Response:
        return await self.post("/v1/completions", {"model": MODEL, "prompt": prompt, **fields})


class Talk:
    """A bare connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def answer(self) -> bytes:
        """The next response, head and body."""
        async with asyncio.timeout(HANG):
            head = await self._reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
            return head + await self._reader.readexactly(length)

    async def until(self, mark: bytes) -> None:
        async with asyncio.timeout(HANG):
            await self._reader.readuntil(mark)

    async def rest(self) -> bytes:
        """What comes before the end of the connection."""
        came = b""
        async with asyncio.timeout(HANG):
            with contextlib.suppress(ConnectionResetError):
                while piece := await self._reader.read(1 << 16):
                    came += piece
        return came

    async def closed(self) -> bool:
        """Wait for the end; whether nothing came before it."""
        return await self.rest() == b""

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()


@contextlib.asynccontextmanager
async def connected(s: Stage) -> AsyncIterator[Talk]:
    host, port = s.url.removeprefix("http://").split(":")
    talk = Talk(*await asyncio.open_connection(host, int(port)))
    try:
        yield talk
    finally:
        await talk.close()


POST_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\ncontent-type: application/json\r\n"
END = 2
STORIES = {"mine/1": b'[{"request":"g-1","outcome":"finished"}]'}
"""What the Conductor tells of requests, by id or x-request-id."""
PAGES = {"": b'{"blocks":[],"next":"0.7"}', "0.7": b'{"blocks":[],"next":null}'}
"""Of blocks, by where they begin."""
STATE = json.dumps(
    {
        "context_tokens": CONTEXT,
        "decisions": {"placed": 3, "by_reason": {}, "classes": {"high": {"arrived": 5, "rejected": 2}}},
        "classes": [{"name": "high", "rank": 0, "queued": 1}, {"name": "batch", "queued": 0}],
        "parts": [
            {"id": "decode-0", "kind": "decode", "running": 1, "pages_free": 6},
            {"id": "node-0", "kind": "node", "used_bytes": 4096, "blocks": {"dram": 2}},
        ],
        "counters": {"decode-0": {"pages_used": 2}, "node-0": {"bytes_in": 100.0, "blocks": 2}},
    }
).encode()


def chat_body(text: str = "Hi", **fields: Any) -> dict[str, object]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}


def events(body: str) -> list[Any]:
    """The JSON documents of a stream that ended as it should; `[DONE]` is checked and left out."""
    lines = [line for line in body.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


@contextlib.asynccontextmanager
async def stage(
    path: Path, tokenizer: Tokenizer, *, answer: Answer | None = None, **options: Any
) -> AsyncIterator[Stage]:
    """A gateway and its cluster; at the end nothing may be left in the gateway."""
    config = GatewayConfig(port=0, model_path=str(path), served_model_name=MODEL, **options)
    scene = Stage()
    scene.places = answer is not None
    scene.answer = answer
    link = Link(PartId("gateway-0"), "127.0.0.1", 0, None)
    listener = listen(config.host, config.port)
    # Connections inherit it: the kernel must not take a whole answer off the hands of a reader that does not read.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
    scene.url = "http://{}:{}".format(*listener.getsockname()[:2])
    scene.gateway = Gateway(link, scene.conductor.me.address, config, tokenizer)
    scene.start()
    life = asyncio.create_task(scene.gateway.run(listener))
    try:
        await until(lambda: life.done() or not scene.will_be_ready or scene.gateway.cluster.fleet.lacks is None)
        yield scene
        scene.gateway.check_integrity()
        await until(lambda: scene.gateway.seats.taken == 0)
        assert scene.gateway.cluster.running + scene.gateway.cluster.waiting == 0
    finally:
        life.cancel()
        await asyncio.gather(life, return_exceptions=True)
        await scene.close()
        link.close()
