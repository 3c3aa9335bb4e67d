"""The connecting side of `giving`: one call over one connection, in the calling thread.

Raises RefusedError where the node refuses: then the connection is still good. After any other error it is not, since
there may be bytes on it that nobody has read: to read on would be to take them for frames.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, groupby

from moonpool.core.vocabulary import BlockKey, KeySpaceId
from moonpool.errors import PoolError, TransferError
from moonpool.messenger.channel import SPIN_SECONDS, Channel, Header, Part, framed
from moonpool.messenger.digest import RunDigests
from moonpool.messenger.giving import receive
from moonpool.messenger.pace import moving
from moonpool.messenger.questions import (
    VERIFIED_KEYS,
    YES,
    Checksums,
    GetBlocks,
    Given,
    Marks,
    PutBlocks,
    Question,
    Refused,
    Reply,
    Verify,
    pack_sums,
    packed,
    stretches,
    unpack_sums,
    unpacked,
)
from moonpool.messenger.transfer import Bytes
from moonpool.messenger.waiting import RefusedError

FIRST_BYTES = 1 << 20
"""Sent, then summed up while the other side receives it. Then twice as much each time, up to GROUP_BYTES."""
SMALL_BYTES = 128 << 10
"""A put of no more goes with one system call: to wake the other side costs more than to sum this up."""
GROUP_BYTES = 4 << 20
"""Fewer and larger system calls gain more than the processor's cache does."""
BOOKS_SECONDS = 400e-6
"""What a node has to do once it has the last bytes (s): sum them up, and write its books."""


def ask(channel: Channel, question: Question, until: float) -> Reply:
    channel.send_header(question, until)
    reply = _heard(channel, until, soon=SPIN_SECONDS)
    if not isinstance(reply, Reply):
        raise TransferError(f"{type(reply).__name__} came as the answer to {type(question).__name__}")
    return reply


def get(
    channel: Channel,
    request: GetBlocks,
    place: Callable[[Given], Sequence[Sequence[Bytes] | None]],
    landed: Callable[[int, Sequence[int]], None],
    until: float,
) -> list[int | None]:
    """For each block None where it did not come, or not as it was sent; else which copy it is (0: all of its runs).

    `place` says where each of those that come goes, in pieces (None: nowhere); `landed` is called with the number of
    each among those that come.
    """
    channel.send_header(request, until)
    nbytes = len(request.keys) // 16 * request.runs * request.space.run_bytes
    # A node that is to give only what it has waits for nobody else.
    with moving(nbytes, until) if request.here else contextlib.nullcontext(until) as limit:
        given = _heard(channel, limit, soon=SPIN_SECONDS)
    if not isinstance(given, Given) or len(given.marks) * 16 != len(request.keys):
        raise TransferError(f"{type(given).__name__} came as the answer to GetBlocks, or not one mark a key")
    sums, coming = _sums(given.checksums), given.marks.count(YES)
    if len(sums) != coming * request.runs:
        raise TransferError(f"{coming} blocks of {request.runs} runs with {len(sums)} checksums")
    copies = _sums(given.copies) or (0,) * coming
    if len(copies) != coming:
        raise TransferError(f"{coming} blocks with marks of {len(copies)} copies")
    if len(given.metas) != (coming if request.here else 0):
        raise TransferError(f"{coming} blocks with {len(given.metas)} metas")
    targets = place(given)
    with moving(nbytes, until) as limit:
        came = _receive_given(channel, request, targets, list(sums), copies, landed, limit)
    damaged = [at for at, copy in enumerate(came) if copy is None and targets[at] is not None]
    if damaged:
        sent = [key for key, mark in zip(unpacked(request.keys), given.marks, strict=True) if mark == YES]
        tell_damaged(channel, request.space.id, [sent[at] for at in damaged], until)
    coming_next = iter(came)
    return [next(coming_next) if mark == YES else None for mark in given.marks]


def tell_damaged(channel: Channel, space: KeySpaceId, keys: Sequence[BlockKey], until: float) -> None:
    """These came from there with a wrong checksum: if they are damaged there, they go. Some of them, if many did."""
    with contextlib.suppress(RefusedError):
        ask(channel, Verify(space, packed(keys[:VERIFIED_KEYS])), until)


def _receive_given(
    channel: Channel,
    request: GetBlocks,
    targets: Sequence[Sequence[Bytes] | None],
    sums: list[int],
    copies: Sequence[int],
    landed: Callable[[int, Sequence[int]], None],
    until: float,
) -> list[int | None]:
    """As `get`, of those blocks alone that come."""
    came: list[int | None] = []
    for is_wanted, stretch in groupby(targets, lambda pieces: pieces is not None):
        if not is_wanted:
            for _ in stretch:
                channel.skip(request.runs * request.space.run_bytes, until)
                came.append(None)
            continue
        wanted = [pieces for pieces in stretch if pieces is not None]
        for found in receive(channel, wanted, request.space.run_bytes, until):
            position = len(came)
            is_good = found == sums[position * request.runs : (position + 1) * request.runs]
            came.append(copies[position] if is_good else None)
            if is_good:
                landed(position, found)
    return came


def put(channel: Channel, request: PutBlocks, sources: Sequence[Sequence[Bytes]], until: float) -> bytes:
    """One mark a key: YES, NO where the node had it already, or DAMAGED. `sources`: pieces of each block."""
    space = request.space
    is_small = len(sources) * space.block_bytes <= SMALL_BYTES
    unsent: list[Part] = [framed(request)]
    if not is_small:
        # At once: the node makes room while the first bytes are copied.
        channel.send_all(unsent, until)
        unsent = []
    limit = FIRST_BYTES
    for stretch in stretches(len(sources), space.block_bytes):
        digests = RunDigests(space.run_bytes)
        for group in _groups(sources[stretch], limit):
            unsent += group
            if not is_small:
                # Summed up while the node receives it.
                channel.send_all(unsent, until)
                unsent = []
            for part in group:
                digests.feed(part)
        limit = GROUP_BYTES
        unsent.append(framed(Checksums(pack_sums(digests.checksums))))
    channel.send_all(unsent, until)
    reply = _heard(channel, until, soon=BOOKS_SECONDS)
    if not isinstance(reply, Marks) or len(reply.marks) * 16 != len(request.keys):
        raise TransferError(f"{type(reply).__name__} came as the answer to PutBlocks, or not one mark a key")
    return reply.marks


def _groups(blocks: Sequence[Sequence[Bytes]], limit: int) -> Iterator[list[memoryview]]:
    """Their bytes in groups of `limit`, then of twice as many each time, up to GROUP_BYTES."""
    group: list[memoryview] = []
    room = limit
    for piece in chain.from_iterable(blocks):
        view = piece.data
        while len(view) > room:
            yield [*group, view[:room]]
            view, group = view[room:], []
            room = limit = min(2 * limit, GROUP_BYTES)
        if len(view):
            group.append(view)
            room -= len(view)
    if group:
        yield group


def _heard(channel: Channel, until: float, soon: float = 0.0) -> Header:
    header = channel.receive_header(until, soon=soon)
    if isinstance(header, Refused):
        raise RefusedError(header.reason)
    return header


def _sums(data: bytes) -> tuple[int, ...]:
    try:
        return unpack_sums(data)
    except PoolError as e:
        raise TransferError(str(e)) from None


def seconds_left(until: float) -> float:
    return max(0.0, until - time.monotonic())
