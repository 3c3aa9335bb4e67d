"""A pipeline group from the side of its leader, which is the prefill instance and its first stage (PAPER §3).

The leader decides everything: which prompts have pages (the same numbers in every stage), what is loaded, which chunks
are computed, when a prompt's I/O is to end. Hidden states go from stage to stage without it, and the draws of the last
one come back. A stage that is gone ends the group: the leader begins a new life, and with it the group.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from moonpool.core.actions import Cancel
from moonpool.core.events import Lost
from moonpool.core.prefill import Chunk
from moonpool.core.vocabulary import Peer, RequestId
from moonpool.engine.engine import Bytes, Draw
from moonpool.errors import MoonpoolError, PoolError, StageLostError, TransferError
from moonpool.live.neighbours import Neighbours, Onward
from moonpool.live.worker import WorkerLife
from moonpool.messenger.tcp import TcpMessenger
from moonpool.wire.messages import (
    EndStageWork,
    Envelope,
    GroupBroken,
    GroupJoined,
    IntakeAddress,
    JoinGroup,
    PassOn,
    StageLoaded,
    StageReady,
    StageWork,
    StageWorkEnded,
    StepEnded,
    Taken,
    Work,
)

log = logging.getLogger(__name__)

FORM_SECONDS = 180.0
"""For all stages to come: they load a model first."""
ANSWER_SECONDS = 30.0
"""For a stage's answer to what takes it no time, and beyond a request's deadline for what does."""

_Id = tuple[RequestId, int]


@dataclass(slots=True)
class Ended:
    """A step that has been through all stages. `failure`: nothing of it counts."""

    draws: list[Draw | None]
    seconds: float
    """Of the slowest stage."""
    failure: str


@dataclass(slots=True)
class _Awaited:
    """An attempt's answers from the further stages."""

    waiting: set[str]
    done: asyncio.Event = field(default_factory=asyncio.Event)
    problem: str = ""
    bytes_stored: int = 0

    def answer(self, sender: str, problem: str, bytes_stored: int = 0) -> None:
        self.problem = self.problem or problem
        self.bytes_stored += bytes_stored
        self.waiting.discard(sender)
        if not self.waiting:
            self.done.set()


