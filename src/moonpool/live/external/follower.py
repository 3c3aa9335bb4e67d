"""Follows a server's stream of KV events (ZMQ): a replay fills gaps, else all that was known is forgotten."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import zmq
import zmq.asyncio

from moonpool.errors import ConfigError
from moonpool.live.external.events import BlockTable, Known, events_in

log = logging.getLogger(__name__)

REPLAY_SECONDS = 5.0
MOST_MESSAGE_BYTES = 64 << 20
HIGH_WATER_MESSAGES = 100_000
_END = (1 << 64) - 1


class Follower:
    """`tell` hears what came and went, in order."""

    def __init__(
        self,
        endpoint: str,
        replay: str | None,
        table: BlockTable,
        tell: Callable[[Known], None],
        *,
        listens: bool = False,
    ) -> None:
        """`endpoint`: `tcp://host:port` of the server; or, with `listens`, here, where the server connects to it."""
        self._endpoint = endpoint
        self._listens = listens
        self._replay = replay
        self._table = table
        self._tell = tell
        self._next: int | None = None
        """The number of the batch that should come; None: not known yet."""
        self._last: int | None = None
        """Of the last batch that was not replayed."""
        self.batches = 0
        self.replayed = 0
        self.gaps = 0
        """That no replay could fill: what was known was forgotten."""

    async def run(self) -> None:
        """Until cancelled. Raises ConfigError where the address cannot be used."""
        context = zmq.asyncio.Context()
        try:
            socket = context.socket(zmq.SUB)
            for option, value in (
                (zmq.LINGER, 0),
                (zmq.MAXMSGSIZE, MOST_MESSAGE_BYTES),
                (zmq.RCVHWM, HIGH_WATER_MESSAGES),
            ):
                socket.setsockopt(option, value)
            socket.setsockopt(zmq.SUBSCRIBE, b"")
            try:
                if self._listens:
                    socket.bind(self._endpoint)
                else:
                    socket.connect(self._endpoint)
            except zmq.ZMQError as e:
                raise ConfigError(f"cannot listen for KV events at {self._endpoint}: {e.strerror}") from None
            if self._replay is not None:
                # What the server has cached before.
                await self._catch_up(context, 0)
            while True:
                frames = await socket.recv_multipart()
                if len(frames) < 2 or len(frames[-2]) != 8:
                    log.warning("%s sends what is no KV event: %d frames", self._endpoint, len(frames))
                    continue
                await self._take(context, int.from_bytes(frames[-2], "big"), frames[-1])
        finally:
            context.destroy(linger=0)

    def counters(self) -> dict[str, float]:
        return {
            "kv_event_batches": self.batches,
            "kv_event_batches_replayed": self.replayed,
            "kv_event_gaps": self.gaps,
            "kv_event_blocks_unknown": self._table.unknown,
        }

    async def _take(self, context: zmq.asyncio.Context, seq: int, payload: bytes) -> None:
        last, self._last = self._last, seq
        if last is not None and seq <= last:
            self._lose("the server began to count anew")
            self._next = None
        if self._next is not None and seq > self._next:
            await self._catch_up(context, self._next)
        self._in_order(seq, payload)

    def _in_order(self, seq: int, payload: bytes) -> None:
        expected = self._next
        if expected is not None and seq < expected:
            return  # it came with a replay
        if expected is not None and seq > expected:
            self._lose(f"batches {expected} to {seq - 1} are lost")
        self._apply(seq, payload)

    def _apply(self, seq: int, payload: bytes) -> None:
        self._next = seq + 1
        self.batches += 1
        try:
            for event in events_in(payload):
                known = self._table.apply(event)
                if known.came or known.went:
                    self._tell(known)
        except ValueError as e:
            self._lose(str(e))

    async def _catch_up(self, context: zmq.asyncio.Context, first: int) -> None:
        """All batches from this one on that the server still has."""
        if self._replay is None:
            return
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MOST_MESSAGE_BYTES)
        try:
            socket.connect(self._replay)
            async with asyncio.timeout(REPLAY_SECONDS):
                await socket.send_multipart([b"", first.to_bytes(8, "big")])
                while True:
                    frames = await socket.recv_multipart()
                    seq = int.from_bytes(frames[-2], "big") if len(frames) > 1 else _END
                    if seq == _END:
                        return
                    self.replayed += 1
                    self._in_order(seq, frames[-1])
        except (TimeoutError, zmq.ZMQError) as e:
            log.warning("no replay of KV events from %s: %s", self._replay, e or f"silent for {REPLAY_SECONDS:g} s")
        finally:
            socket.close(linger=0)

    def _lose(self, why: str) -> None:
        """What was known may not be so any more."""
        self.gaps += 1
        log.warning("KV events at %s: %s; its %d known blocks are forgotten", self._endpoint, why, len(self._table))
        self._tell(self._table.clear())
