"""vLLM's KV events as bytes (`vllm/distributed/kv_events.py` of 0.32): batches of maps with their kind as `type`."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence

import msgspec
from msgspec import Struct

from moonpool.core.vocabulary import BlockKey, Tier

MEDIUMS = {Tier.DRAM: "CPU", Tier.SSD: "STORAGE"}
"""vLLM's names of them. What is on GPUs is the engines' own."""
MOST_TOKENS = 16_384
"""Of a batch, if that is more than one block: some 60 KiB."""
MOST_HASHES = 2048

Hash = int


class BlockStored(Struct, tag=True, omit_defaults=True, gc=False):
    """Blocks that continue each other."""

    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: tuple[int, ...]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None
    """One a block: what its hash covers beside tokens."""


class BlockRemoved(Struct, tag=True, gc=False):
    block_hashes: list[Hash]
    medium: str | None


class AllBlocksCleared(Struct, tag=True, gc=False):
    pass


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


class Batch(Struct, array_like=True, gc=False):
    ts: float
    """Seconds of the wall clock."""
    events: Sequence[KvEvent]
    data_parallel_rank: int = 0


class Change(Struct, gc=False):
    """A block has come to a tier of the pool (stored), or left it."""

    stored: bool
    tier: Tier
    key: BlockKey
    parent: BlockKey | None = None
    """As what follows, of what was stored."""
    tokens: bytes = b""
    """u32, little-endian."""
    is_salted: bool = False
    """A prompt's first block, of a prompt with a salt."""


def hash_of(key: BlockKey) -> Hash:
    """A block's name in the events: its key's last 8 bytes, as vLLM shortens its own hashes."""
    return int.from_bytes(key[-8:], "big")


def encoded(events: Sequence[KvEvent], now: float) -> bytes:
    return _encoder.encode(Batch(now, events))


def batches(changes: Iterable[Change]) -> Iterator[list[KvEvent]]:
    """The same in as few events as order allows, none of them too large."""
    batch: list[KvEvent] = []
    tokens = hashes = 0
    run: list[Change] = []
    for change in changes:
        size = len(change.tokens) // 4
        is_full = bool(run or batch) and (tokens + size > MOST_TOKENS or hashes >= MOST_HASHES)
        if run and (is_full or not _continues(run[-1], change)):
            batch.append(_event(run))
            run = []
        if is_full:
            yield batch
            batch, tokens, hashes = [], 0, 0
        run.append(change)
        tokens, hashes = tokens + size, hashes + 1
    if run:
        yield [*batch, _event(run)]


def _continues(last: Change, change: Change) -> bool:
    if (last.stored, last.tier) != (change.stored, change.tier):
        return False
    return not change.stored or (change.parent == last.key and len(change.tokens) == len(last.tokens))


def _event(run: Sequence[Change]) -> KvEvent:
    first, medium = run[0], MEDIUMS[run[0].tier]
    hashes = [hash_of(change.key) for change in run]
    if not first.stored:
        return BlockRemoved(hashes, medium)
    data = b"".join([change.tokens for change in run])
    extra: list[tuple[str, ...] | None] | None = None
    if first.is_salted:
        # The salt itself is the tenant's secret: what stands here equals no salt that anybody has.
        extra = [(f"moonpool:{first.key.hex()}",), *[None] * (len(run) - 1)]
    return BlockStored(
        hashes,
        None if first.parent is None else hash_of(first.parent),
        struct.unpack(f"<{len(data) // 4}I", data),
        len(first.tokens) // 4,
        None,
        medium,
        None,
        extra,
    )


_encoder = msgspec.msgpack.Encoder()
