"""The stream's sockets: numbers over lives, replays, snapshots, readers that stand still, and strangers."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator

import msgspec
import pytest
import zmq
import zmq.asyncio

from moonpool.core.vocabulary import BlockKey, Tier
from moonpool.errors import ConfigError
from moonpool.live.kv_events import stream as module
from moonpool.live.kv_events.schema import Change, KvEvent, batches
from moonpool.live.kv_events.stream import EventStream, Made, StreamConfig

from .kit import END, Subscriber, Told, hash_of, run

CONFIG = StreamConfig("127.0.0.1", 0, 0, reminders=())


def key_of(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(16, "big"))


def come(number: int) -> list[KvEvent]:
    (events,) = batches([Change(True, Tier.DRAM, key_of(number), None, b"\1\0\0\0" * 16)])
    return events


def go(number: int) -> list[KvEvent]:
    (events,) = batches([Change(False, Tier.DRAM, key_of(number))])
    return events


class Source:
    """Blocks that come and go, and the snapshot of them."""

    def __init__(self) -> None:
        self.there: dict[int, None] = {}
        self.between: list[int] = []
        """These go while a snapshot is sent."""
        self.stream: EventStream | None = None

    def put(self, number: int) -> None:
        assert self.stream is not None
        self.there[number] = None
        self.stream.publish(b"kv", come(number))

    def remove(self, number: int) -> None:
        assert self.stream is not None
        del self.there[number]
        self.stream.publish(b"kv", go(number))

    def snapshot(self) -> tuple[int, Iterator[Made]]:
        return len(numbers := list(self.there)), self._made(numbers)

    def _made(self, numbers: list[int]) -> Iterator[Made]:
        for number in numbers:
            yield b"kv", come(number) if number in self.there else []
            while self.between:
                self.remove(self.between.pop())

    @property
    def told(self) -> Told:
        return {("CPU", hash_of(key_of(number))) for number in self.there}


@contextlib.asynccontextmanager
async def streaming(config: StreamConfig = CONFIG) -> AsyncIterator[tuple[EventStream, Source]]:
    source = Source()
    source.stream = stream = EventStream(config, source.snapshot)
    answering = asyncio.create_task(stream.run())
    try:
        yield stream, source
    finally:
        answering.cancel()
        await asyncio.wait([answering])
        stream.close()


@contextlib.contextmanager
def subscriber(stream: EventStream, high_water: int = 1000) -> Iterator[Subscriber]:
    made = Subscriber(stream.address, stream.replay_address, high_water)
    try:
        yield made
    finally:
        made.close()


async def joined(source: Source, made: Subscriber) -> None:
    """Its subscription has come: it hears a batch as it is published."""
    while not await made._stream.poll(20):
        source.put(max(source.there, default=0) + 1)


def test_who_comes_late_has_it_all_and_then_hears_the_rest() -> None:
    async def work() -> None:
        async with streaming() as (stream, source):
            for number in range(5):
                source.put(number)
            source.remove(2)
            with subscriber(stream) as late:
                await late.catch_up()
                assert late.told == source.told
                assert late.replayed == [*range(late.replayed[0], late.replayed[0] + 7)]
                await joined(source, late)
                source.remove(3)
                await late.until(source.told)
                assert stream.counts["snapshots"] == 0

    run(work())


def test_a_gap_is_filled_from_the_buffer() -> None:
    async def work() -> None:
        async with streaming() as (stream, source):
            with subscriber(stream) as follower:
                await follower.catch_up()
                await joined(source, follower)
                await follower.until(source.told)
                for number in range(100, 120):
                    source.put(number)
                for _ in range(15):
                    await follower._stream.recv_multipart()
                await follower.until(source.told)
                assert follower.gaps == 1
                assert stream.counts["snapshots"] == 0

    run(work())


def test_what_the_buffer_has_no_more_comes_as_a_snapshot() -> None:
    async def work() -> None:
        async with streaming(msgspec.structs.replace(CONFIG, buffer_bytes=500)) as (stream, source):
            for number in range(50):
                source.put(number)
            for number in range(0, 50, 3):
                source.remove(number)
            source.between = [10, 11, 49]
            with subscriber(stream) as late:
                await late.catch_up()
                # What went while it was sent is in the batches after it.
                assert late.told == source.told
                assert stream.counts["snapshots"] == 1
                assert late.replayed == [*range(late.replayed[0], late.expected)]
                await joined(source, late)
                await late.until(source.told)
                assert stream.counters()["kv_events_buffer_bytes"] <= 500
                # Of what it has heard all but the last batch, only that is sent again.
                late.expected -= 1
                late.replayed.clear()
                await late.catch_up()
                assert len(late.replayed) == 1
                assert stream.counts["snapshots"] == 1

    run(work())


def test_numbers_grow_over_lives_and_a_new_life_clears(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with streaming() as (stream, source):
            for number in range(3):
                source.put(number)
            ports = [int(address.rpartition(":")[2]) for address in (stream.address, stream.replay_address)]
            with subscriber(stream) as follower:
                await follower.catch_up()
                await joined(source, follower)
                await follower.until(source.told)
                expected = follower.expected
                stream.close()
                async with streaming(StreamConfig("127.0.0.1", *ports, reminders=())) as (_, again):
                    again.put(7)
                    await joined(again, follower)
                    await follower.until(again.told)
                    assert follower.gaps == 1
                    assert follower.replayed[-1] > expected + 1000

    run(work())


def test_who_has_lost_the_last_batches_hears_of_it_though_nothing_more_comes() -> None:
    async def work() -> None:
        async with streaming(msgspec.structs.replace(CONFIG, reminders=(0.1, 0.3))) as (stream, source):
            with subscriber(stream) as follower:
                await follower.catch_up()
                await joined(source, follower)
                source.put(70)
                source.put(71)
                while True:
                    number = (await follower._stream.recv_multipart())[1]
                    if int.from_bytes(number, "big") == stream._next - 1:
                        break
                await follower.until(source.told)
                # Then it is silent, but for the second time that it says so.
                count = stream.counts["batches"]
                await asyncio.sleep(0.6)
                assert stream.counts["batches"] <= count + 1

    run(work())


def test_a_reader_that_stands_still_costs_no_more_than_its_high_water_mark() -> None:
    async def work() -> None:
        config = msgspec.structs.replace(CONFIG, buffer_bytes=1 << 16, high_water=8)
        async with streaming(config) as (stream, source):
            with subscriber(stream, high_water=1) as slow, subscriber(stream) as quick:
                await joined(source, slow)
                await joined(source, quick)
                source.there.clear()
                source.put(0)
                for number in range(1, 20_000):
                    # Each takes 2 KiB: all of it is far more than the kernel's buffers hold.
                    events = come(number) * 16
                    stream.publish(b"kv", events)
                    if number % 50 == 0:
                        await asyncio.sleep(0)
                source.put(20_000)
                source.there = dict.fromkeys((0, 20_000))
                # What it was sent it takes, sees what it lacks, and has what is there.
                for follower in (slow, quick):
                    await follower.catch_up()
                    await follower.until(source.told)
                heard = []
                while await slow._stream.poll(100):
                    heard.append(await slow._stream.recv_multipart())
                assert 0 < len(heard) < 15_000

    run(work())


def test_strangers_cost_nothing() -> None:
    async def work() -> None:
        async with streaming() as (stream, source):
            source.put(1)
            context = zmq.asyncio.Context()
            host, port = stream.replay_address.removeprefix("tcp://").split(":")
            try:
                with socket.create_connection((host, int(port))) as raw:
                    raw.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
                stranger = context.socket(zmq.DEALER)
                stranger.connect(stream.replay_address)
                for frames in ([b"x"], [b"", b"1234567"], [b"", b"12345678", b"x"], [b"x", b"12345678"], [b""] * 5):
                    await stranger.send_multipart(frames)
                # Requests are heard one after the other.
                await stranger.send_multipart([b"", (1 << 63).to_bytes(8, "big")])
                assert (await stranger.recv_multipart())[2] == END
                assert stream.counts["requests_refused"] == 5
                assert stream.counts["replays"] == 1
                # Too long for a request: the connection is cut, and comes again.
                await stranger.send_multipart([b"", b"x" * 10_000])
                with subscriber(stream) as good:
                    await good.catch_up()
                    assert good.told == source.told
                # From beyond the end there is nothing.
                await stranger.send_multipart([b"", (1 << 63).to_bytes(8, "big")])
                assert (await stranger.recv_multipart())[2] == END
                assert stream.counts["requests_refused"] == 5
            finally:
                context.destroy(linger=0)

    run(work())


def test_an_endless_subscription_is_not_taken() -> None:
    """ZMQ keeps a node for each of its bytes, and makes them in the thread that publishes."""

    async def work() -> None:
        async with streaming() as (stream, source):
            host, _, port = stream.address.removeprefix("tcp://").rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            # ZMTP 3: signature, version, mechanism NULL, not a server; READY of a SUB; a message of the topic's size
            writer.write(b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + bytes(32))
            ready = b"\x05READY\x0bSocket-Type\x00\x00\x00\x03SUB"
            writer.write(bytes([4, len(ready)]) + ready + b"\x02" + (1 << 20).to_bytes(8, "big") + b"\x01")
            writer.write(bytes((1 << 20) - 1))
            with contextlib.suppress(ConnectionError):
                await reader.read()  # until it is closed there
            writer.close()
            with subscriber(stream) as made:
                await joined(source, made)

    run(work())


def test_a_replay_that_nobody_takes_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SEND_SECONDS", 0.2)

    async def work() -> None:
        async with streaming() as (stream, source):
            for number in range(1, 4000):
                source.there[number] = None
                stream.publish(b"kv", come(number) * 40)
            context = zmq.asyncio.Context()
            stuck = [context.socket(zmq.DEALER) for _ in range(module.REPLAYS)]
            try:
                for each in stuck:
                    each.setsockopt(zmq.RCVHWM, 1)
                    each.connect(stream.replay_address)
                    await each.send_multipart([b"", bytes(8)])
                with subscriber(stream) as good:
                    await good.catch_up()
                    assert good.told == source.told
            finally:
                context.destroy(linger=0)

    run(work())


def test_a_port_that_is_taken_is_named() -> None:
    async def work() -> None:
        async with streaming() as (stream, _):
            port = int(stream.address.rpartition(":")[2])
            with pytest.raises(ConfigError, match=f"--kv-events-port {port} on 127.0.0.1: Address already in use"):
                EventStream(StreamConfig("127.0.0.1", port, 0), Source().snapshot)
            with pytest.raises(ConfigError, match=f"--kv-events-replay-port {port} on"):
                EventStream(StreamConfig("127.0.0.1", 0, port), Source().snapshot)

    run(work())
