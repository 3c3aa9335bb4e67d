"""The journal's files: what the Conductor heard and decided, in segments that each replay alone (DESIGN §3, §10).

A segment is a line of text, then frames: 4 bytes length, 8 bytes xxh3-64 of the payload, the payload (msgpack of one
of the structs below). It holds numbers, ids and block keys, never text or token ids. What the disk has lost at the end
of a file, or anywhere, is left out and said.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import BinaryIO

import msgspec
import xxhash
from msgspec import Struct

from moonpool import core
from moonpool.core.actions import Action
from moonpool.core.conductor import ConductorConfig
from moonpool.core.events import Event
from moonpool.core.keydump import KeyGroup
from moonpool.core.snapshot import Snapshot
from moonpool.errors import JournalError

MAGIC = b"moonpool journal 1\n"
SUFFIX = ".journal"
MAX_FRAME_BYTES = 1 << 28
_PREFIX = struct.Struct("<IQ")


class Origin(Struct, frozen=True, tag=True):
    """The first frame. What is in it every version can read."""

    code: str
    """Of the decision core that wrote it (`code_version`)."""
    conductor: str
    """Incarnation of the Conductor."""
    number: int
    """Of the segment in that Conductor's life, from 1."""
    seq: int
    """Of the first record."""
    written_at: float
    """Seconds since the epoch, for people; decisions know the driver's clock only."""
    dropped: int = 0
    """Records before this segment that were not written because the disk was too slow, or full."""


class State(Struct, frozen=True, tag=True):
    """The core before the first record; its generator of random numbers is in it."""

    config: ConductorConfig
    snapshot: Snapshot


class Keys(Struct, frozen=True, tag=True):
    """Some of what the directory held before the first record; between records, until `KeysDone`."""

    groups: tuple[KeyGroup, ...]


class KeysDone(Struct, frozen=True, tag=True):
    """All keys are there: from here on the segment replays alone."""


class Record(Struct, frozen=True, tag=True):
    """One call of the decision core."""

    seq: int
    now: float
    event: Event
    actions: tuple[Action, ...]


class Ended(Struct, frozen=True, tag=True):
    """The last frame of a segment that was ended and not cut off."""

    records: int


class _RawRecord(Struct, frozen=True, tag="Record"):
    """A record whose parts have not been looked at."""

    seq: int
    now: float
    event: msgspec.Raw
    actions: msgspec.Raw


_RawFrame = Origin | State | Keys | KeysDone | Ended | _RawRecord
_encoder = msgspec.msgpack.Encoder()
_origin = msgspec.msgpack.Decoder(Origin)
_frame = msgspec.msgpack.Decoder(_RawFrame)
_event = msgspec.msgpack.Decoder(Event)
_actions = msgspec.msgpack.Decoder(tuple[Action, ...])


class Entry(Struct, frozen=True):
    """A record as it is read: the bytes of its actions are what a replay must give again."""

    seq: int
    now: float
    event: Event
    recorded: bytes

    @property
    def actions(self) -> tuple[Action, ...]:
        return _actions.decode(self.recorded)


class Segment(Struct, frozen=True):
    path: Path
    origin: Origin
    state: State | None
    """None: the file ends before it, or other code wrote it, or part of its keys is missing."""
    groups: tuple[KeyGroup, ...]
    entries: tuple[Entry, ...]
    damage: str
    """What could not be read, empty if all could."""
    is_ended: bool
    """Written to its end; else it is being written, or its process was killed."""


def encode_actions(actions: tuple[Action, ...]) -> bytes:
    return _encoder.encode(actions)


def pack(frame: Origin | State | Keys | KeysDone | Record | Ended) -> bytes:
    payload = _encoder.encode(frame)
    return _PREFIX.pack(len(payload), xxhash.xxh3_64_intdigest(payload)) + payload


@cache
def code_version() -> str:
    """The version, and a digest of the decision core's source: what a replay depends on."""
    from moonpool import __version__

    digest = hashlib.sha256()
    for file in sorted(Path(core.__path__[0]).glob("*.py")):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return f"{__version__}+{digest.hexdigest()[:12]}"


def segments_in(path: Path) -> list[Path]:
    """The file itself, or a directory's segments, oldest first. Raises JournalError where there is none."""
    if path.is_file():
        return [path]
    found = sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else []
    if not found:
        raise JournalError(f"no journal in {path}: give a segment, or a directory of *{SUFFIX} files")
    return found


def read_origin(path: Path) -> Origin:
    """Raises JournalError where it is no segment."""
    with _opened(path) as file:
        head = file.read(len(MAGIC) + _PREFIX.size + (1 << 12))
    if not head.startswith(MAGIC):
        raise JournalError(f"{path} is no journal: it does not begin with {MAGIC.decode().strip()!r}")
    first = next(_payloads(head, []), None)
    try:
        return _origin.decode(first or b"")
    except msgspec.MsgspecError:
        raise JournalError(f"{path} is cut off, or damaged, before its first record") from None


def read_segment(path: Path) -> Segment:
    """Raises JournalError where it is no segment, or one of other code that cannot be read at all."""
    origin = read_origin(path)
    with _opened(path) as file:
        data = file.read()
    damage: list[str] = []
    state: State | None = None
    groups: list[KeyGroup] = []
    entries: list[Entry] = []
    has_keys = is_ended = False
    for payload in _payloads(data, damage):
        try:
            match _frame.decode(payload):
                case _RawRecord(seq, now, event, actions):
                    entries.append(Entry(seq, now, _event.decode(event), bytes(actions)))
                case State() as state:
                    pass
                case Keys(some):
                    groups += some
                case KeysDone():
                    has_keys = True
                case Ended():
                    is_ended = True
        except msgspec.MsgspecError as e:
            if origin.code != code_version():
                raise JournalError(f"{path} {written_by(origin)}, and cannot be read here: {e}") from None
            damage.append(f"a frame that is no record: {e}")
            break
    if state is not None and not has_keys:
        damage.append("the keys of its beginning are not all there, so it does not replay alone")
        state = None
    return Segment(path, origin, state, tuple(groups), tuple(entries), "; ".join(damage), is_ended)


def written_by(origin: Origin) -> str:
    return f"was written by version {origin.code}, this is {code_version()}"


def _payloads(data: bytes, damage: list[str]) -> Iterator[bytes]:
    """The frames up to the first that is damaged; what then is left out is said in `damage`."""
    at = len(MAGIC)
    while at < len(data):
        if at + _PREFIX.size > len(data):
            damage.append(f"the last {len(data) - at} bytes are cut off")
            return
        size, checksum = _PREFIX.unpack_from(data, at)
        payload = data[at + _PREFIX.size : at + _PREFIX.size + size]
        if size > MAX_FRAME_BYTES or len(payload) < size:
            damage.append(f"the last {len(data) - at} bytes are cut off")
            return
        if xxhash.xxh3_64_intdigest(payload) != checksum:
            damage.append(f"the checksum at byte {at} is wrong: the last {len(data) - at} bytes are left out")
            return
        yield payload
        at += _PREFIX.size + size


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as e:
        raise JournalError(f"cannot read {path}: {e.strerror}") from None
