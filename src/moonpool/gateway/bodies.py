"""Reading requests' bodies, within limits of size, time and memory.

Nobody waits for a turn to be read, so clients that send slowly or nothing keep no others out: only what came counts.
"""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers
from starlette.types import Receive

from moonpool.core.vocabulary import RejectReason
from moonpool.gateway.config import GatewayConfig
from moonpool.gateway.problem import ApiError, ClientGoneError, refused

SMALL_BYTES = 64 << 10
"""A body up to this size is always read: the server buffers as much of each connection anyway."""
LARGEST_AT_ONCE = 8
"""All other bodies that are being read are at most as long as this many of the longest."""


class Bodies:
    def __init__(self, config: GatewayConfig) -> None:
        self._longest = config.max_body_bytes
        self._timeout = config.body_timeout
        self._most = LARGEST_AT_ONCE * config.max_body_bytes
        self.held = 0
        """Bytes of bodies that are being read and not small."""

    async def read(self, headers: Headers, receive: Receive) -> bytes:
        """One request's body. Raises ApiError (408, 413, 429), ClientGoneError."""
        declared = headers.get("content-length", "")
        if declared.isdigit() and int(declared[:20]) > self._longest:
            raise self._too_large()
        body = bytearray()
        counted = 0
        try:
            async with asyncio.timeout(self._timeout):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGoneError("the client went away before its request was complete")
                    body += message.get("body", b"")
                    if len(body) > self._longest:
                        raise self._too_large()
                    if not message.get("more_body", False):
                        return bytes(body)
                    if len(body) > SMALL_BYTES:
                        self.held += len(body) - counted
                        counted = len(body)
                        self._check_room()
        except TimeoutError:
            raise ApiError(408, f"the body did not come within {self._timeout:g} s") from None
        finally:
            self.held -= counted

    def check_integrity(self) -> None:
        assert 0 <= self.held <= self._most + self._longest, f"{self.held} bytes of bodies are counted as being read"

    def _check_room(self) -> None:
        if self.held > self._most:
            message = f"bodies of {self._most} bytes in all are being read, which is the limit: try again later"
            raise refused(RejectReason.QUEUE_FULL, message, 1.0)

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self._longest} bytes", code="body_too_large")
