"""A checksum behind each header: it says which run of which block follows, and a run that is whole in the wrong place
would be wrong data. (The payload has checksums of its own; TCP's are too weak for this much of it.)"""

from __future__ import annotations

import struct

import xxhash

from moonpool.errors import TransferError

_DIGEST = struct.Struct("<Q")


def seal(header: bytes) -> bytes:
    return header + _DIGEST.pack(xxhash.xxh3_64_intdigest(header))


def unseal(sealed: bytes | bytearray | memoryview) -> memoryview:
    """The header. Raises TransferError where it was damaged on its way, or is none."""
    header, digest = memoryview(sealed)[: -_DIGEST.size], memoryview(sealed)[-_DIGEST.size :]
    if len(digest) < _DIGEST.size or _DIGEST.unpack(digest)[0] != xxhash.xxh3_64_intdigest(header):
        raise TransferError(f"unreadable frame of {len(sealed)} bytes: its checksum is wrong")
    return header
