"""The words that every part of Moonpool shares: ids, keys, layouts, limits.

All times are seconds, all sizes bytes, all lengths tokens unless the name says otherwise.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from typing import Annotated, Literal, NewType

from msgspec import Meta, Struct

from moonpool.errors import PoolError

RequestId = NewType("RequestId", str)
"""Unique in the cluster's life: the gateway's incarnation and a counter."""
PartId = NewType("PartId", str)
"""A configured name that outlives the process: `prefill-0`, `decode-1`, `node-0`, `gateway-0`."""
Incarnation = NewType("Incarnation", str)
"""A random id of one process's life."""
BlockKey = NewType("BlockKey", bytes)
"""16 bytes: the chained prefix hash of one whole block (`blocks.py`)."""
KeySpaceId = NewType("KeySpaceId", str)
"""Hex id of the root that all block keys of one model, dtype and layout share."""

PlacementPolicy = Literal[
    "kvcache-centric",
    "algorithm-1",
    "cache-aware",
    "prefix-affine",
    "load-balance",
    "round-robin",
    "random",
    "lmetric",
    "dynamo",
]
"""How prefill and decode instances are chosen (`placement.py`)."""

BLOCK_KEY_BYTES = 16
MAX_ID_CHARS = 256
MAX_ADDRESS_CHARS = 4096
"""A path may have as many."""


Count = Annotated[int, Meta(ge=0, le=1 << 53)]
"""Of tokens, pages, bytes, attempts: what comes from elsewhere is held to it when it is decoded, so that sums of such
counts can be sent on, and be computed with as floats."""
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
"""What is no number, or has no end, is refused when it is decoded."""
TimeLeft = Annotated[float, Meta(ge=-1e9, le=1e9)]
"""Seconds; below 0: the deadline has passed."""


class PartKind(enum.Enum):
    GATEWAY = "gateway"
    NODE = "node"
    PREFILL = "prefill"
    DECODE = "decode"
    STAGE = "stage"
    """A further stage of a pipelined prefill instance; it takes its orders from the instance, which is the first."""
    COUPLED = "coupled"
    """Prefill and decode instance in one; it takes requests that it serves from their first to their last step."""

    @property
    def prefills(self) -> bool:
        return self in (PartKind.PREFILL, PartKind.COUPLED)

    @property
    def decodes(self) -> bool:
        return self in (PartKind.DECODE, PartKind.COUPLED)


class Tier(enum.Enum):
    # Looked up in tables for every announcement: the hash of `Enum` is written in Python.
    __hash__ = object.__hash__

    DRAM = "dram"
    SSD = "ssd"


class KeySpace(Struct, frozen=True):
    """How the blocks of one model look to the pool: `runs` runs of `run_bytes` bytes, one run a layer.

    A run holds `block_tokens` tokens as `[k, v][token][kv_head][head_dim]`; a partial tail of t tokens
    has the same shape with t tokens, so its runs are `tail_run_bytes(t)` long. What comes from elsewhere is held to
    the limits when it is decoded.
    """

    id: Annotated[KeySpaceId, Meta(max_length=MAX_ID_CHARS)]
    block_tokens: Annotated[int, Meta(ge=1, le=1 << 32)]
    runs: Annotated[int, Meta(ge=1, le=1 << 16)]
    run_bytes: Annotated[int, Meta(ge=1, le=1 << 40)]

    @property
    def block_bytes(self) -> int:
        return self.runs * self.run_bytes

    def tail_run_bytes(self, tokens: int) -> int:
        return self.run_bytes * tokens // self.block_tokens


class BlockMeta(Struct, frozen=True, array_like=True):
    """What a block is part of; kept with it, and all of it optional."""

    parent: BlockKey | None = None
    """Of the block before it in its prompt: without it a block is no use to a prompt, so it goes first (`eviction`)."""
    index: Annotated[int, Meta(ge=0, le=1 << 32)] = 0
    """In its prompt."""
    tokens: bytes = b""
    """The token ids, as little-endian u32; at most `block_tokens` of them."""

    @classmethod
    def of(cls, parent: BlockKey | None = None, index: int = 0, tokens: Sequence[int] = ()) -> BlockMeta:
        """Raises PoolError for what are no token ids, each a u32."""
        try:
            return cls(parent, index, struct.pack(f"<{len(tokens)}I", *tokens))
        except (struct.error, TypeError) as e:
            raise PoolError(f"a block's tokens are whole numbers from 0 to {2**32 - 1}: {e}") from None

    @property
    def token_ids(self) -> tuple[int, ...]:
        return struct.unpack(f"<{len(self.tokens) // 4}I", self.tokens)


class Slo(Struct, frozen=True):
    """Limits in seconds; None means no limit and no refusal because of it."""

    ttft: Seconds | None = None
    tbt: Seconds | None = None


class PriorityClass(Struct, frozen=True, forbid_unknown_fields=True):
    """Requests that are treated alike (`classes.py`)."""

    name: str
    rank: int = 0
    """The smaller, the sooner."""
    slo: Slo = Slo()
    """Of its requests that have no limits of their own."""
    share: float = 0.0
    """Of both pools, kept from classes of a later rank: 0 keeps nothing."""


class Peer(Struct, frozen=True):
    """One process as others reach it; a message for another incarnation is dropped by the receiver."""

    id: Annotated[PartId, Meta(max_length=MAX_ID_CHARS)]
    incarnation: Annotated[Incarnation, Meta(max_length=MAX_ID_CHARS)]
    address: Annotated[str, Meta(max_length=MAX_ADDRESS_CHARS)]
    """Control address, `tcp://host:port`."""


class NodePeer(Struct, frozen=True):
    """A node as workers and other nodes reach it."""

    id: Annotated[PartId, Meta(max_length=MAX_ID_CHARS)]
    incarnation: Annotated[Incarnation, Meta(max_length=MAX_ID_CHARS)]
    address: Annotated[str, Meta(max_length=MAX_ADDRESS_CHARS)]
    """Control address, `tcp://host:port`."""
    data_address: Annotated[str, Meta(max_length=MAX_ADDRESS_CHARS)]
    """Messenger's tcp transport, `host:port`."""
    socket_path: Annotated[str, Meta(max_length=MAX_ADDRESS_CHARS)]
    """Unix stream socket for clients on the node's host."""


class Capacity(Struct, frozen=True):
    """What a part can hold; a field that does not apply to its kind stays 0."""

    pages: Count = 0
    """KV pages of the engine (page = block)."""
    slots: Count = 0
    """Most requests in one batch (decode), most queued orders (prefill)."""
    context_tokens: Count = 0
    """Longest prompt + output that the engine takes."""
    dram_bytes: Count = 0
    step_tokens: Count = 0
    """Most prompt tokens that a step computes beside decoding; 0: none (coupled)."""


class Chain(Struct, frozen=True):
    """The keys of a prompt's whole blocks in one key space, first block first."""

    space: KeySpaceId
    keys: tuple[BlockKey, ...]


class RejectReason(enum.Enum):
    """Why a request is not served. The gateway maps each to a status (docs/protocol.md)."""

    QUEUE_FULL = "queue-full"
    DISPLACED = "displaced"
    TTFT_SLO = "ttft-slo"
    TBT_SLO = "tbt-slo"
    NO_INSTANCE = "no-instance"
    CONTEXT = "context"
    KV_ROOM = "kv-room"
    NEVER_FITS = "never-fits"
    UNSERVABLE = "unservable"
    DEADLINE = "deadline"
    ATTEMPTS = "attempts"
