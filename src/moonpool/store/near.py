"""A home node on the same host: blocks are read and written where they lie, in the arena that both map."""

from __future__ import annotations

import secrets
import struct
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from moonpool.core.vocabulary import BLOCK_KEY_BYTES, BlockKey, BlockMeta, KeySpace
from moonpool.errors import PoolError
from moonpool.messenger.digest import RunDigests
from moonpool.messenger.questions import (
    YES,
    Enter,
    Entered,
    Exists,
    Marks,
    Question,
    Refused,
    Reply,
    pack_sums,
    packed,
    unpacked,
)
from moonpool.messenger.transfer import Bytes
from moonpool.store.calls import Caller
from moonpool.store.client import enter, open_socket
from moonpool.store.copying import Crew, Work, copy, piece_bytes
from moonpool.store.home import Held, Layers, Wait
from moonpool.store.messages import (
    Answer,
    Ask,
    CloseRoom,
    Commit,
    LeasedEach,
    LeaseEach,
    OpenEach,
    Release,
    RoomOpened,
    Told,
    answer_frames,
)
from moonpool.store.sights import Sights

PIECE_BYTES = 256 << 10
"""Copied, then summed up while it is in the processor's cache."""
SLACK_SECONDS = 5.0
"""What an answer may come after the time that the node was given for it."""