class Group:
    def __init__(self, life: WorkerLife, messenger: TcpMessenger, stages: int) -> None:
        self.stages = stages
        self._life = life
        self._messenger = messenger
        self._id = life.link.me.incarnation
        self._ready: dict[int, tuple[Peer, IntakeAddress]] = {}
        self._changed = asyncio.Event()
        self._joined: set[str] = set()
        self._peers: tuple[Peer, ...] = ()
        self._onward: Onward | None = None
        self._serials = itertools.count()
        self._steps: dict[int, asyncio.Future[Ended]] = {}
        self._loads: dict[_Id, _Awaited] = {}
        self._ends: dict[_Id, _Awaited] = {}
        self._working: set[_Id] = set()
        """Attempts that the stages know."""

    # ---- its life

    async def form(self) -> None:
        """Wait for all stages, make them a group, then let orders come. Raises StageLostError, MoonpoolError."""
        try:
            async with asyncio.timeout(FORM_SECONDS):
                await self._gather()
        except TimeoutError:
            missing = ", ".join(str(stage) for stage in range(1, self.stages) if stage not in self._ready)
            raise MoonpoolError(
                f"the pipeline has no stage {missing or 'that answers'} after {FORM_SECONDS:g} s: is it running?"
            ) from None
        self._life.spawn(self._watch())
        self._life.enter()
        log.info("leads a pipeline of %d stages", self.stages)

    async def _gather(self) -> None:
        while len(self._ready) < self.stages - 1:
            await self._next_change()
        found = [self._ready[stage] for stage in range(1, self.stages)]
        self._peers = tuple(peer for peer, _ in found)
        for (peer, _), after in zip(found, [*found[1:], None], strict=True):
            following = (None, None) if after is None else after
            await self._life.link.send(peer, JoinGroup(self._id, self.stages, self._life.here, *following))
        self._onward = Onward(self._life.link, self._id, *found[0], self._life.here.id, self._messenger)
        while len(self._joined) < self.stages - 1:
            await self._next_change()

    async def _next_change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    async def _watch(self) -> None:
        neighbours = Neighbours(self._life.membership, self._peers)
        gone = await neighbours.lost()
        self._break(f"{gone.id} ({gone.incarnation}) is gone")

    def _break(self, reason: str) -> None:
        """The Conductor places what is here again, at once."""
        me = self._life.link.me
        self._life.tell(Lost(me.id, me.incarnation, reason))
        raise StageLostError(f"{reason}: the pipeline forms again")

    def hear(self, envelope: Envelope) -> bool:
        """False if it is not for the group."""
        sender, body = envelope.sender, envelope.body
        match body:
            case StageReady(stage, intake):
                if not self._peers and 1 <= stage < self.stages:
                    self._ready[stage] = sender, intake
                    self._changed.set()
            case GroupJoined(group, problem) if group == self._id:
                if problem:
                    self._life.spawn(self._give_up(f"{sender.id}: {problem}"))
                self._joined.add(sender.id)
                self._changed.set()
            case GroupBroken(group, reason) if group == self._id:
                self._life.spawn(self._give_up(f"{sender.id}: {reason}"))
            case StageLoaded(group, request, attempt, problem) if group == self._id:
                if waiting := self._loads.get((request, attempt)):
                    waiting.answer(sender.id, problem)
            case StageWorkEnded(group, request, attempt, stored, problem) if group == self._id:
                if waiting := self._ends.get((request, attempt)):
                    waiting.answer(sender.id, problem, stored)
            case Taken(group, serial) if group == self._id and self._onward is not None:
                self._onward.taken(serial)
            case StepEnded(group, serial) if group == self._id:
                self._step_ended(body)
            case (
                StageReady() | GroupJoined() | GroupBroken() | StageLoaded() | StageWorkEnded() | Taken() | StepEnded()
            ):
                log.debug("%s of another group from %s", type(body).__name__, sender.id)
            case _:
                return False
        return True

    async def _give_up(self, reason: str) -> None:
        self._break(reason)

    # ---- one prompt's way

    async def load(self, work: Work, pages: Sequence[int], marks: Sequence[int], caching: Sequence[int]) -> None:
        """Have every stage take the prompt, with its layers of these copies of its first blocks. Raises PoolError."""
        id_ = work.request, work.attempt
        awaited = self._loads[id_] = _Awaited({peer.id for peer in self._peers})
        self._working.add(id_)
        for peer in self._peers:
            self._life.link.post(peer, StageWork(self._id, work, tuple(pages), tuple(marks), tuple(caching)))
        try:
            async with asyncio.timeout(max(0.0, work.time_left) + ANSWER_SECONDS):
                await awaited.done.wait()
        except TimeoutError:
            raise PoolError("the pipeline's stages have not loaded in time") from None
        finally:
            del self._loads[id_]
        if awaited.problem:
            raise PoolError(awaited.problem)

    async def pass_on(
        self, chunks: tuple[Chunk, ...], hidden: Bytes | None, seconds: float, failure: str
    ) -> asyncio.Future[Ended]:
        """Give the first stage's part of a step to the next one; returns when another step may begin."""
        assert self._onward is not None
        serial = next(self._serials)
        ended = self._steps[serial] = asyncio.get_running_loop().create_future()
        step = PassOn(self._id, serial, chunks, 0 if hidden is None else hidden.nbytes, seconds, failure)
        try:
            await self._onward.carry(step, hidden)
        except TransferError as e:
            self._break(str(e))
        return ended

    def _step_ended(self, message: StepEnded) -> None:
        ended = self._steps.pop(message.serial, None)
        if ended is not None and not ended.done():
            draws = [
                None if d is None else Draw(d.token, d.logprob, list(d.top), d.is_end, d.error) for d in message.draws
            ]
            ended.set_result(Ended(draws, message.seconds, message.failure))

    def drop(self, id_: _Id) -> None:
        """Nobody wants it any more: no stage need go on."""
        if id_ in self._working:
            for peer in self._peers:
                self._life.link.post(peer, Cancel(*id_, peer))

    async def end(self, id_: _Id) -> tuple[str, int]:
        """Wait until no I/O of any stage touches the prompt's pages: why not all has arrived, and bytes stored."""
        if id_ not in self._working:
            return "", 0
        awaited = self._ends[id_] = _Awaited({peer.id for peer in self._peers})
        for peer in self._peers:
            self._life.link.post(peer, EndStageWork(self._id, *id_))
        await awaited.done.wait()
        del self._ends[id_]
        self._working.discard(id_)
        return awaited.problem, awaited.bytes_stored
