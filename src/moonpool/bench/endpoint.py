"""One OpenAI-compatible endpoint: a streamed POST, and what came of it token by token.

Over aiohttp, with a connection for each request: no request suffers from a connection that its endpoint is just
closing, and what connecting takes is a part of what a client waits for (docs/decisions/0013).
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import resource
from collections.abc import Mapping
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

import aiohttp
import msgspec
from msgspec import Struct

from moonpool.errors import ConfigError, MoonpoolError

LINE_BYTES = 1 << 20
"""Of an event; a server that sends more without a line's end sends no events."""
ERROR_BYTES = 1 << 16
"""Of an error's body that are read."""
MODELS_BYTES = 4 << 20
CALL_SECONDS = 30.0
SPARE_FILES = 64
"""Descriptors that are no streams."""
CONTEXT = "context"
"""The reason of a request that is longer than the endpoint's context, as our own Conductor names it."""
REASON_HEADER = "x-moonpool-reason"


class Usage(Struct, frozen=True):
    """As the endpoint counts. None: it does not tell."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None


class Reply(Struct, frozen=True):
    """What became of one request. Times are those of the event loop's clock."""

    ended: float
    """Its last byte."""
    status: int = 0
    """Of HTTP; 0: the connection failed, or nothing came in time."""
    reason: str = ""
    """A word: why it was refused, or what went wrong."""
    message: str = ""
    """What the endpoint said of that."""
    retry_after: float | None = None
    times: tuple[float, ...] = ()
    """Of its tokens; those that came in one event have the same."""
    completed: bool = False
    usage: Usage = Usage()

    @property
    def refused(self) -> bool:
        """It was not taken at all; else an answer that is not complete is an error."""
        return not self.times and (self.status == 429 or self.reason == CONTEXT or (self.status >= 500 and self.named))

    @property
    def named(self) -> bool:
        """The endpoint gave a reason of its own."""
        return bool(self.reason) and not self.reason.startswith("HTTP ")

    @property
    def intervals(self) -> list[float]:
        """Between its tokens, seconds. Tokens that had no event of their own came together with another: 0."""
        found = [b - a for a, b in itertools.pairwise(self.times)]
        told = self.usage.completion_tokens
        return found + [0.0] * (told - 1 - len(found) if told and self.times else 0)


class Endpoint:
    """Use it as an async context. `base`: its URL up to and with `/v1`."""

    def __init__(self, base: str, key: str = "", timeout: float = CALL_SECONDS) -> None:
        """`timeout`: seconds for a whole answer."""
        self.base = base
        self._timeout = timeout
        self._headers = {"content-type": "application/json", "accept-encoding": "identity", "user-agent": "moonpool"}
        if key:
            self._headers["authorization"] = f"Bearer {key}"
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        no_timeout = aiohttp.ClientTimeout(total=None, sock_connect=None)
        self._session = aiohttp.ClientSession(connector=connector, timeout=no_timeout, headers=self._headers)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def stream(
        self, path: str, body: bytes, headers: Mapping[str, str] | None = None, ids: list[int] | None = None
    ) -> Reply:
        """POST `body`, now. Whatever goes wrong is in the reply. `ids`: is given the ids of its tokens."""
        assert self._session is not None, "used as a context"
        loop = asyncio.get_running_loop()
        reading = _Reading(ids)
        status = 0
        try:
            async with (
                asyncio.timeout(self._timeout),
                self._session.post(self.base + path, data=body, headers=headers) as response,
            ):
                status = response.status
                if status != 200:
                    return _failed(loop.time(), status, response.headers, await response.content.read(ERROR_BYTES))
                async for data in response.content.iter_any():
                    reading.take(data, loop.time())
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as e:
            # A stream is over at its last event, however the connection ends.
            if not reading.completed:
                reading.reason, reading.message = reading.reason or _kind_of(e), str(e)
        if not reading.completed and not reading.reason:
            reading.reason = "connection lost"
        return reading.reply(loop.time(), status)

    async def get(self, path: str) -> tuple[int, bytes]:
        """The status and body. Raises MoonpoolError where nothing answers."""
        assert self._session is not None, "used as a context"
        try:
            async with asyncio.timeout(CALL_SECONDS), self._session.get(self.base + path) as response:
                return response.status, await response.content.read(MODELS_BYTES)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as e:
            raise unreachable(self.base, _kind_of(e)) from None


