"""One HTTP request and its choices: waits for the cluster, writes the answer, notices a client that is gone or slow."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from starlette.types import Message, Send

from moonpool.gateway.answers import AnswerMemory
from moonpool.gateway.choice import Choice, Delta, Drawn
from moonpool.gateway.cluster import Cluster
from moonpool.gateway.generation import Cancelled, Refused
from moonpool.gateway.presence import CLIENT_GONE
from moonpool.gateway.problem import ApiError, ClientGoneError, refused, revoked_key
from moonpool.gateway.replies import DONE, Shape

DRAIN_SECONDS = 5.0
"""After the deadline, for a reader that is nearly through."""


class Exchange:
    """`changed` is to be called whenever a generation of `choices` has news, `lose_client` when the client is gone.

    Finished answers go to `answers`, if given.
    """

    def __init__(self, cluster: Cluster, answers: AnswerMemory | None) -> None:
        self._cluster = cluster
        self._answers = answers
        self._news = asyncio.Event()
        self._gone = False
        self._revoked: str | None = None
        """Id of its API key, if that counts no more."""
        self._sent = 0
        """Tokens in the last chunk: that the reader has taken them shows when the next one is accepted."""
        self.choices: list[Choice] = []
        self.opened = False
        """The response has begun: errors go into the stream."""

    def changed(self) -> None:
        self._news.set()

    def lose_client(self) -> None:
        self._gone = True
        self.cancel(CLIENT_GONE)
        self._news.set()

    def revoke(self, key: str) -> None:
        """Its API key, of this id, counts no more."""
        self._revoked = key
        self.cancel("its API key was revoked")
        self._news.set()

    def check_client(self) -> None:
        """Raises ClientGoneError, and ApiError where its key was revoked."""
        if self._gone:
            raise ClientGoneError(CLIENT_GONE)
        if self._revoked is not None:
            raise revoked_key(self._revoked)

    def cancel(self, reason: str) -> None:
        """Ends whatever has not ended."""
        for choice in self.choices:
            self._cluster.cancel(choice.generation, reason)

    async def whole(self, shape: Shape) -> bytes:
        """The complete answer. Raises ApiError, ClientGoneError."""
        drawn: list[list[Drawn]] = [[] for _ in self.choices]
        while any(choice.finish is None for choice in self.choices):
            for choice, delta in await self._deltas():
                drawn[choice.index] += delta.drawn
        return shape.whole(self.choices, drawn)

    async def stream(self, shape: Shape, start: Message, send: Send) -> None:
        """Server-sent events. Raises ApiError while nothing has been sent; later errors are events."""
        deltas: Sequence[tuple[Choice, Delta]] = ()
        while not deltas:
            deltas = await self._deltas()
        self.opened = True
        await send(start)
        opening = shape.opening(self.choices)
        try:
            while True:
                events = opening + b"".join(shape.chunk(choice, delta) for choice, delta in deltas)
                opening = b""
                if all(choice.finish is not None for choice in self.choices):
                    break
                if events:
                    await send({"type": "http.response.body", "body": events, "more_body": True})
                    self._sent = sum(len(delta.tokens) for _, delta in deltas)
                deltas = await self._deltas()
            events += shape.closing(self.choices)
        except ApiError as e:
            self.cancel("another choice of the request has failed")
            events = b"data: " + e.body() + b"\n\n" + DONE
        await send({"type": "http.response.body", "body": events, "more_body": False})

    def lag(self) -> int:
        """Tokens that wait for the reader."""
        return self._sent + sum(len(choice.generation.fresh) for choice in self.choices)

    async def _deltas(self) -> list[tuple[Choice, Delta]]:
        """Wait for news; what they change. Raises ApiError, ClientGoneError."""
        await self._news.wait()
        self._news.clear()
        self.check_client()
        changes = []
        for choice in self.choices:
            delta = choice.advance()
            if delta is not None:
                changes.append((choice, delta))
                if delta.finish is not None:
                    self._finish(choice)
            elif choice.finish is None:
                self._check_ending(choice)
            generation = choice.generation
            if choice.finish is None and (generation.fresh or (delta is not None and generation.ending is not None)):
                # An ending that came with the last tokens brings no further news.
                self._news.set()
        return changes

    def _finish(self, choice: Choice) -> None:
        if choice.stopped:
            self._cluster.stop(choice.generation)
        if self._answers is not None:
            choice.remember(self._answers)

    def _check_ending(self, choice: Choice) -> None:
        match choice.generation.ending:
            case Refused(reason, message, retry_after):
                raise refused(reason, message, retry_after)
            case Cancelled(reason):
                raise ApiError(503, f"the request was cancelled: {reason}", code="cancelled")
            case _:
                return
