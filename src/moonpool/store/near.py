"""A home node on the same host: blocks are read and written where they lie, in the arena that both map."""

from __future__ import annotations

import secrets
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from moonpool.core.vocabulary import BLOCK_KEY_BYTES, BlockKey, BlockMeta, KeySpace, PartId
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
from moonpool.store.calls import Caller, LostError
from moonpool.store.client import enter, open_socket
from moonpool.store.copying import Crew, Work, copier, piece_bytes
from moonpool.store.forks import Maker, forget_in_children
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
from moonpool.store.past_cache import Copy, copy_past_cache
from moonpool.store.sights import Sights

T = TypeVar("T")

PIECE_BYTES = 256 << 10
"""Copied, then summed up while it is in the processor's cache."""
SLACK_SECONDS = 5.0
"""What an answer may come after the time that the node was given for it."""


class _Line:
    """One connection to the node, and what came with it: a node that was started again has another arena."""

    def __init__(self, path: str | Path, name: str, timeout: float, start_timeout: float) -> None:
        """Raises PoolError if no node answers at the socket `path`."""
        sock = open_socket(path, name, timeout, start_timeout)
        frames = answer_frames()
        try:
            entrance = enter(sock, frames, name, secrets.token_hex(4))
        except (OSError, PoolError) as e:
            sock.close()
            raise PoolError(f"the node at {path} did not let {name} in: {e}") from None
        self.node, self.arena, self.readable = entrance.node, entrance.arena, entrance.readable
        self.caller = Caller(sock, frames, self.node, _dispose)
        self.sights = Sights(entrance.board, self.caller)
        forget_in_children(self.caller)

    def view(self, space: KeySpace, offset: int, layers: Layers) -> Bytes:
        start = offset + layers[0] * space.run_bytes
        return self.readable[start : start + layers[1] * space.run_bytes]

    def close(self) -> None:
        self.sights.report()
        self.caller.close()


def _dispose(caller: Caller, answer: Answer) -> None:
    match answer:
        case LeasedEach():
            caller.post(Release(answer.lease))
        case RoomOpened():
            caller.post(CloseRoom(answer.room))


