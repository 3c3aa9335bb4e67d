"""One client's connection: uvicorn's fast protocol, with bounds on what a client may do before it has a request."""

from __future__ import annotations

import asyncio
import resource
from typing import Any

import httptools
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from moonpool.errors import ConfigError
from moonpool.gateway.front import respond
from moonpool.gateway.problem import ApiError

HEAD_SECONDS = 10.0
"""For a request's head, from its first byte; for the first one from the connection's beginning."""
HEAD_BYTES = 64 << 10
"""More without an end of the head (or of trailers) is refused, at the latest one read of the socket later."""
MAX_CONNECTIONS = 4096
"""Or twice as many as requests, where that is more: those that are refused need one, too."""
SPARE_CONNECTIONS = 64
"""Past the bound: they are told so. Others are dropped."""
TAKE_SECONDS, TAKE_BYTES = 30.0, 16 << 10
"""Of a complete response that is still here a reader takes as much in as long, or its connection is broken: nothing
else would end it, for closing waits until all has been taken."""
OWN_FILES = 1024
"""That the cluster's own sockets need at most."""


def most_connections(max_requests: int) -> int:
    """For so many requests in flight. The process's limit on open files is raised as far as it must and may be.

    Raises ConfigError where that leaves fewer connections than requests.
    """
    wanted = max(MAX_CONNECTIONS, 2 * max_requests)
    files, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files != resource.RLIM_INFINITY and files < wanted + OWN_FILES:
        files = wanted + OWN_FILES if hard == resource.RLIM_INFINITY else min(wanted + OWN_FILES, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    most = wanted if files == resource.RLIM_INFINITY else min(wanted, files - min(OWN_FILES, files // 2))
    if most < max_requests:
        raise ConfigError(
            f"--max-requests {max_requests}: this process may open {files} files, enough for {most} connections; "
            f"raise the hard limit (ulimit -Hn {max_requests + OWN_FILES}), or give --max-requests {most} or less"
        )
    return most


class Connection(HttpToolsProtocol):
    def __init__(self, *args: Any, most: int, **kwargs: Any) -> None:
        """`most`: connections of this gateway."""
        super().__init__(*args, **kwargs)
        self._most = most
        self._deadline: asyncio.TimerHandle | None = None
        """While a head is awaited."""
        self._reading: asyncio.TimerHandle | None = None
        """While some of a complete response is not taken."""
        self._unused = 0
        """Bytes since the last piece of a body or end of a message: a head or trailers in the coming."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        past = len(self.connections) - self._most
        if past > SPARE_CONNECTIONS:
            transport.abort()
        elif past > 0:
            self.app = _crowded
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        if self._reading is not None:
            self._reading.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        self._unused += len(data)
        try:
            self._feed(data)
        except httptools.HttpParserError:
            self._refuse(ApiError(400, "this is not a valid HTTP/1.1 request"))
            return
        if self._unused > HEAD_BYTES:
            self._refuse(ApiError(431, f"the request's head is larger than {HEAD_BYTES} bytes"))
        elif self._deadline is None and (self.cycle is None or self.cycle.response_complete):
            self._await_head()

    def _feed(self, data: bytes) -> None:
        """An offer to upgrade is declined: the parser, which always takes it, gets the request again without it."""
        while True:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                if self.parser.get_method() == b"CONNECT":
                    raise httptools.HttpParserError("this is no proxy") from None
                data = self._head_without_upgrade() + data[upgrade.args[0] :]
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn has it
            else:
                return

    def _head_without_upgrade(self) -> bytes:
        first = b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        return b"\r\n".join([first, *(n + b": " + v for n, v in self.headers if n != b"upgrade"), b"", b""])

    # ---- what the parser finds

    def on_headers_complete(self) -> None:
        if not self.parser.should_upgrade():
            self._stop_waiting()
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unused = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unused = 0
        if not self.parser.should_upgrade():
            super().on_message_complete()

    # ---- limits

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._reading is not None:
            self._reading.cancel()
        self._await_reader()

    def _await_reader(self, before: int | None = None) -> None:
        """`before`: bytes that were not taken TAKE_SECONDS ago."""
        left = self.transport.get_write_buffer_size()
        if before is not None and left > max(before - TAKE_BYTES, 0):
            self.transport.abort()
        elif left:
            self._reading = self.loop.call_later(TAKE_SECONDS, self._await_reader, left)

    def _await_head(self) -> None:
        self._deadline = self.loop.call_later(HEAD_SECONDS, self._head_is_late)

    def _head_is_late(self) -> None:
        """Who has sent a part of it is told; who has sent nothing asked for nothing."""
        self._deadline = None
        if self._unused:
            self._refuse(ApiError(408, f"the request's head did not come within {HEAD_SECONDS:g} s"))
        else:
            self.transport.abort()

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _refuse(self, error: ApiError) -> None:
        """The last word on this connection. In the middle of a response there is no room for it."""
        if self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
            self.transport.abort()
            return
        body = error.body()
        self.transport.write(
            b"HTTP/1.1 %d \r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s"
            % (error.status, len(body), body)
        )
        self.transport.close()


async def _crowded(scope: Scope, receive: Receive, send: Send) -> None:
    error = ApiError(503, "this gateway has as many connections as it can take", code="too_many_connections")
    await respond(send, 503, error.body(), {"connection": "close", "retry-after": "1"})
