"""Where a process takes what another one makes for it, again and again: a few slots of its own memory.

Between the stages of a pipeline hidden states travel so. A sender on the same host maps the slots and copies into
them; one on another host writes over tcp, as into a room of a node: `RoomWrite(group, serial, block 0, run 0)`. Either
way the sender says by a control message what lies where, and uses a slot again when the taker has said so.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from moonpool.core.vocabulary import BlockKey, KeySpaceId, PartId, RequestId
from moonpool.errors import PoolError, TransferError
from moonpool.messenger.questions import GetBlocks, PutBlocks, Question, Refused, Reply
from moonpool.messenger.tcp import TcpMessenger
from moonpool.messenger.transfer import Bytes, Departure, Gift, Landing, RoomWrite, checksum
from moonpool.wire.messages import IntakeAddress

SLOTS = 2
"""One is computed on while the next one comes."""
PAGE_BYTES = 4096


class Intake:
    """The taker's side. `group` names the only sender that is let in over tcp."""

    def __init__(self, group: str, slot_bytes: int) -> None:
        self.group = group
        self.slot_bytes = -(-slot_bytes // PAGE_BYTES) * PAGE_BYTES
        self._fd = os.memfd_create("moonpool-intake", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, SLOTS * self.slot_bytes)
        self._memory = np.frombuffer(mmap.mmap(self._fd, SLOTS * self.slot_bytes), np.uint8)

    def address(self, host: PartId, data_address: str) -> IntakeAddress:
        return IntakeAddress(host, f"/proc/{os.getpid()}/fd/{self._fd}", data_address, self.slot_bytes)

    def view(self, serial: int, nbytes: int) -> Bytes:
        """What came with this number; raises TransferError for more than a slot holds."""
        return _slot(self._memory, self.slot_bytes, serial, nbytes)

    def close(self) -> None:
        """Nobody can map it any more; who has done so keeps the memory."""
        os.close(self._fd)


class Door:
    """What the tcp server of a taker lets in: writes into its present intake, and nothing else."""

    def __init__(self) -> None:
        self.intake: Intake | None = None

    def land(
        self, request: RequestId, attempt: int, block: int, first_run: int, runs: int, nbytes: int, until: float
    ) -> Landing | str:
        intake = self.intake
        if intake is None or request != intake.group:
            return f"{request} is not the group that this stage is in"
        try:
            return _SlotLanding(intake.view(attempt, nbytes))
        except TransferError as e:
            return str(e)

    def depart(self, space: KeySpaceId, keys: Sequence[BlockKey]) -> Departure:
        raise PoolError("a stage of a pipeline has no blocks to read")

    def answer(self, question: Question) -> Reply:
        return Refused("a stage of a pipeline answers no questions")

    def give(self, request: GetBlocks, is_gone: Callable[[], bool]) -> Gift | str:
        return "a stage of a pipeline has no blocks to give"

    def take(self, request: PutBlocks) -> str:
        return "a stage of a pipeline takes no blocks"


class _SlotLanding:
    def __init__(self, view: Bytes) -> None:
        self.run_bytes = view.nbytes
        self.slices: list[Bytes | None] = [view]

    def landed(self, position: int, checksum: int) -> None: ...

    def close(self) -> None: ...


class Outlet:
    """The sender's side: to one taker. Blocking, for a thread; the caller sees to it that the slot is free."""

    def __init__(self, group: str, to: IntakeAddress, here: PartId, messenger: TcpMessenger) -> None:
        """`here`: the node on the sender's host. Raises TransferError where the memory cannot be had."""
        self._group = RequestId(group)
        self._to = to
        self._messenger = messenger
        self._memory: Bytes | None = None
        if to.host == here:
            try:
                with Path(to.memory).open("r+b") as file:
                    self._memory = np.frombuffer(mmap.mmap(file.fileno(), SLOTS * to.slot_bytes), np.uint8)
            except (OSError, ValueError) as e:
                raise TransferError(f"the next stage's memory cannot be mapped: {e}") from None

    @property
    def is_shared(self) -> bool:
        return self._memory is not None

    def put(self, serial: int, data: Bytes, seconds: float) -> None:
        """Raises TransferError where it does not arrive in so many seconds."""
        if self._memory is not None:
            _slot(self._memory, self._to.slot_bytes, serial, data.nbytes)[:] = data
            return
        write = RoomWrite(self._group, serial, 0, 0, 1, [data], [checksum(data)])
        self._messenger.write(self._to.data_address, [write], seconds).result()


def _slot(memory: Bytes, slot_bytes: int, serial: int, nbytes: int) -> Bytes:
    if not 0 < nbytes <= slot_bytes:
        raise TransferError(f"{nbytes} bytes of hidden states: a slot of the next stage has {slot_bytes}")
    start = serial % SLOTS * slot_bytes
    return memory[start : start + nbytes]
