"""Prompts as blocks with what they are of, vLLM's own classes as recorded, and a subscriber of this process."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import msgspec
import zmq
import zmq.asyncio

from moonpool.core.blocks import block_keys
from moonpool.core.vocabulary import BlockKey, BlockMeta, KeySpace, KeySpaceId

SECONDS = 30.0
SPACE = KeySpace(KeySpaceId("cd" * 16), block_tokens=4, runs=2, run_bytes=4096)
SIZE = SPACE.block_tokens
END = b"\xff" * 8
T = TypeVar("T")


# vllm/distributed/kv_events.py of 0.32.0: these fields, in this order, with these options.


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class KVCacheEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(KVCacheEvent):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(KVCacheEvent):
    pass


class KVEventBatch(EventBatch):
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


def tokens_of(seed: int, blocks: int) -> list[int]:
    return [(seed * 7919 + at * 31) % 50_000 for at in range(blocks * SIZE)]


def keys_and_metas(tokens: Sequence[int], salt: str = "", space: KeySpace = SPACE) -> list[tuple[BlockKey, BlockMeta]]:
    """A prompt's blocks, from its first on, as a worker tells of them."""
    size, keys = space.block_tokens, block_keys(tokens, space, salt)
    return [
        (key, BlockMeta.of(keys[at - 1] if at else None, at, tokens[at * size : (at + 1) * size]))
        for at, key in enumerate(keys)
    ]


def hash_of(key: BlockKey) -> int:
    return int.from_bytes(key, "big") & ((1 << 64) - 1)


Told = set[tuple[str, int]]
"""(medium, hash)"""


def apply(told: Told, payload: bytes) -> None:
    for event in msgspec.msgpack.decode(payload, type=KVEventBatch).events:
        match event:
            case AllBlocksCleared():
                told.clear()
            case BlockStored():
                assert len(event.token_ids) == len(event.block_hashes) * event.block_size
                told |= {(str(event.medium), int(each)) for each in event.block_hashes}
            case BlockRemoved():
                told -= {(str(event.medium), int(each)) for each in event.block_hashes}


class Subscriber:
    """Follows a stream; what it lacks it asks for again."""

    def __init__(self, address: str, replay: str, high_water: int = 1000) -> None:
        self._context = zmq.asyncio.Context()
        self._stream = self._context.socket(zmq.SUB)
        self._replays = self._context.socket(zmq.DEALER)
        self._stream.setsockopt(zmq.RCVHWM, high_water)
        self._stream.subscribe(b"")
        self._stream.connect(address)
        self._replays.connect(replay)
        self.told: Told = set()
        self.expected = 0
        self.replayed: list[int] = []
        """Numbers."""
        self.gaps = 0
        """Filled by replays."""
        self.removals = 0

    async def catch_up(self) -> None:
        await self._replays.send_multipart([b"", self.expected.to_bytes(8, "big")])
        while True:
            _, _, number, payload = await self._replays.recv_multipart()
            if number == END:
                return
            self.replayed.append(int.from_bytes(number, "big"))
            self._take(self.replayed[-1], payload)

    async def until(self, told: Told) -> None:
        """Take batches until this is what is in the pool."""
        while self.told != told:
            _, at, payload = await self._stream.recv_multipart()
            number = int.from_bytes(at, "big")
            if number > self.expected:
                self.gaps += 1
                await self.catch_up()
            if number >= self.expected:
                assert number == self.expected, "a replay left a gap"
                self._take(number, payload)

    def _take(self, number: int, payload: bytes) -> None:
        self.expected = number + 1
        before = len(self.told)
        apply(self.told, payload)
        self.removals += len(self.told) < before

    def close(self) -> None:
        self._context.destroy(linger=0)


def quiet_port() -> int:
    """A free one that stays so: the system gives none of these to connections."""
    while True:
        port = random.randrange(20_000, 32_000)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


def run(work: Coroutine[Any, Any, T]) -> T:
    async def limited() -> T:
        async with asyncio.timeout(SECONDS):
            return await work

    return asyncio.run(limited())
