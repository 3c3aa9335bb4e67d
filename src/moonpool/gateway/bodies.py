"""Reading requests' bodies, within limits of size, time and memory.

Nobody waits for a turn to be read, so clients that send slowly or nothing keep no others out: only what came counts.
"""

from __future__ import annotations

import asyncio
from types import TracebackType

from starlette.datastructures import Headers
from starlette.types import Receive

from moonpool.core.vocabulary import RejectReason
from moonpool.gateway.config import GatewayConfig
from moonpool.gateway.problem import ApiError, ClientGoneError, refused

SMALL_BYTES = 64 << 10
"""A body up to this size is always read: the server buffers as much of each connection anyway."""
LARGEST_AT_ONCE = 8
"""All other bodies that are in memory are at most as long as this many of the longest."""


class Body:
    """What came of one request's body. It counts until it is released, at the latest when its `with` block ends."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self._counted = 0
        self.data = bytearray()

    def __len__(self) -> int:
        return len(self.data)

    def __enter__(self) -> Body:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()

    def add(self, piece: bytes) -> None:
        self.data += piece
        if len(self.data) > SMALL_BYTES:
            self._bodies.held += len(self.data) - self._counted
            self._counted = len(self.data)

    def hand_over(self) -> Body:
        """The same body for another owner, which releases it; this one is released."""
        other = Body(self._bodies)
        other.data, other._counted = self.data, self._counted
        self.data, self._counted = bytearray(), 0
        return other

    def release(self) -> None:
        self._bodies.held -= self._counted
        self.data, self._counted = bytearray(), 0


class Bodies:
    def __init__(self, config: GatewayConfig) -> None:
        self._longest = config.max_body_bytes
        self._timeout = config.body_timeout
        self._most = LARGEST_AT_ONCE * config.max_body_bytes
        self.held = 0
        """Bytes of bodies that are not small and are being read or not yet parsed."""

    async def read(self, headers: Headers, receive: Receive) -> Body:
        """One request's body, to be released. Raises ApiError (408, 413, 429), ClientGoneError."""
        declared = headers.get("content-length", "")
        if declared.isdigit() and int(declared[:20]) > self._longest:
            raise self._too_large()
        body = Body(self)
        try:
            async with asyncio.timeout(self._timeout):
                await self._read(body, receive)
        except TimeoutError:
            body.release()
            raise ApiError(408, f"the body did not come within {self._timeout:g} s") from None
        except BaseException:
            body.release()
            raise
        return body

    async def _read(self, body: Body, receive: Receive) -> None:
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError("the client went away before its request was complete")
            body.add(message.get("body", b""))
            if len(body) > self._longest:
                raise self._too_large()
            self._check_room(body)
            more = message.get("more_body", False)

    def check_integrity(self) -> None:
        most = self._most + self._longest + SMALL_BYTES
        assert 0 <= self.held <= most, f"{self.held} bytes of bodies are counted as being in memory"

    def _check_room(self, body: Body) -> None:
        if self.held > self._most and len(body) > SMALL_BYTES:
            message = f"bodies of {self._most} bytes in all are in memory, which is the limit: try again later"
            raise refused(RejectReason.QUEUE_FULL, message, 1.0)

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self._longest} bytes", code="body_too_large")
