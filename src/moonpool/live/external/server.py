"""One vLLM server over HTTP: is it well, how busy is it, and streams of tokens."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing

import aiohttp
import msgspec
from msgspec import Struct

from moonpool.core.vocabulary import KeySpace
from moonpool.live.external.config import Instance
from moonpool.live.external.dialect import (
    Events,
    FaultError,
    Load,
    Piece,
    RefusedError,
    load_in,
    models_in,
    problem_in,
    space_in,
    space_question,
)

CALL_SECONDS = 5.0
"""For whatever is not a completion."""
CONNECT_SECONDS = 5.0
SPACE_SECONDS = 30.0
"""For a prompt of one token, which may wait behind others."""
MOST_ANSWER_BYTES = 8 << 20


class Facts(Struct, frozen=True):
    """What stays as it is for the life of a server."""

    context_tokens: int
    blocks: int
    """Of KV, 0 where it does not say."""
    block_tokens: int
    """0 where it does not say."""
    caches_prefixes: bool


class WrongModelError(FaultError):
    """It serves another model, or does not take the API key: to ask again does not help."""


class Server:
    """`open` and `close` it in a running event loop. All calls raise FaultError where the server is away or broken."""

    def __init__(self, instance: Instance) -> None:
        self._instance = instance
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        key = self._instance.api_key
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, connect=CONNECT_SECONDS),
            # Not compressed: what is small on its way could fill the memory here.
            headers={"accept-encoding": "identity"} | ({"authorization": f"Bearer {key}"} if key else {}),
            auto_decompress=False,
        )

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def facts(self, model: str) -> Facts:
        """Raises WrongModelError where it does not serve `model`."""
        await self.check_health()
        models = models_in(await self._get("/v1/models"))
        if model not in models:
            names = ", ".join(sorted(models)) or "nothing"
            raise WrongModelError(f"it serves {names}, not {model}")
        load = await self.load()
        return Facts(models[model] or 0, load.blocks, load.block_tokens, load.caches_prefixes)

    async def check_health(self) -> None:
        await self._get("/health")

    async def load(self) -> Load:
        return load_in((await self._get("/metrics")).decode(errors="replace"))

    async def pool_space(self, model: str) -> KeySpace | None:
        """Of the blocks that its connector shares; None where it has no connector that tells."""
        try:
            async with asyncio.timeout(SPACE_SECONDS), aclosing(self.complete(space_question(model))) as pieces:
                async for piece in pieces:
                    return space_in(piece.transfer)
        except TimeoutError:
            raise FaultError(f"it does not answer a prompt of one token within {SPACE_SECONDS:g} s") from None
        except RefusedError as e:
            raise FaultError(f"it refuses a prompt of one token: {e}") from None
        return None

    async def complete(self, body: Mapping[str, object]) -> AsyncGenerator[Piece, None]:
        """Pieces up to the last, or a whole answer's one; an end before it is a fault.

        Leaving early makes the server drop the request.

        Raises RefusedError where the server does not take the request.
        """
        logprobs = body.get("logprobs")
        events = Events(logprobs if isinstance(logprobs, int) else None)
        try:
            async with self._opened.post(
                f"{self._instance.url}/v1/completions",
                data=msgspec.json.encode(body),
                headers={"content-type": "application/json"},
                allow_redirects=False,
            ) as response:
                if response.status != 200:
                    raise _problem(response.status, await response.content.read(MOST_ANSWER_BYTES))
                if not body["stream"]:
                    yield events.whole(await _read(response))
                    return
                async for data in response.content.iter_any():
                    for piece in events.feed(data):
                        yield piece
                        if piece.is_last:
                            return
        except (aiohttp.ClientError, OSError) as e:
            raise FaultError(_what(e)) from None
        raise FaultError("it broke off the stream")

    async def _get(self, path: str) -> bytes:
        try:
            async with (
                asyncio.timeout(CALL_SECONDS),
                self._opened.get(f"{self._instance.url}{path}", allow_redirects=False) as response,
            ):
                body = await _read(response)
        except (aiohttp.ClientError, OSError) as e:
            raise FaultError(f"{path}: {_what(e)}") from None
        if response.status == 200:
            return body
        problem = _problem(response.status, body)
        raise problem if isinstance(problem, WrongModelError) else FaultError(f"{path}: {problem}")

    @property
    def _opened(self) -> aiohttp.ClientSession:
        assert self._session is not None, "it is open from `open` to `close`"
        return self._session


@contextlib.asynccontextmanager
async def opened(instance: Instance) -> AsyncIterator[Server]:
    server = Server(instance)
    await server.open()
    try:
        yield server
    finally:
        await server.close()


async def _read(response: aiohttp.ClientResponse) -> bytes:
    """Its body, as far as an answer may be long."""
    body = bytearray()
    while len(body) < MOST_ANSWER_BYTES and (more := await response.content.read(MOST_ANSWER_BYTES - len(body))):
        body += more
    return bytes(body)


def _problem(status: int, body: bytes) -> FaultError | RefusedError:
    """What the client's request is to blame for says nothing of the server; nor does being busy."""
    message = f"status {status}" + (f": {text}" if (text := problem_in(body)) else "")
    if 300 <= status < 400:
        return FaultError(f"{message}: it refers to another address, and only its own is asked")
    if status in (401, 403):
        return WrongModelError(f"it does not accept the API key ({message})")
    if 400 <= status < 500:
        return RefusedError(message, is_busy=status in (408, 425, 429))
    return FaultError(message)


def _what(error: Exception) -> str:
    match error:
        case aiohttp.ConnectionTimeoutError():
            return f"no connection within {CONNECT_SECONDS:g} s"
        case TimeoutError():
            return f"no answer within {CALL_SECONDS:g} s"
        case aiohttp.ClientConnectorError():
            return f"no connection: {error.os_error.strerror or error.os_error}"
        case aiohttp.ClientPayloadError() | aiohttp.ServerDisconnectedError() | ConnectionError():
            return "it broke off the connection"
    return str(error) or type(error).__name__
