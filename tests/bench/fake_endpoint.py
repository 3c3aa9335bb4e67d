"""An OpenAI-compatible endpoint of a few lines, whose behaviour a test gives."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

Write = Callable[[bytes], None]
Serve = Callable[[dict[str, Any], "Answering"], Awaitable[None]]
"""Answers one request, given its body."""


class Answering:
    """One answer."""

    def __init__(self, writer: asyncio.StreamWriter, path: str, headers: dict[str, str]) -> None:
        self.path = path
        self.headers = headers
        self._writer = writer

    def plain(self, status: int, body: object, headers: dict[str, str] | None = None) -> None:
        data = json.dumps(body).encode()
        lines = [
            f"HTTP/1.1 {status} X",
            f"content-length: {len(data)}",
            *(f"{k}: {v}" for k, v in (headers or {}).items()),
        ]
        self._writer.write("\r\n".join([*lines, "", ""]).encode() + data)

    def begin(self) -> None:
        self._writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")

    def event(self, event: object) -> None:
        data = b"data: " + (event if isinstance(event, bytes) else json.dumps(event).encode()) + b"\n\n"
        self._writer.write(b"%x\r\n%s\r\n" % (len(data), data))

    def end(self) -> None:
        self.event(b"[DONE]")
        self._writer.write(b"0\r\n\r\n")


def prompt_tokens(body: dict[str, Any]) -> int:
    """Ids, or words."""
    prompt = body["messages"][0]["content"] if "messages" in body else body["prompt"]
    return len(prompt.split()) if isinstance(prompt, str) else len(prompt)


async def serve_at_once(body: dict[str, Any], answering: Answering) -> None:
    """All tokens that were asked for, each in an event, and the usage."""
    answering.begin()
    for token in range(body["max_tokens"]):
        answering.event({"choices": [{"index": 0, "text": " w", "token_ids": [token]}]})
    details = {"cached_tokens": 1}
    usage = {
        "prompt_tokens": prompt_tokens(body),
        "completion_tokens": body["max_tokens"],
        "prompt_tokens_details": details,
    }
    answering.event({"choices": [], "usage": usage})
    answering.end()


@dataclass
class FakeEndpoint:
    url: str
    bodies: list[dict[str, Any]] = field(default_factory=list)
    arrived: list[float] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)


@contextlib.asynccontextmanager
async def fake_endpoint(serve: Serve = serve_at_once, models: int = 200) -> AsyncIterator[FakeEndpoint]:
    fake = FakeEndpoint("")

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
            answering = Answering(writer, head[0].split()[1], headers)
            if head[0].startswith("GET"):
                answering.plain(models, {"data": [{"id": "m", "max_model_len": 4096}]})
            else:
                body = json.loads(await reader.readexactly(int(headers["content-length"])))
                fake.arrived.append(asyncio.get_running_loop().time())
                fake.bodies.append(body)
                fake.headers.append(headers)
                await serve(body, answering)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0, backlog=1024) as server:
        fake.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield fake


@contextlib.contextmanager
def fake_endpoint_beside(serve: Serve = serve_at_once, models: int = 200) -> Iterator[FakeEndpoint]:
    """The same on a thread of its own, for commands that run an event loop themselves."""
    ready = threading.Event()
    found: list[tuple[FakeEndpoint, asyncio.AbstractEventLoop, asyncio.Event]] = []

    async def run() -> None:
        async with fake_endpoint(serve, models) as fake:
            over = asyncio.Event()
            found.append((fake, asyncio.get_running_loop(), over))
            ready.set()
            await over.wait()

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    try:
        assert ready.wait(30.0)
        yield found[0][0]
    finally:
        for _, loop, over in found:
            loop.call_soon_threadsafe(over.set)
        thread.join(30.0)
