"""Calls between a node and its clients on the same host (docs/protocol.md), and their frames.

A call with a `serial` is answered by one message with the same serial; the others are one-way. Offsets are bytes from
the start of the arena.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Annotated, Final, Generic, TypeVar

import msgspec
from msgspec import Meta, Struct

from moonpool.core.vocabulary import (
    BlockKey,
    BlockMeta,
    Incarnation,
    KeySpace,
    KeySpaceId,
    NodePeer,
    PartId,
    RequestId,
    Seconds,
    TimeLeft,
)
from moonpool.errors import PoolError
from moonpool.messenger.questions import Question, Reply
from moonpool.messenger.transfer import TAIL, Checksum
from moonpool.wire.codec import decoded

PROTOCOL = 1
MAX_FRAME_BYTES = 16 << 20

Tokens = Annotated[int, Meta(ge=0, le=1 << 20)]
Run = tuple[Annotated[int, Meta(ge=TAIL, le=1 << 20)], Tokens, Tokens]
"""(block or TAIL, first run, number of runs)"""


class Hello(Struct, frozen=True, tag=True):
    """The first message of a client."""

    protocol: int
    name: str
    incarnation: str


class LeaseBlocks(Struct, frozen=True, tag=True):
    serial: int
    space: KeySpace
    keys: tuple[BlockKey, ...]
    marks: bool = False
    """Tell which copy each of them is."""


class FetchBlocks(Struct, frozen=True, tag=True):
    serial: int
    source: NodePeer
    space: KeySpace
    keys: tuple[BlockKey, ...]
    time_left: TimeLeft


class StreamBlocks(Struct, frozen=True, tag=True):
    """The leading blocks that are here in any tier, or come from `source` (the first `fetched` of them), by layers."""

    serial: int
    space: KeySpace
    keys: tuple[BlockKey, ...]
    source: NodePeer | None
    fetched: Annotated[int, Meta(ge=0)]
    time_left: TimeLeft
    marks: bool = False
    """Tell which copy each of them is."""


class OpenRoom(Struct, frozen=True, tag=True):
    serial: int
    space: KeySpace
    keys: tuple[BlockKey, ...]
    tail_tokens: Tokens
    request: RequestId | None = None
    """Others may join the room under this request and attempt, and write into it over Messenger."""
    attempt: int = 0


class JoinRoom(Struct, frozen=True, tag=True):
    serial: int
    request: RequestId
    attempt: int


class TellTokens(Struct, frozen=True, tag=True):
    """One-way: what the blocks of a room that the client writes or reads are of."""

    room: int
    tokens: bytes
    """Token ids (u32, little-endian) from the prompt's first on; those of a part of a block count for nothing."""


class Complete(Struct, frozen=True, tag=True):
    """One-way. One checksum a run, in the order of `runs`."""

    room: int
    runs: tuple[Run, ...]
    checksums: tuple[Checksum, ...]


class AwaitRoom(Struct, frozen=True, tag=True):
    serial: int
    request: RequestId
    attempt: int
    time_left: float


class CloseRoom(Struct, frozen=True, tag=True):
    """One-way."""

    room: int


class Release(Struct, frozen=True, tag=True):
    """One-way."""

    lease: int


class Touch(Struct, frozen=True, tag=True):
    """One-way: these blocks were found on the board and read."""

    space: KeySpaceId
    keys: bytes
    """Packed."""


class Measure(Struct, frozen=True, tag=True):
    serial: int


class Audit(Struct, frozen=True, tag=True):
    """Check that the node's books add up (slow): `Audited`, or a refusal that says what does not."""

    serial: int


class Ask(Struct, frozen=True, tag=True):
    serial: int
    question: Question


class LeaseEach(Struct, frozen=True, tag=True):
    """Blocks by key, whichever are to be had. `keys`: one behind the other."""

    serial: int
    space: KeySpace
    keys: bytes
    time_left: Seconds
    waits: bool
    """Also for blocks that somebody is writing now."""


class OpenEach(Struct, frozen=True, tag=True):
    """A room for all of these blocks; `metas`: one a key, or none."""

    serial: int
    space: KeySpace
    keys: bytes
    metas: tuple[BlockMeta, ...]
    time_left: Seconds = 0.0
    """Until then what an SSD is just writing is waited for, if there will be room then."""


class Commit(Struct, frozen=True, tag=True):
    """All of the room is written and it is closed. `checksums`: u64 (little-endian), one a run."""

    serial: int
    room: int
    checksums: bytes


class Welcome(Struct, frozen=True, tag=True):
    """The answer to `Hello`; the descriptors of the arena and of its board come with it."""

    node: PartId
    incarnation: Incarnation
    arena_bytes: int
    board_entries: int


class Leased(Struct, frozen=True, tag=True):
    serial: int
    lease: int
    offsets: tuple[int, ...]
    marks: bytes = b""
    """Where they were asked for: u64 (little-endian) a block, `digest.copy_mark`."""


class LeasedEach(Struct, frozen=True, tag=True):
    """`offsets`: i64 (little-endian), one a key; -1 for a miss."""

    serial: int
    lease: int
    offsets: bytes


class Committed(Struct, frozen=True, tag=True):
    serial: int


