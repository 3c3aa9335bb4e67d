"""Blocks on their way from another node, in one part or several, over one connection or several."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence

from moonpool.core.vocabulary import BlockKey, KeySpaceId
from moonpool.errors import TransferError
from moonpool.messenger.channel import HASH_BYTES, Blocks, Channel, Read
from moonpool.messenger.digest import copy_mark
from moonpool.messenger.pace import moving
from moonpool.messenger.transfer import Bytes, checksum
from moonpool.messenger.waiting import Way

OnBlock = Callable[[int, Sequence[int]], None]
"""Index among the keys, checksums of the runs that were read."""
_PAGE = 4096


class ReadGroup:
    """Reads of parts of the same blocks: of each block all of them get parts of one copy, or fail."""

    def __init__(
        self, runs: int, is_wanted: Callable[[], bool] = lambda: True, marks: Mapping[BlockKey, int] | None = None
    ) -> None:
        """`runs`: of each block; a peer whose blocks have another number is not read. `is_wanted` is asked often, from
        any thread: False ends the reads. `marks` (`digest.copy_mark`): of these blocks no other copy is read."""
        self.runs = runs
        self.is_wanted = is_wanted
        self._marks = marks or {}
        self._copies: dict[BlockKey, tuple[int, ...]] = {}
        """The checksums of each block of which something came: those of all its runs."""

    def is_same(self, key: BlockKey, checksums: tuple[int, ...]) -> bool:
        """Whether this is the copy that the others read; the first says which. (One step for all threads.)"""
        mark = self._marks.get(key)
        if mark is not None and mark != copy_mark(checksums):
            return False
        return self._copies.setdefault(key, checksums) == checksums


class Reading:
    """One call of `read`: which blocks of it are complete. Its parts arrive on several threads."""

    def __init__(
        self,
        space: KeySpaceId,
        keys: Sequence[BlockKey],
        destinations: Sequence[Bytes],
        layers: tuple[int, int] | None,
        group: ReadGroup | None,
        until: float,
        on_block: OnBlock | None,
        count: Callable[[str, int], None],
    ) -> None:
        """`layers`: the first run and the number of runs that the destinations are for; None: whole blocks."""
        self.space = space
        self.keys = keys
        self.until = until
        self.count = count
        self.limit = len(keys)
        """The index of the first block that the peer has not got."""
        self.damaged: set[int] = set()
        """Blocks of which a run came with a wrong checksum."""
        self.first_byte = 0 if layers is None or not destinations else layers[0] * (destinations[0].nbytes // layers[1])
        """Where the wanted part begins in each block."""
        self._layers = layers
        self._group = group
        self._on_block = on_block
        self._lock = threading.Lock()
        self._blocks = [_Arrival(destination) for destination in destinations]

    def pieces(self, most: int) -> list[Receiving]:
        """Pieces of about `most` bytes: several blocks, or parts of one."""
        pieces = []
        index = 0
        while index < len(self.keys):
            size = self.nbytes(index)
            if size > most + most // 2:
                parts = -(-size // most)
                step = -(-size // parts)
                step += -step % _PAGE
                pieces += [Receiving(self, index, 1, at, min(size, at + step)) for at in range(0, size, step)]
                index += 1
                continue
            blocks, fitting = 1, (most + size // 2) // max(1, size)
            while blocks < fitting and index + blocks < len(self.keys) and self.nbytes(index + blocks) == size:
                blocks += 1
            pieces.append(Receiving(self, index, blocks, 0, size))
            index += blocks
        return pieces

    @property
    def is_wanted(self) -> bool:
        return self._group is None or self._group.is_wanted()

    def nbytes(self, index: int) -> int:
        return self._blocks[index].buffer.nbytes

    def cut(self, index: int) -> None:
        """The peer has not got this block: none from it on is needed."""
        with self._lock:
            self.limit = min(self.limit, index)

    def leading(self) -> int:
        """The number of leading blocks that are whole and verified."""
        return next((index for index, block in enumerate(self._blocks) if not block.is_complete), len(self._blocks))

    def expect(self, index: int, block_bytes: int, checksums: tuple[int, ...]) -> _Arrival:
        """The peer sends (a part of) this block. Raises TransferError for what does not fit."""
        block = self._blocks[index]
        run_bytes = block_bytes // len(checksums)
        first, runs = self._layers or (0, len(checksums))
        if block.buffer.nbytes != runs * run_bytes or first + runs > len(checksums):
            wanted = f"{len(checksums)} runs" if self._layers is None else f"runs {first} to {first + runs - 1}"
            raise TransferError(
                f"the peer's blocks of key space {self.space} have {block_bytes} bytes, "
                f"the room here {block.buffer.nbytes} for {wanted} of {run_bytes}"
            )
        group = self._group
        if group is not None and len(checksums) != group.runs:
            raise TransferError(
                f"the peer's blocks of key space {self.space} have {len(checksums)} runs of {run_bytes} bytes, "
                f"those here {group.runs}"
            )
        with self._lock:
            is_same = not block.checksums or block.checksums == checksums
            if not is_same or (group is not None and not group.is_same(self.keys[index], checksums)):
                raise TransferError(
                    f"a block of key space {self.space} was replaced by another copy while it was read: read it again"
                )
            if not block.checksums:
                block.begin(checksums, first, runs)
        return block

    def arrived(self, index: int, run: int, nbytes: int, digest: int | None) -> None:
        """Bytes of a run (its number in the destination) are there; `digest` where they were all of it.

        Raises TransferError for a wrong checksum.
        """
        block = self._blocks[index]
        with self._lock:
            block.missing[run] -= nbytes
            is_whole = not block.missing[run]
        if not is_whole:
            return
        if digest is None:
            digest = checksum(block.run(run))
        if digest != block.checksums[block.first_run + run]:
            self.count("checksum_failures", 1)
            self.damaged.add(index)
            raise TransferError(f"run {run} of a block of key space {self.space} arrived with a wrong checksum")
        with self._lock:
            block.runs_left -= 1
            is_complete = not block.runs_left
        if is_complete:
            if self._on_block is not None:
                first = block.first_run
                self._on_block(index, block.checksums[first : first + len(block.missing)])
            block.is_complete = True


class _Arrival:
    """One block as it arrives."""

    def __init__(self, buffer: Bytes) -> None:
        self.buffer = buffer
        self.checksums: tuple[int, ...] = ()
        """Of all runs of the block; empty until something of it came."""
        self.first_run = 0
        self.run_bytes = 0
        self.missing: list[int] = []
        """Bytes, by run of the destination."""
        self.runs_left = 0
        """Not verified yet."""
        self.is_complete = False

    def begin(self, checksums: tuple[int, ...], first_run: int, runs: int) -> None:
        self.checksums = checksums
        self.first_run = first_run
        self.run_bytes = self.buffer.nbytes // runs
        self.missing = [self.run_bytes] * runs
        self.runs_left = runs

    def run(self, run: int) -> Bytes:
        return self.buffer[run * self.run_bytes : (run + 1) * self.run_bytes]


class Receiving:
    """One `Read` frame: the same part, [start, end) of the destination, of consecutive blocks. A `waiting.Work`."""

    way = Way.IN

    def __init__(self, reading: Reading, first: int, blocks: int, start: int, end: int) -> None:
        self.nbytes = blocks * (end - start)
        self._reading = reading
        self._index = first
        """The next block to come, and where in it to go on: beyond `start` once something of it is there."""
        self._at = start
        self._last = first + blocks
        self._start = start
        self._end = end

    def send(self, channel: Channel) -> None:
        reading = self._reading
        time_left = reading.until - time.monotonic()
        keys = tuple(reading.keys[self._index : self._last])
        first_byte = reading.first_byte + self._start
        channel.send_header(Read(reading.space, keys, time_left, first_byte, self._end - self._start), reading.until)

    def receive(self, channel: Channel) -> None:
        reading = self._reading
        with moving(self.nbytes, reading.until) as limit:
            answer = channel.receive_header(limit)
        if not isinstance(answer, Blocks):
            raise TransferError(f"{type(answer).__name__} came where Blocks was expected")
        runs = self._runs_a_block(answer)
        if answer.count < self._last - self._index:
            reading.cut(self._index + answer.count)
        with moving(self.nbytes, reading.until) as limit:
            for position in range(answer.count):
                if not reading.is_wanted:
                    raise TransferError("nobody wants these blocks any more")
                sums = answer.checksums[position * runs : (position + 1) * runs]
                self._receive_block(channel, reading.expect(self._index, answer.block_bytes, sums), limit)
                self._index += 1
                self._at = self._start

    def rest(self) -> Sequence[Receiving]:
        reading = self._reading
        last = min(self._last, reading.limit)
        if self._index >= last or not reading.is_wanted:
            return ()
        if self._at == self._start:
            return (Receiving(reading, self._index, last - self._index, self._start, self._end),)
        broken = [Receiving(reading, self._index, 1, self._at, self._end)] if self._at < self._end else []
        if self._index + 1 < last:
            broken.append(Receiving(reading, self._index + 1, last - self._index - 1, self._start, self._end))
        return broken

    def is_needed(self) -> bool:
        return self._index < self._reading.limit and self._reading.is_wanted

    def _runs_a_block(self, answer: Blocks) -> int:
        wanted = self._last - self._index
        runs, rest = divmod(len(answer.checksums), answer.count) if answer.count else (0, 0)
        if answer.count > wanted or rest or (answer.count and (not runs or answer.block_bytes % runs)):
            raise TransferError(
                f"{answer.count} blocks of {answer.block_bytes} bytes with {len(answer.checksums)} checksums "
                f"came for {wanted} keys"
            )
        return runs

    def _receive_block(self, channel: Channel, block: _Arrival, until: float) -> None:
        run_bytes = block.run_bytes
        while self._at < self._end:
            run, offset = divmod(self._at, run_bytes)
            whole_runs = 0 if offset else (self._end - self._at) // run_bytes
            if whole_runs:
                self._receive_runs(channel, block, run, min(whole_runs, max(1, HASH_BYTES // run_bytes)), until)
                continue
            # The run's other bytes come in another piece: whoever has its last ones verifies it.
            end = min((run + 1) * run_bytes, self._end, self._at + HASH_BYTES)
            channel.receive_into(block.buffer[self._at : end], until)
            self._note(run, end - self._at, None)

    def _receive_runs(self, channel: Channel, block: _Arrival, first: int, runs: int, until: float) -> None:
        if runs == 1:
            self._note(first, block.run_bytes, channel.receive_hashed(block.run(first), until))
            return
        channel.receive_into(block.buffer[self._at : self._at + runs * block.run_bytes], until)
        for run in range(first, first + runs):
            self._note(run, block.run_bytes, checksum(block.run(run)))

    def _note(self, run: int, nbytes: int, digest: int | None) -> None:
        self._at += nbytes
        self._reading.count("bytes_received", nbytes)
        self._reading.arrived(self._index, run, nbytes, digest)