class NearHome:
    """A `Home`."""

    copies = False

    def __init__(self, path: str | Path, name: str, timeout: float, start_timeout: float) -> None:
        """Raises NodeUnreachableError if no node listens at the socket `path` after `start_timeout` seconds, PoolError
        if it does not let this client in.
        """
        self._path = path
        self._name = name
        self._timeout = timeout
        self._maker = Maker()
        self._lock = threading.Lock()
        self._closed = False
        self._line = _Line(path, name, timeout, start_timeout)
        self._crew = Crew()
        # Now, and not in a thread of the user's while another one forks.
        copy_past_cache()
        entered = self.ask(Enter())
        assert isinstance(entered, Entered)
        self.batch_bytes = entered.batch_bytes

    @property
    def node(self) -> PartId:
        return self._line.node

    def ask(self, question: Question) -> Reply:
        return self._carry(lambda line: self._ask(line, question))

    def put(
        self,
        space: KeySpace,
        keys: Sequence[BlockKey],
        sources: Sequence[Sequence[Bytes]],
        metas: Sequence[BlockMeta],
    ) -> list[bool]:
        return self._carry(lambda line: self._put(line, space, keys, sources, metas))

    def get(self, space: KeySpace, keys: Sequence[BlockKey], layers: Layers, wait: Wait) -> Held:
        return self._carry(lambda line: self._get(line, space, keys, layers, wait))

    def get_into(
        self,
        space: KeySpace,
        keys: Sequence[BlockKey],
        targets: Sequence[Sequence[Bytes]],
        layers: Layers,
        wait: Wait,
    ) -> list[bool]:
        return self._carry(lambda line: self._get_into(line, space, keys, targets, layers, wait))

    def close(self) -> None:
        if self._maker.is_other:
            # What a child may close is closed (`forks`); the locks may be held by threads that it has not got.
            return
        with self._lock:
            self._closed = True
        self._line.close()
        self._crew.close()

    def _carry(self, work: Callable[[_Line], T]) -> T:
        """Once more where the node was started again since: all that clients ask may be asked twice."""
        self._maker.check()
        line = self._line
        try:
            return work(line)
        except LostError as e:
            line = self._renewed(line, e)
        return work(line)

    def _renewed(self, lost: _Line, why: LostError) -> _Line:
        with self._lock:
            if self._line is lost and not self._closed:
                lost.caller.drop()
                try:
                    self._line = _Line(self._path, self._name, self._timeout, 0.0)
                except PoolError as e:
                    raise PoolError(f"{why}; {e}") from None
            return self._line

    def _ask(self, line: _Line, question: Question) -> Reply:
        if isinstance(question, Exists) and line.sights.holds_all(question.space, unpacked(question.keys)):
            return Marks(bytes([YES]) * (len(question.keys) // BLOCK_KEY_BYTES))
        line.sights.report()
        answer = line.caller.call(lambda serial: Ask(serial, question), self._timeout + SLACK_SECONDS)
        assert isinstance(answer, Told)
        if isinstance(answer.reply, Refused):
            raise PoolError(answer.reply.reason)
        return answer.reply

    def _put(
        self,
        line: _Line,
        space: KeySpace,
        keys: Sequence[BlockKey],
        sources: Sequence[Sequence[Bytes]],
        metas: Sequence[BlockMeta],
    ) -> list[bool]:
        caller = line.caller
        room = caller.call(
            lambda serial: OpenEach(serial, space, packed(keys), tuple(metas), self._timeout),
            self._timeout + SLACK_SECONDS,
        )
        assert isinstance(room, RoomOpened)
        try:
            size = space.block_bytes
            filled = [
                (line.arena[offset : offset + size], pieces)
                for offset, pieces in zip(room.offsets, sources, strict=True)
                if offset is not None
            ]
            if not filled:
                caller.post(CloseRoom(room.room))
            else:
                with caller.copying():
                    data = pack_sums(self._fill(filled, space))
                caller.call(lambda serial: Commit(serial, room.room, data), self._timeout + SLACK_SECONDS)
        except BaseException:
            caller.post(CloseRoom(room.room))
            raise
        return [offset is not None for offset in room.offsets]

    def _get(self, line: _Line, space: KeySpace, keys: Sequence[BlockKey], layers: Layers, wait: Wait) -> Held:
        answer = line.caller.call(
            lambda serial: LeaseEach(serial, space, packed(keys), wait.seconds, wait.is_for_writers),
            wait.seconds + SLACK_SECONDS,
        )
        assert isinstance(answer, LeasedEach)
        number = answer.lease
        offsets = struct.unpack(f"<{len(keys)}q", answer.offsets)
        views = [None if at < 0 else line.view(space, at, layers) for at in offsets]
        return Held(views, lambda: self._release(line.caller, number))

    def _release(self, caller: Caller, lease: int) -> None:
        self._maker.check()
        # First, so that whatever comes after it was not read.
        caller.check_lasting()
        caller.post(Release(lease))

    def _get_into(
        self,
        line: _Line,
        space: KeySpace,
        keys: Sequence[BlockKey],
        targets: Sequence[Sequence[Bytes]],
        layers: Layers,
        wait: Wait,
    ) -> list[bool]:
        seen = line.sights.find(space, keys)
        if seen is not None:
            self._copy([line.view(space, sighting.offset, layers) for sighting in seen], targets)
            if line.sights.have_stayed(space, keys, seen):
                return [True] * len(keys)
        held = self._get(line, space, keys, layers, wait)
        try:
            pairs = [(view, pieces) for view, pieces in zip(held.views, targets, strict=True) if view is not None]
            with line.caller.copying():
                self._copy([view for view, _ in pairs], [pieces for _, pieces in pairs])
        finally:
            held.close()
        return [view is not None for view in held.views]

    def _copy(self, views: Sequence[Bytes], targets: Sequence[Sequence[Bytes]]) -> None:
        nbytes = sum(view.nbytes for view in views)
        cut, copy = piece_bytes(nbytes), copier(nbytes)
        pairs = zip(views, targets, strict=True)
        self._crew.run([work for view, pieces in pairs for work in _spreading(view, pieces, cut, copy)], nbytes)

    def _fill(self, blocks: Sequence[tuple[Bytes, Sequence[Bytes]]], space: KeySpace) -> list[int]:
        """Copy into blocks what is to be theirs; the checksums of their runs, block after block."""
        runs, run_bytes = space.runs, space.run_bytes
        sums = [0] * (len(blocks) * runs)
        nbytes = len(blocks) * space.block_bytes
        step, copy = max(1, piece_bytes(nbytes) // run_bytes), copier(nbytes)

        def fill(at: int, target: Bytes, pieces: Sequence[Bytes]) -> None:
            found = _fill(target, pieces, run_bytes, copy)
            sums[at : at + len(found)] = found

        work: list[Work] = []
        for number, (block, pieces) in enumerate(blocks):
            if len(pieces) > 1:
                work.append(partial(fill, number * runs, block, pieces))
                continue
            for run in range(0, runs, step):
                chosen = slice(run * run_bytes, (run + step) * run_bytes)
                work.append(partial(fill, number * runs + run, block[chosen], [pieces[0][chosen]]))
        self._crew.run(work, nbytes)
        return sums


def _fill(block: Bytes, pieces: Sequence[Bytes], run_bytes: int, copy: Copy) -> list[int]:
    """Copy into the block; the checksums of its runs.

    They are of what was read, which is in the cache: what was written may have gone past it.
    """
    digests = RunDigests(run_bytes)
    written = 0
    for piece in pieces:
        for at in range(0, piece.nbytes, PIECE_BYTES):
            part = piece[at : at + PIECE_BYTES]
            copy(block[written : written + part.nbytes], part)
            digests.feed(part.data)
            written += part.nbytes
    return digests.checksums


def _spreading(view: Bytes, pieces: Sequence[Bytes], cut: int, copy: Copy) -> Iterator[Work]:
    """Copies of a block into the pieces, one behind the other, each of at most `cut` bytes."""
    at = 0
    for piece in pieces:
        for start in range(0, piece.nbytes, cut):
            part = piece[start : start + cut]
            yield partial(copy, part, view[at + start : at + start + part.nbytes])
        at += piece.nbytes
