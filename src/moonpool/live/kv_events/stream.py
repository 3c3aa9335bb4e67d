"""The sockets of the event stream: batches to subscribers (PUB), and again to whoever has missed some (ROUTER).

As vLLM's `ZmqEventPublisher`: `[topic, number u64 big-endian, batch]`; a replay is asked for with `["", number]` and
answered with `["", topic, number, batch]`, from that batch on, then the number 2**64 - 1. What the buffer has no more
is replaced by a snapshot: batches that begin with `AllBlocksCleared`, numbered up to the last one published.

Numbers begin with the time (ms) of the process's start in their upper bits, so they grow from one life to the next:
whoever has followed the last one sees a gap. The first batch of a life clears everything.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import zmq
import zmq.asyncio
from msgspec import Struct

from moonpool.errors import ConfigError
from moonpool.live.kv_events.schema import AllBlocksCleared, KvEvent, encoded
from moonpool.wire.security import is_loopback

log = logging.getLogger(__name__)

BUFFER_BYTES = 64 << 20
HIGH_WATER_MESSAGES = 512
"""That a subscriber may be behind; what it is further behind it loses, and finds out by the numbers."""
REPLAYS = 2
"""At once."""
WAITING_REQUESTS = 64
SEND_SECONDS = 2.0
"""Without one batch taken, a replay is given up."""
REPLAY_SECONDS = 300.0
PAUSE_SECONDS = 0.001
"""Between the batches of a snapshot: whoever asks for one after the other does not stop the process."""
RETRY_SECONDS = 0.005
MOST_REQUEST_BYTES = 64
MOST_SUBSCRIPTION_BYTES = 512
END = (1 << 64) - 1

Made = tuple[bytes, Sequence[KvEvent]]
"""(topic, events)"""


class StreamConfig(Struct, frozen=True):
    host: str
    port: int
    """0: any."""
    replay_port: int
    """0: any."""
    buffer_bytes: int = BUFFER_BYTES
    high_water: int = HIGH_WATER_MESSAGES
    reminders: tuple[float, ...] = (1.0, 10.0)
    """Seconds without a batch after which an empty one says that the stream is there, and where: whoever has lost the
    last ones, or was connecting, sees a gap.
    """


class EventStream:
    """Made in a running event loop; `run` answers requests for replays, `close` ends it."""

    def __init__(self, config: StreamConfig, snapshot: Callable[[], tuple[int, Iterator[Made]]]) -> None:
        """`snapshot`: so many batches, of all that has been published and holds still.

        Raises ConfigError where a port is taken.
        """
        self._snapshot = snapshot
        self._most_bytes = config.buffer_bytes
        self._reminder: asyncio.TimerHandle | None = None
        self._context = zmq.Context()
        self._pub = zmq.Socket(self._context, zmq.PUB)
        self._router = zmq.asyncio.Socket(self._context, zmq.ROUTER)
        try:
            self._pub.setsockopt(zmq.SNDHWM, config.high_water)
            # Each of its bytes takes some fifty here, and time of this very thread.
            self._pub.setsockopt(zmq.MAXMSGSIZE, MOST_SUBSCRIPTION_BYTES)
            for option, value in (
                (zmq.SNDHWM, HIGH_WATER_MESSAGES),
                (zmq.RCVHWM, WAITING_REQUESTS),
                (zmq.MAXMSGSIZE, MOST_REQUEST_BYTES),
                (zmq.ROUTER_MANDATORY, 1),
            ):
                self._router.setsockopt(option, value)
            self.address = _bind(self._pub, config.host, config.port, "kv-events-port")
            self.replay_address = _bind(self._router, config.host, config.replay_port, "kv-events-replay-port")
        except BaseException:
            self.close()
            raise
        if not is_loopback(config.host):
            log.warning("KV events, token ids in them, are open to whoever reaches %s", self.address)
        self._next = self._first = int(time.time() * 1000) << 10
        """Numbers: of the next batch, of the first one in the buffer."""
        self._begin = self._first
        self._kept: dict[int, tuple[bytes, bytes]] = {}
        self._kept_bytes = 0
        self._reminders = config.reminders
        self._clock = asyncio.get_running_loop().time
        self._published_at = self._clock()
        self.counts = dict.fromkeys(("batches", "replays", "snapshots", "requests_refused"), 0)
        self.publish(b"", [AllBlocksCleared()])
        log.info("KV events at %s, replays at %s", self.address, self.replay_address)

    def publish(self, topic: bytes, events: Sequence[KvEvent]) -> None:
        self._publish(topic, events)
        self._published_at = self._clock()
        if self._reminder is None:
            self._remind_later(0)

    def _publish(self, topic: bytes, events: Sequence[KvEvent]) -> None:
        number, payload = self._next, encoded(events, time.time())
        self._next += 1
        self._kept[number] = topic, payload
        self._kept_bytes += len(topic) + len(payload)
        while self._kept_bytes > self._most_bytes and self._first < number:
            self._kept_bytes -= sum(map(len, self._kept.pop(self._first)))
            self._first += 1
        self.counts["batches"] += 1
        # A subscriber whose queue is full loses it: a PUB socket never waits.
        self._pub.send_multipart([topic, number.to_bytes(8, "big"), payload], zmq.NOBLOCK)

    async def run(self) -> None:
        """Until cancelled."""
        slots = asyncio.Semaphore(REPLAYS)
        async with asyncio.TaskGroup() as tasks:
            while True:
                # Requests beyond these wait in the socket, as many as it takes.
                await slots.acquire()
                frames = await self._router.recv_multipart()
                if len(frames) != 3 or frames[1] or len(frames[2]) != 8:
                    self.counts["requests_refused"] += 1
                    slots.release()
                    continue
                replay = tasks.create_task(self._replay(frames[0], int.from_bytes(frames[2], "big")))
                replay.add_done_callback(lambda _: slots.release())

    def counters(self) -> dict[str, float]:
        return {f"kv_events_{name}": float(n) for name, n in self.counts.items()} | {
            "kv_events_buffer_bytes": float(self._kept_bytes)
        }

    def close(self) -> None:
        if self._reminder is not None:
            self._reminder.cancel()
        self._pub.close(linger=0)
        self._router.close(linger=0)
        self._context.term()

    def _remind_later(self, which: int) -> None:
        self._reminder = None
        if which < len(self._reminders):
            at = self._published_at + self._reminders[which]
            self._reminder = asyncio.get_running_loop().call_at(at, self._remind, which)

    def _remind(self, which: int) -> None:
        if self._clock() < self._published_at + self._reminders[which]:
            self._remind_later(0)
            return
        self._publish(b"", ())
        self._remind_later(which + 1)

    async def _replay(self, client: bytes, first: int) -> None:
        self.counts["replays"] += 1
        try:
            async with asyncio.timeout(REPLAY_SECONDS):
                last = self._next - 1
                # With its first batch, which clears everything, the buffer tells all of this life.
                if self._begin < self._first > first:
                    await self._send_snapshot(client, last)
                    first = last + 1
                for number in range(max(first, self._first), self._next):
                    if (kept := self._kept.get(number)) is None:
                        break  # it is slower than the stream is: it asks again
                    await self._send(client, kept[0], number, kept[1])
                    await asyncio.sleep(0)
                await self._send(client, b"", END, b"")
        except (TimeoutError, zmq.ZMQError) as e:
            log.info("a replay of KV events was given up: %s", e or "it took too long")

    async def _send_snapshot(self, client: bytes, last: int) -> None:
        """Batches up to the number `last`. What changes meanwhile is in later ones of the stream."""
        self.counts["snapshots"] += 1
        count, made = self._snapshot()
        number = last - count
        await self._send(client, b"", number, encoded([AllBlocksCleared()], time.time()))
        for topic, events in made:
            number += 1
            await self._send(client, topic, number, encoded(events, time.time()))
            await asyncio.sleep(PAUSE_SECONDS)
        assert number == last, f"a snapshot of {count} batches had another number of them"

    async def _send(self, client: bytes, topic: bytes, number: int, payload: bytes) -> None:
        """Raises ZMQError where the client is gone, TimeoutError where it takes nothing."""
        frames = [client, b"", topic, number.to_bytes(8, "big"), payload]
        async with asyncio.timeout(SEND_SECONDS):
            while True:
                try:
                    await self._router.send_multipart(frames, flags=zmq.NOBLOCK)
                except zmq.Again:
                    await asyncio.sleep(RETRY_SECONDS)
                else:
                    return


def _bind(socket: zmq.Socket[Any], host: str, port: int, flag: str) -> str:
    if ":" in host:
        socket.setsockopt(zmq.IPV6, 1)
        host = f"[{host}]"
    try:
        socket.bind(f"tcp://{host}:{port or '*'}")
    except zmq.ZMQError as e:
        raise ConfigError(f"--{flag} {port} on {host}: {e.strerror}") from None
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)
