"""The append-only index of a slab: which block lies where, with its checksums. It survives the node.

A header, then frames: marker, length, xxh3-64 of the payload, payload (msgpack). A frame that does not check is skipped
and the next marker is looked for, so one bad byte costs one entry. An entry proves only itself: a lost `Removed` may
leave an entry whose bytes were overwritten since. So every block is verified against its own checksums when it leaves
the disk, and the worst that any damage to the index does is a miss. For the same reason nothing waits for fsync: after
`kill -9` the kernel still has all that was written, after a power failure what did not get to the disk is a miss.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import xxhash
from msgspec import Struct

from moonpool.core.vocabulary import BLOCK_KEY_BYTES, BlockKey, KeySpace
from moonpool.store.blocks import Name
from moonpool.store.extents import PAGE_BYTES, page_aligned
from moonpool.wire.codec import decoded

VERSION = 1
MAX_RECORD_BYTES = 1 << 20
WASTE_RECORDS = 10_000
"""The index is written anew when it has more than so many records beside two for each block."""
_MAGIC = b"moonpool-index"
_HEADER = struct.Struct("<14sH")
_FRAME = struct.Struct("<4sIQ")
_MARKER = b"\xb1\x0cK\x91"


class Shelved(Struct, eq=False, gc=False):
    """A block on the SSD. There may be millions, and nothing in it refers back to it: the collector leaves it out."""

    offset: int
    space: KeySpace
    key: BlockKey
    parent: BlockKey | None
    checksums: bytes
    """One u64 (little-endian) a run: as many integers would take ten times the memory."""
    nbytes: int
    """In the slab, whole pages."""
    volume: int = 0
    index: int = 0
    """In its prompt."""
    tokens: bytes = b""
    """Its token ids (u32, little-endian), where whoever put it gave them."""

    @property
    def name(self) -> Name:
        return self.space.id, self.key


class _Space(Struct, frozen=True, tag="k", array_like=True):
    number: int
    space: KeySpace


class _Stored(Struct, frozen=True, tag="s", array_like=True):
    space: int
    key: BlockKey
    parent: BlockKey | None
    offset: int
    checksums: bytes
    index: int = 0
    tokens: bytes = b""


class _Removed(Struct, frozen=True, tag="r", array_like=True):
    space: int
    key: BlockKey


_Record = _Space | _Stored | _Removed
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[_Record] = msgspec.msgpack.Decoder(_Record)


@dataclass(slots=True)
class Recovered:
    """What an index still says."""

    entries: Sequence[Shelved] = field(default_factory=list)
    """The oldest first."""
    losses: list[str] = field(default_factory=list)
    """What was dropped and why, fit for the log; empty for an index that was whole."""
    records: int = 0
    """In the file."""
    spaces: dict[KeySpace, int] = field(default_factory=dict)
    """The numbers that its records use."""
    nbytes: int = 0
    """Of the file."""


def recover(path: Path, slab_bytes: int) -> Recovered:
    """Read an index; whatever is not provably an entry is dropped. Raises OSError where the file cannot be read."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return Recovered()
    if len(data) < _HEADER.size or not data.startswith(_MAGIC):
        return Recovered(losses=[f"{len(data)} bytes that are no index"])
    if (version := _HEADER.unpack_from(data)[1]) != VERSION:
        return Recovered(losses=[f"all of it: it is of version {version}, this is Moonpool's version {VERSION}"])
    recovered = Recovered(nbytes=len(data))
    entries = _replay(data, recovered)
    kept = _without_overlaps(list(entries.values()), slab_bytes)
    if len(kept) < len(entries):
        recovered.losses.append(f"{len(entries) - len(kept)} blocks beyond the slab's end or overwritten by later ones")
    recovered.entries = kept
    return recovered


class _KnownSpace:
    """What is the same for all entries of a key space."""

    def __init__(self, space: KeySpace) -> None:
        self.space = space
        self.slab_bytes = page_aligned(space.block_bytes)
        self.checksum_bytes = 8 * space.runs
        self.is_sound = space.runs > 0 and space.run_bytes > 0


def _replay(data: bytes, recovered: Recovered) -> dict[Name, Shelved]:
    spaces: dict[int, _KnownSpace] = {}
    entries: dict[Name, Shelved] = {}
    position, size, bad_bytes, unknown = _HEADER.size, len(data), 0, 0
    while position < size:
        record, end = _record_at(data, position)
        if record is None:
            found = data.find(_MARKER, position + 1)
            following = size if found < 0 else found
            bad_bytes += following - position
            position = following
            continue
        position = end
        recovered.records += 1
        if isinstance(record, _Space):
            spaces[record.number] = _KnownSpace(record.space)
            continue
        known = spaces.get(record.space)
        if known is None:
            unknown += 1
            continue
        # The newest place counts, and the order is that of the newest records.
        name = known.space.id, record.key
        entries.pop(name, None)
        if isinstance(record, _Removed):
            continue
        if not _is_sound(record, known):
            unknown += 1
            continue
        entries[name] = entry = Shelved(
            record.offset, known.space, record.key, record.parent, record.checksums, known.slab_bytes
        )
        entry.index, entry.tokens = record.index, record.tokens
    if bad_bytes:
        recovered.losses.append(f"{bad_bytes} bytes that are no whole record")
    if unknown:
        recovered.losses.append(f"{unknown} records that make no sense")
    recovered.spaces = {known.space: number for number, known in spaces.items()}
    return entries