class Told(Struct, frozen=True, tag=True):
    """The answer to `Ask`."""

    serial: int
    reply: Reply


class Fetched(Struct, frozen=True, tag=True):
    serial: int
    readable: int


class Streaming(Struct, frozen=True, tag=True):
    """The answer to `StreamBlocks`: a room whose blocks the client reads as they come; `CloseRoom` ends it."""

    serial: int
    room: int
    offsets: tuple[int, ...]
    runs: int
    """So many leading runs of all the blocks are there."""
    whole: int
    """So many leading blocks are."""
    is_over: bool
    """Nothing more will come."""
    marks: bytes = b""
    """Where they were asked for: u64 (little-endian), of those `whole` blocks that no message has told of before."""


class RoomOpened(Struct, frozen=True, tag=True):
    """The answer to `OpenRoom` and `JoinRoom`: None for a block that is readable already, or has no room."""

    serial: int
    room: int
    space: KeySpace
    offsets: tuple[int | None, ...]
    tail: int | None
    tail_tokens: int


class RoomReady(Struct, frozen=True, tag=True):
    """The answer to `AwaitRoom`; `room` 0 is a miss."""

    serial: int
    room: int = 0
    space: KeySpace | None = None
    offsets: tuple[int, ...] = ()
    tail: int | None = None
    tail_tokens: int = 0


class Measured(Struct, frozen=True, tag=True):
    serial: int
    values: dict[str, float]


class Audited(Struct, frozen=True, tag=True):
    serial: int


class RefusedCall(Struct, frozen=True, tag=True):
    serial: int
    reason: str


class RoomEnded(Struct, frozen=True, tag=True):
    """To a writer, unasked: what it still writes into this room is for nothing; it should close it."""

    room: int


class Arrived(Struct, frozen=True, tag=True):
    """To the reader of a stream, unasked: what of it is there now (as in `Streaming`)."""

    room: int
    runs: int
    whole: int
    is_over: bool
    marks: bytes = b""


Call = (
    Hello
    | LeaseBlocks
    | FetchBlocks
    | StreamBlocks
    | OpenRoom
    | JoinRoom
    | TellTokens
    | Complete
    | AwaitRoom
    | CloseRoom
    | Release
    | Touch
    | Measure
    | Audit
    | Ask
    | LeaseEach
    | OpenEach
    | Commit
)
Answer = (
    Welcome
    | Leased
    | Fetched
    | Streaming
    | Arrived
    | RoomOpened
    | RoomReady
    | Measured
    | Audited
    | RefusedCall
    | RoomEnded
    | Told
    | LeasedEach
    | Committed
)


class UnreadableCall(Struct, frozen=True):
    """Not sent: a call whose frame is whole, and that is to have an answer, but is none that the node knows."""

    serial: int
    reason: str


class _Numbered(Struct, frozen=True):
    """What can be read of a call with mistakes."""

    serial: int


M = TypeVar("M")

_LENGTH = struct.Struct("<I")
_encoder: Final = msgspec.msgpack.Encoder()
_numbered: Final = msgspec.msgpack.Decoder(_Numbered)


def frame(message: Call | Answer) -> bytes:
    """Raises PoolError for a message that is too long for a frame."""
    data = _encoder.encode(message)
    if len(data) > MAX_FRAME_BYTES:
        raise PoolError(f"a {type(message).__name__} of {len(data)} bytes; at most {MAX_FRAME_BYTES}: use fewer blocks")
    return _LENGTH.pack(len(data)) + data


class Frames(Generic[M]):
    """Bytes in, messages out. Knows no socket."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[M], amend: Callable[[bytearray, str], M] | None = None) -> None:
        """`amend`: makes something of a message that cannot be read, or raises PoolError."""
        self._decoder = decoder
        self._amend = amend
        self._data = bytearray()

    @property
    def is_between_frames(self) -> bool:
        return not self._data

    def feed(self, data: bytes) -> list[M]:
        """The messages that are whole now. Raises PoolError for bytes that are no frames: give the connection up."""
        self._data += data
        messages = []
        start = 0
        while len(self._data) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._data, start)
            if length > MAX_FRAME_BYTES:
                raise PoolError(f"a frame announces {length} bytes, at most {MAX_FRAME_BYTES}")
            end = start + _LENGTH.size + length
            if len(self._data) < end:
                break
            body = self._data[start + _LENGTH.size : end]
            try:
                messages.append(decoded(self._decoder, body))
            except msgspec.MsgspecError as e:
                reason = f"unreadable frame of {length} bytes: {e}"
                if self._amend is None:
                    raise PoolError(reason) from None
                messages.append(self._amend(body, reason))
            start = end
        del self._data[:start]
        return messages


def call_frames() -> Frames[Call | UnreadableCall]:
    """Of what a client says: one mistake of it is that call's, and ends nothing else."""
    return Frames[Call | UnreadableCall](msgspec.msgpack.Decoder(Call), _unreadable)


def _unreadable(body: bytearray, reason: str) -> UnreadableCall:
    try:
        return UnreadableCall(decoded(_numbered, body).serial, reason)
    except msgspec.MsgspecError:
        raise PoolError(reason) from None


def answer_frames() -> Frames[Answer]:
    return Frames(msgspec.msgpack.Decoder(Answer))