def base_of(url: str) -> str:
    """With `/v1` at its end, whether it was given or not. Raises ConfigError for what is no URL."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    try:
        port = parts.port
    except ValueError:
        port = -1
    if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
        raise ConfigError(f"--url {url!r}: must be like http://127.0.0.1:8000 or https://host/v1")
    if "@" in parts.netloc:
        raise ConfigError("--url: a name or password in it would stand in every report; give --api-key")
    path = parts.path.rstrip("/")
    return f"{parts.scheme}://{parts.netloc}{path if path.endswith('/v1') else path + '/v1'}"


def room_for(streams: int) -> int:
    """As many of them as this process may open files for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = streams + SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return streams if soft == resource.RLIM_INFINITY else max(min(streams, soft - SPARE_FILES), 1)


def unreachable(base: str, why: str) -> MoonpoolError:
    return MoonpoolError(f"no endpoint answers at {base} ({why}): is it up, and is this its address?")


class _Details(Struct):
    cached_tokens: int | None = None


class _Usage(Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Delta(Struct):
    content: str | None = None
    reasoning_content: str | None = None
    role: str | None = None


class _Choice(Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None

    def tokens(self) -> int:
        """That it brings. Where no ids tell, an event is a token unless it only begins or ends the answer."""
        if self.token_ids is not None:
            return len(self.token_ids)
        said = self.text
        if self.delta is not None:
            said = self.delta.content or self.delta.reasoning_content
        opens = self.delta is not None and self.delta.role is not None
        return int(bool(said) or not (opens or self.finish_reason))


class _Error(Struct):
    message: str = ""
    code: str | int | None = None
    type: str | None = None


class _Event(Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | str | None = None
    message: str | None = None
    detail: object = None


_decode = msgspec.json.Decoder(_Event).decode


class _Reading:
    """An answer as far as it has come."""

    def __init__(self, ids: list[int] | None = None) -> None:
        self.reason = self.message = ""
        self.completed = False
        self._ids = ids
        self._times: list[float] = []
        self._usage = Usage()
        self._rest = b""

    def take(self, data: bytes, now: float) -> None:
        """Raises ValueError for what are no events."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LINE_BYTES:
            raise ValueError(f"a line of more than {LINE_BYTES} bytes")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now)

    def reply(self, now: float, status: int) -> Reply:
        return Reply(
            now,
            status,
            self.reason,
            self.message,
            times=tuple(self._times),
            completed=self.completed,
            usage=self._usage,
        )

    def _event(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self.completed = not self.reason
            return
        event = _decode(data)
        if event.error is not None:
            self.reason, self.message = _reason_of(event.error) or "error", _message_of(event)
        for choice in event.choices:
            if count := choice.tokens():
                self._times += [now] * count
            if self._ids is not None and choice.token_ids:
                self._ids += choice.token_ids
        if event.usage is not None:
            told = event.usage
            cached = told.prompt_tokens_details.cached_tokens if told.prompt_tokens_details else None
            self._usage = Usage(told.prompt_tokens, told.completion_tokens, cached)


def _failed(now: float, status: int, headers: Mapping[str, str], body: bytes) -> Reply:
    reason = message = ""
    try:
        event = _decode(body)
        reason, message = _reason_of(event.error), _message_of(event)
    except msgspec.MsgspecError:
        message = body[:200].decode(errors="replace")
    said = f"{reason} {message}".lower()
    if status in (400, 413, 422) and ("context_length" in said or "context length" in said or "context size" in said):
        reason = CONTEXT
    reason = headers.get(REASON_HEADER) or (reason if status in (400, 429) or reason == CONTEXT else "")
    advice = headers.get("retry-after", "")
    return Reply(
        now,
        status,
        reason or f"HTTP {status}",
        message,
        float(advice) if advice.replace(".", "", 1).isdigit() else None,
    )


def _reason_of(error: _Error | str | None) -> str:
    if not isinstance(error, _Error):
        return ""
    code = error.code if isinstance(error.code, str) else ""
    return code or error.type or ""


def _message_of(event: _Event) -> str:
    error = event.error
    said = error.message if isinstance(error, _Error) else error or event.message or event.detail
    return " ".join(str(said or "").split())[:500]


def _kind_of(error: Exception) -> str:
    """A few words for the same thing each time, so that they can be counted."""
    match error:
        case aiohttp.ClientConnectorDNSError():
            return "no such host"
        case aiohttp.ClientSSLError() | aiohttp.ClientConnectorCertificateError():
            return "TLS failed"
        case TimeoutError():
            return "timed out"
        case OSError(errno=errno.ECONNREFUSED):
            return "connection refused"
        case OSError(errno=errno.EMFILE | errno.ENFILE):
            return "no file descriptors left"
        case aiohttp.ClientConnectorError():
            return "cannot connect"
        case aiohttp.ClientResponseError():
            return "no proper HTTP"
        case aiohttp.ClientError() | OSError():
            return "connection lost"
        case _:
            return "no proper events"
