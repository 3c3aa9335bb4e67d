"""What a node's data address does for clients of the pool: blocks by key, in and out, and questions."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import xxhash

from moonpool.errors import TransferError
from moonpool.messenger.channel import Channel
from moonpool.messenger.digest import RunDigests
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
    unpack_sums,
    unpacked,
)
from moonpool.messenger.transfer import Bytes, Intake, Store

log = logging.getLogger(__name__)

LONGEST_SECONDS = 3600.0
ANSWER_SECONDS = 30.0
PIECE_BYTES = 1 << 20
"""Received, then summed up."""
Count = Callable[[str, int], None]


def answer(channel: Channel, store: Store, question: Question) -> None:
    reply = store.answer(question)
    channel.send_header(reply, time.monotonic() + ANSWER_SECONDS)


def give(channel: Channel, store: Store, request: GetBlocks, count: Count) -> None:
    until = time.monotonic() + min(request.time_left, LONGEST_SECONDS) + ANSWER_SECONDS
    gift = store.give(request)
    if isinstance(gift, str):
        channel.send_header(Refused(gift), until)
        return
    try:
        chosen = slice(request.first_run, request.first_run + request.runs)
        run_bytes = request.space.run_bytes
        present = [block for block in gift.blocks if block is not None]
        sums = [value for checksums in gift.checksums for value in checksums[chosen]]
        found = bytes(NO if block is None else YES for block in gift.blocks)
        metas = tuple(gift.metas) if request.here else ()
        is_whole = request.runs == request.space.runs
        copies = [] if is_whole else [xxhash.xxh3_64_intdigest(pack_sums(sums)) for sums in gift.checksums]
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
    intake = store.take(request)
    if isinstance(intake, str):
        channel.skip(len(unpacked(request.keys)) * block_bytes, until)
        _sums(channel, until)
        channel.send_header(Refused(intake), until)
        return
    try:
        found = _fill(channel, intake, request, until, count)
    finally:
        intake.close()
    count("puts", 1)
    channel.send_header(Marks(found), until)


def _fill(channel: Channel, intake: Intake, request: PutBlocks, until: float, count: Count) -> bytes:
    space = request.space
    arrived: list[list[int] | None] = []
    for target in intake.targets:
        if target is None:
            channel.skip(space.block_bytes, until)
            arrived.append(None)
        else:
            arrived.append(receive(channel, [target], space.run_bytes, until))
            count("bytes_in", space.block_bytes)
    expected = _sums(channel, until)
    if len(expected) != len(arrived) * space.runs:
        raise TransferError(f"{len(arrived)} blocks of {space.runs} runs with {len(expected)} checksums")
    found = []
    for position, sums in enumerate(arrived):
        if sums is None:
            found.append(NO)
        elif sums == list(expected[position * space.runs : (position + 1) * space.runs]):
            intake.landed(position, sums)
            found.append(YES)
        else:
            count("checksum_failures", 1)
            log.warning("a block of key space %s arrived with a wrong checksum", space.id)
            found.append(DAMAGED)
    return bytes(found)


def receive(channel: Channel, pieces: Sequence[Bytes], run_bytes: int, until: float) -> list[int]:
    """Whole runs into these pieces of memory; their checksums."""
    digests = RunDigests(run_bytes)
    for piece in pieces:
        view = piece.data
        while len(view):
            received = channel.receive_some(view[:PIECE_BYTES], until)
            digests.feed(view[:received])
            view = view[received:]
    return digests.checksums


def _sums(channel: Channel, until: float) -> tuple[int, ...]:
    header = channel.receive_header(until)
    if not isinstance(header, Checksums):
        raise TransferError(f"{type(header).__name__} came where the checksums of a put were expected")
    return unpack_sums(header.checksums)
