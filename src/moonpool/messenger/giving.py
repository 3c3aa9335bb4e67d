"""What a node's data address does for clients of the pool: blocks by key, in and out, and questions."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import groupby

from moonpool.core.vocabulary import BLOCK_KEY_BYTES, KeySpace
from moonpool.errors import TransferError
from moonpool.messenger.channel import MAX_BUFFERS, Channel, framed
from moonpool.messenger.digest import RunDigests, copy_mark
from moonpool.messenger.pace import moving
from moonpool.messenger.questions import (
    DAMAGED,
    NO,
    YES,
    Checksums,
    GetBlocks,
    Given,
    Marks,
    PutBlocks,
    Question,
    Refused,
    pack_sums,
    stretches,
    unpack_sums,
    unpacked,
)
from moonpool.messenger.transfer import Bytes, Intake, Store

log = logging.getLogger(__name__)

LONGEST_SECONDS = 3600.0
ANSWER_SECONDS = 30.0
PIECE_BYTES = 1 << 20
"""Received, then summed up."""
LARGE_BYTES = 256 << 10
"""From here on it matters who runs where."""
LANDED_TOGETHER = 64
"""Blocks that become readable at once: the books are locked meanwhile."""
Count = Callable[[str, int], None]


def answer(channel: Channel, store: Store, question: Question) -> None:
    reply = store.answer(question)
    channel.send_header(reply, time.monotonic() + ANSWER_SECONDS)


def give(channel: Channel, store: Store, request: GetBlocks, count: Count) -> None:
    until = time.monotonic() + min(request.time_left, LONGEST_SECONDS) + ANSWER_SECONDS
    gift = store.give(request, lambda: channel.is_gone)
    if isinstance(gift, str):
        channel.send_header(Refused(gift), until)
        return
    try:
        if len(request.keys) // BLOCK_KEY_BYTES * request.runs * request.space.run_bytes >= LARGE_BYTES:
            channel.step_aside()
        chosen = slice(request.first_run, request.first_run + request.runs)
        run_bytes = request.space.run_bytes
        present = [block for block in gift.blocks if block is not None]
        sums = [value for checksums in gift.checksums for value in checksums[chosen]]
        found = bytes(NO if block is None else YES for block in gift.blocks)
        metas = tuple(gift.metas) if request.here else ()
        is_whole = request.runs == request.space.runs
        copies = [] if is_whole else [copy_mark(sums) for sums in gift.checksums]
        header = Given(found, pack_sums(sums), metas, pack_sums(copies))
        channel.send_header(header, until, more=bool(present))
        pieces = [block[chosen.start * run_bytes : chosen.stop * run_bytes] for block in present]
        channel.send_all(pieces, until)
        count("bytes_out", sum(piece.nbytes for piece in pieces))
    finally:
        gift.close()
    count("gets", 1)


def take(channel: Channel, store: Store, request: PutBlocks, count: Count) -> None:
    until = time.monotonic() + min(request.time_left, LONGEST_SECONDS)
    block_bytes = request.space.block_bytes
    if len(request.keys) // BLOCK_KEY_BYTES * block_bytes >= LARGE_BYTES:
        channel.step_aside()
    intake = store.take(request)
    if isinstance(intake, str):
        for stretch in stretches(len(unpacked(request.keys)), block_bytes):
            nbytes = (stretch.stop - stretch.start) * block_bytes
            with moving(nbytes, until) as limit:
                channel.skip(nbytes, limit)
                _sums(channel, limit, (stretch.stop - stretch.start) * request.space.runs)
        channel.send_header(Refused(intake), until)
        return
    try:
        try:
            found = _fill(channel, intake, request, until, count)
        finally:
            intake.close()
        channel.send_header(Marks(found), until)
    finally:
        # What can be done while the peer has its answer already.
        intake.tell()
    count("puts", 1)


def _fill(channel: Channel, intake: Intake, request: PutBlocks, until: float, count: Count) -> bytes:
    space, runs = request.space, request.space.runs
    found = b""
    for stretch in stretches(len(request.keys) // BLOCK_KEY_BYTES, space.block_bytes):
        with moving((stretch.stop - stretch.start) * space.block_bytes, until) as limit:
            arrived = _receive_stretch(channel, intake.places(stretch), space, limit, count)
            expected = list(_sums(channel, limit, len(arrived)))
        marks = _compared(arrived, expected, runs)
        if damaged := marks.count(DAMAGED):
            count("checksum_failures", damaged)
            log.warning("%d blocks of key space %s arrived with a wrong checksum", damaged, space.id)
        landed: Sequence[int] = range(len(marks))
        if marks.count(YES) < len(marks):
            landed = [at for at in landed if marks[at] == YES]
            expected = [value for at in landed for value in expected[at * runs : (at + 1) * runs]]
        for at in range(0, len(landed), LANDED_TOGETHER):
            positions = [stretch.start + position for position in landed[at : at + LANDED_TOGETHER]]
            intake.landed(positions, expected[at * runs : (at + LANDED_TOGETHER) * runs])
        found += marks
    return found


def _compared(arrived: Sequence[int | None], expected: Sequence[int], runs: int) -> bytes:
    """A mark a block: NO for those that were thrown away."""
    if arrived == expected:
        return bytes([YES]) * (len(expected) // runs)
    return bytes(
        NO if arrived[at] is None else YES if arrived[at : at + runs] == expected[at : at + runs] else DAMAGED
        for at in range(0, len(expected), runs)
    )


def _receive_stretch(
    channel: Channel, places: Iterable[tuple[int, Bytes | None]], space: KeySpace, until: float, count: Count
) -> list[int | None]:
    """The checksums of all runs of all blocks; None for those of blocks that were there already."""
    arrived: list[int | None] = []
    for is_wanted, some in groupby(places, lambda place: place[1] is not None):
        if is_wanted:
            wanted = [[memory] for _, memory in some if memory is not None]
            for sums in receive(channel, wanted, space.run_bytes, until):
                arrived += sums
            count("bytes_in", sum(memory.nbytes for (memory,) in wanted))
        else:
            for blocks, _ in some:
                channel.skip(blocks * space.block_bytes, until)
                arrived += [None] * (blocks * space.runs)
    return arrived


def receive(channel: Channel, blocks: Iterable[Sequence[Bytes]], run_bytes: int, until: float) -> Iterator[list[int]]:
    """Blocks of whole runs into memory, each in pieces; of each its runs' checksums, as it is complete.

    Many small ones come with one system call, and are summed up after it.
    """
    room = PIECE_BYTES
    group: list[memoryview] = []
    digests = RunDigests(run_bytes)
    under_way: deque[int] = deque()
    """Runs of the blocks whose bytes are not all there."""
    given = 0
    for pieces in blocks:
        nbytes = 0
        for piece in pieces:
            view = piece.data
            nbytes += len(view)
            while len(view) > room:
                _receive_group(channel, [*group, view[:room]], digests, until)
                view, room, group = view[room:], PIECE_BYTES, []
            if len(view):
                group.append(view)
                room -= len(view)
            if not room or len(group) == MAX_BUFFERS:
                _receive_group(channel, group, digests, until)
                room, group = PIECE_BYTES, []
        under_way.append(nbytes // run_bytes)
        while under_way and len(digests.checksums) >= given + under_way[0]:
            yield digests.checksums[given : (given := given + under_way.popleft())]
    if group:
        _receive_group(channel, group, digests, until)
    for runs in under_way:
        yield digests.checksums[given : (given := given + runs)]


def _receive_group(channel: Channel, group: Sequence[memoryview], digests: RunDigests, until: float) -> None:
    channel.receive_each(group, until)
    for part in group:
        digests.feed(part)


def _sums(channel: Channel, until: float, count: int) -> tuple[int, ...]:
    header = channel.receive_header_of(_frame_bytes(count), until)
    if not isinstance(header, Checksums):
        raise TransferError(f"{type(header).__name__} came where the checksums of a put were expected")
    return unpack_sums(header.checksums)


@lru_cache(1024)
def _frame_bytes(sums: int) -> int:
    """Of a frame with so many checksums."""
    return len(framed(Checksums(bytes(8 * sums))))