class NearHome:
    """A `Home`."""

    copies = False

    def __init__(self, path: str | Path, name: str, timeout: float) -> None:
        """Raises PoolError if no node answers at the socket `path` within `timeout` seconds."""
        self._timeout = timeout
        sock = open_socket(path, name, time.monotonic() + timeout)
        frames = answer_frames()
        try:
            entrance = enter(sock, frames, name, secrets.token_hex(4))
        except (OSError, PoolError) as e:
            sock.close()
            raise PoolError(f"the node at {path} did not let {name} in: {e}") from None
        self.node, self._arena = entrance.node, entrance.arena
        self._readable = self._arena.view()
        self._readable.flags.writeable = False
        self._crew = Crew()
        self._caller = Caller(sock, frames, self.node, self._dispose)
        self._sights = Sights(entrance.board, self._caller)
        entered = self.ask(Enter())
        assert isinstance(entered, Entered)
        self.batch_bytes = entered.batch_bytes

    def ask(self, question: Question) -> Reply:
        if isinstance(question, Exists) and self._sights.holds_all(question.space, unpacked(question.keys)):
            return Marks(bytes([YES]) * (len(question.keys) // BLOCK_KEY_BYTES))
        self._sights.report()
        answer = self._caller.call(lambda serial: Ask(serial, question), self._timeout + SLACK_SECONDS)
        assert isinstance(answer, Told)
        if isinstance(answer.reply, Refused):
            raise PoolError(answer.reply.reason)
        return answer.reply

    def put(
        self,
        space: KeySpace,
        keys: Sequence[BlockKey],
        sources: Sequence[Sequence[Bytes]],
        metas: Sequence[BlockMeta],
    ) -> list[bool]:
        room = self._caller.call(
            lambda serial: OpenEach(serial, space, packed(keys), tuple(metas)), self._timeout + SLACK_SECONDS
        )
        assert isinstance(room, RoomOpened)
        try:
            size = space.block_bytes
            filled = [
                (self._arena[offset : offset + size], pieces)
                for offset, pieces in zip(room.offsets, sources, strict=True)
                if offset is not None
            ]
            if not filled:
                self._caller.post(CloseRoom(room.room))
            else:
                data = pack_sums(self._fill(filled, space))
                self._caller.call(lambda serial: Commit(serial, room.room, data), self._timeout + SLACK_SECONDS)
        except BaseException:
            self._caller.post(CloseRoom(room.room))
            raise
        return [offset is not None for offset in room.offsets]

    def get(self, space: KeySpace, keys: Sequence[BlockKey], layers: Layers, wait: Wait) -> Held:
        answer = self._caller.call(
            lambda serial: LeaseEach(serial, space, packed(keys), wait.seconds, wait.is_for_writers),
            wait.seconds + SLACK_SECONDS,
        )
        assert isinstance(answer, LeasedEach)
        offsets = struct.unpack(f"<{len(keys)}q", answer.offsets)
        views = [None if at < 0 else self._view(space, at, layers) for at in offsets]
        return Held(views, lambda: self._caller.post(Release(answer.lease)))

    def get_into(
        self,
        space: KeySpace,
        keys: Sequence[BlockKey],
        targets: Sequence[Sequence[Bytes]],
        layers: Layers,
        wait: Wait,
    ) -> list[bool]:
        seen = self._sights.find(space, keys)
        if seen is not None:
            self._copy([self._view(space, sighting.offset, layers) for sighting in seen], targets)
            if self._sights.have_stayed(space, keys, seen):
                return [True] * len(keys)
        held = self.get(space, keys, layers, wait)
        try:
            pairs = [(view, pieces) for view, pieces in zip(held.views, targets, strict=True) if view is not None]
            self._copy([view for view, _ in pairs], [pieces for _, pieces in pairs])
        finally:
            held.close()
        return [view is not None for view in held.views]

    def close(self) -> None:
        self._sights.report()
        self._caller.close()
        self._crew.close()

    def _view(self, space: KeySpace, offset: int, layers: Layers) -> Bytes:
        start = offset + layers[0] * space.run_bytes
        return self._readable[start : start + layers[1] * space.run_bytes]

    def _copy(self, views: Sequence[Bytes], targets: Sequence[Sequence[Bytes]]) -> None:
        nbytes = sum(view.nbytes for view in views)
        cut = piece_bytes(nbytes)
        pairs = zip(views, targets, strict=True)
        self._crew.run([work for view, pieces in pairs for work in _spreading(view, pieces, cut)], nbytes)

    def _fill(self, blocks: Sequence[tuple[Bytes, Sequence[Bytes]]], space: KeySpace) -> list[int]:
        """Copy into blocks what is to be theirs; the checksums of their runs, block after block."""
        runs, run_bytes = space.runs, space.run_bytes
        sums = [0] * (len(blocks) * runs)
        step = max(1, piece_bytes(len(blocks) * space.block_bytes) // run_bytes)

        def fill(at: int, target: Bytes, pieces: Sequence[Bytes]) -> None:
            found = _fill(target, pieces, run_bytes)
            sums[at : at + len(found)] = found

        work: list[Work] = []
        for number, (block, pieces) in enumerate(blocks):
            if len(pieces) > 1:
                work.append(partial(fill, number * runs, block, pieces))
                continue
            for run in range(0, runs, step):
                chosen = slice(run * run_bytes, (run + step) * run_bytes)
                work.append(partial(fill, number * runs + run, block[chosen], [pieces[0][chosen]]))
        self._crew.run(work, len(blocks) * space.block_bytes)
        return sums

    def _dispose(self, answer: Answer) -> None:
        match answer:
            case LeasedEach():
                self._caller.post(Release(answer.lease))
            case RoomOpened():
                self._caller.post(CloseRoom(answer.room))


def _fill(block: Bytes, pieces: Sequence[Bytes], run_bytes: int) -> list[int]:
    """Copy into the block; the checksums of its runs."""
    digests = RunDigests(run_bytes)
    written = 0
    for piece in pieces:
        for at in range(0, piece.nbytes, PIECE_BYTES):
            part = piece[at : at + PIECE_BYTES]
            target = block[written : written + part.nbytes]
            copy(target, part)
            digests.feed(target.data)
            written += part.nbytes
    return digests.checksums


def _spreading(view: Bytes, pieces: Sequence[Bytes], cut: int) -> Iterator[Work]:
    """Copies of a block into the pieces, one behind the other, each of at most `cut` bytes."""
    at = 0
    for piece in pieces:
        for start in range(0, piece.nbytes, cut):
            part = piece[start : start + cut]
            yield partial(copy, part, view[at + start : at + start + part.nbytes])
        at += piece.nbytes