def _record_at(data: bytes, position: int) -> tuple[_Record | None, int]:
    start = position + _FRAME.size
    if start > len(data):
        return None, position
    marker, length, digest = _FRAME.unpack_from(data, position)
    end = start + length
    if marker != _MARKER or length > MAX_RECORD_BYTES or end > len(data):
        return None, position
    payload = data[start:end]
    if xxhash.xxh3_64_intdigest(payload) != digest:
        return None, position
    try:
        return decoded(_decoder, payload), end
    except msgspec.MsgspecError:
        return None, position


def _is_sound(entry: _Stored, known: _KnownSpace) -> bool:
    return (
        known.is_sound
        and len(entry.checksums) == known.checksum_bytes
        and len(entry.key) == BLOCK_KEY_BYTES
        and entry.offset >= 0
        and not entry.offset % PAGE_BYTES
    )


def _without_overlaps(entries: Sequence[Shelved], slab_bytes: int) -> Sequence[Shelved]:
    """Of two entries that share bytes the later record is the one whose bytes are there."""
    begins = np.array([entry.offset for entry in entries], np.int64)
    ends = begins + np.array([entry.nbytes for entry in entries], np.int64)
    order = np.argsort(begins)
    begins, ends = begins[order], ends[order]
    if not entries or (bool(np.all(ends[:-1] <= begins[1:])) and ends[-1] <= slab_bytes):
        return entries
    age = {id(entry): position for position, entry in enumerate(entries)}
    kept: list[Shelved] = []
    for entry in sorted(entries, key=lambda entry: entry.offset):
        if entry.offset + entry.nbytes > slab_bytes:
            continue
        is_newest = True
        while kept and kept[-1].offset + kept[-1].nbytes > entry.offset:
            if age[id(kept[-1])] > age[id(entry)]:
                is_newest = False
                break
            kept.pop()
        if is_newest:
            kept.append(entry)
    kept.sort(key=lambda entry: age[id(entry)])
    return kept


class Index:
    """Open for appending. Thread-safe. Every method raises OSError where the disk refuses."""

    def __init__(self, path: Path, found: Recovered) -> None:
        """Goes on with what was found; where that is not all that the file says, a new one takes its place at once."""
        self._path = path
        self._lock = threading.Lock()
        self._fd = -1
        self._is_void = False
        self._size = found.nbytes
        self._records = found.records
        self._spaces = dict(found.spaces)
        if found.losses or not found.nbytes or self.has_waste(len(found.entries)):
            self.rewrite(found.entries)
        else:
            self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_APPEND)

    def append(self, stored: Sequence[Shelved], removed: Sequence[Shelved]) -> None:
        """All of it, or (as far as the file goes) nothing."""
        with self._lock:
            spaces = dict(self._spaces)
            data, records = _encode(stored, removed, spaces)
            try:
                self._write(data)
            except OSError:
                # Half a record must not stand before the next one's.
                os.ftruncate(self._fd, self._size)
                raise
            self._spaces = spaces
            self._size += len(data)
            self._records += records

    def has_waste(self, live: int) -> bool:
        return self._records > 2 * live + WASTE_RECORDS

    def rewrite(self, entries: Iterable[Shelved]) -> None:
        """Only these entries from now on."""
        with self._lock:
            spaces: dict[KeySpace, int] = {}
            data, records = _encode(list(entries), (), spaces)
            data = _HEADER.pack(_MAGIC, VERSION) + data
            fresh = self._path.with_suffix(".new")
            fd = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_APPEND, 0o600)
            try:
                write_all(fd, data)
                fresh.replace(self._path)
                if self._is_void:
                    self._path.unlink(missing_ok=True)
            except BaseException:
                os.close(fd)
                with contextlib.suppress(OSError):
                    fresh.unlink()
                raise
            old, self._fd = self._fd, fd
            if old >= 0:
                os.close(old)
            self._size, self._records, self._spaces = len(data), records, spaces

    def discard(self) -> None:
        """Nothing of it is to be found again, even while a write to this disk hangs. Needs no room on it."""
        # Not under the lock, which a write that hangs has. A `rewrite` that is about to end looks at the flag after it.
        self._is_void = True
        self._path.unlink(missing_ok=True)

    def close(self) -> None:
        with self._lock:
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)

    def _write(self, data: bytes) -> None:
        write_all(self._fd, data)


def write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _encode(stored: Sequence[Shelved], removed: Sequence[Shelved], spaces: dict[KeySpace, int]) -> tuple[bytes, int]:
    """Frames, and their number. Key spaces not in `spaces` come first and are added to it."""
    records: list[_Record] = []
    for entry in (*removed, *stored):
        if entry.space not in spaces:
            spaces[entry.space] = max(spaces.values(), default=-1) + 1
            records.append(_Space(spaces[entry.space], entry.space))
    records += [_Removed(spaces[entry.space], entry.key) for entry in removed]
    records += [_Stored(spaces[e.space], e.key, e.parent, e.offset, e.checksums, e.index, e.tokens) for e in stored]
    frames = bytearray()
    for record in records:
        payload = _encoder.encode(record)
        frames += _FRAME.pack(_MARKER, len(payload), xxhash.xxh3_64_intdigest(payload))
        frames += payload
    return bytes(frames), len(records)
