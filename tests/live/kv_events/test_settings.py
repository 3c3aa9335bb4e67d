"""Where KV events are published, as flags and keys say."""

from __future__ import annotations

import asyncio
import logging

import pytest

from moonpool import cli
from moonpool.command.settings import Raw, read_config
from moonpool.core.events import BlocksStored
from moonpool.core.vocabulary import BlockKey, Incarnation, KeySpaceId, PartId, Tier
from moonpool.errors import ConfigError
from moonpool.live.kv_events.publisher import KvPublisher
from moonpool.live.kv_events.stream import EventStream, StreamConfig


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, None),
        ({"kv-events-replay-port": 7}, None),
        ({"kv-events-port": 5557}, StreamConfig("127.0.0.1", 5557, 5558)),
        ({"kv-events-port": 0}, StreamConfig("127.0.0.1", 0, 0)),
        (
            {"kv-events-port": 5557, "kv-events-replay-port": 6000, "kv-events-host": "10.0.0.7"},
            StreamConfig("10.0.0.7", 5557, 6000),
        ),
    ],
)
def test_flags(flags: dict[str, Raw], expected: StreamConfig | None) -> None:
    assert cli._events(read_config(None, flags)) == expected


def test_an_address_that_is_open_to_others_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    async def work(host: str) -> str:
        stream = EventStream(StreamConfig(host, 0, 0), lambda: (0, iter(())))
        stream.close()
        return stream.address

    with caplog.at_level(logging.WARNING):
        asyncio.run(work("127.0.0.1"))
        assert not caplog.records
        asyncio.run(work("0.0.0.0"))
        assert "token ids in them" in caplog.text
    assert asyncio.run(work("::1")).startswith("tcp://[::1]:")


def test_a_mistake_ends_the_stream_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        def held(*_: object) -> None:
            raise RuntimeError("broken")

        publisher = KvPublisher(StreamConfig("127.0.0.1", 0, 0), held, None)  # type: ignore[arg-type]
        stored = BlocksStored(PartId("n"), Incarnation("1"), 1, KeySpaceId("s"), Tier.DRAM, (BlockKey(bytes(16)),))
        publisher.note(stored)
        async with asyncio.timeout(10):
            await publisher.run()
        publisher.note(stored)
        publisher.lost(PartId("n"))
        assert publisher.counters()["kv_events_stopped"] == 1

    asyncio.run(work())
    assert "broken" in caplog.text


def test_a_port_that_is_taken_ends_the_conductor() -> None:
    async def work() -> None:
        stream = EventStream(StreamConfig("127.0.0.1", 0, 0), lambda: (0, iter(())))
        try:
            port = int(stream.address.rpartition(":")[2])
            with pytest.raises(ConfigError, match=f"--kv-events-port {port}"):
                KvPublisher(StreamConfig("127.0.0.1", port, 0), lambda space, keys: [], None)
        finally:
            stream.close()

    asyncio.run(work())
