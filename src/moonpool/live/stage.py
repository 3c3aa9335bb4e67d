"""A further stage of a pipelined prefill instance: some of the layers, on the orders of the group's leader (PAPER §3).

It stores and streams the KV of its own layers as the leader does for its own, and gives hidden states to the next stage
while it computes the next step. One group follows another: a leader that is gone, or begins a new life, ends what was.
"""

from __future__ import annotations

import asyncio
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from msgspec import Struct

from moonpool.core.actions import Cancel
from moonpool.core.events import Reported
from moonpool.core.vocabulary import Incarnation, NodePeer, PartId, PartKind, Peer, RequestId
from moonpool.engine.engine import Bytes, Draw
from moonpool.engine.pipeline import StageEngine
from moonpool.errors import MoonpoolError
from moonpool.live.bringing import bring
from moonpool.live.chunks import rows_of, store_layer
from moonpool.live.neighbours import LOOK_SECONDS, Neighbours, Onward
from moonpool.live.sink import Sink
from moonpool.live.worker import WorkerLife, describe, in_thread
from moonpool.messenger.intake import SLOTS, Door, Intake
from moonpool.messenger.server import TcpServer
from moonpool.messenger.tcp import TcpMessenger
from moonpool.wire.link import Link
from moonpool.wire.messages import (
    Drawn,
    EndStageWork,
    Envelope,
    GroupBroken,
    GroupJoined,
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

READY_SECONDS = 0.5
"""Between two `StageReady`."""

_Id = tuple[RequestId, int]


class StageConfig(Struct, frozen=True):
    served_model: str
    leader: PartId
    stage: int
    """From 1."""
    stages: int
    node: PartId | None = None
    """None: the only node on this host."""
    chunk_tokens: int = 512
    """Most tokens of one step, as the leader has it."""
    token: str | None = None
    """The cluster's."""
    data_host: str = "127.0.0.1"
    data_port: int = 0


async def run_stage(link: Link, conductor: str, config: StageConfig, engine: StageEngine) -> None:
    """Join the cluster and serve one leader after another until cancelled or until the node is gone."""
    await StageWorker(link, conductor, config, engine).run()


class _StepAbortedError(Exception):
    """Nobody wants the running step any more."""


@dataclass(slots=True)
class _Prompt:
    work: Work
    arrived: float
    tokens: list[int]
    pages: tuple[int, ...]
    sink: Sink | None = None
    loading: asyncio.Task[None] | None = None
    dropped: bool = False

    def time_left(self) -> float:
        return self.work.time_left - (time.monotonic() - self.arrived)


@dataclass(slots=True)
class _Membership:
    """This stage in one life of its group."""

    leader: Peer
    intake: Intake
    home: NodePeer | None = None
    """None until all stages are there."""
    onward: Onward | None = None
    """None for the last stage."""
    prompts: dict[_Id, _Prompt] = field(default_factory=dict)
    steps: asyncio.Queue[tuple[Peer, PassOn]] = field(default_factory=lambda: asyncio.Queue(SLOTS + 1))
    passing: asyncio.Queue[tuple[PassOn, Bytes | None]] = field(default_factory=lambda: asyncio.Queue(1))
    over: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def group(self) -> Incarnation:
        return self.leader.incarnation


@dataclass(slots=True)
class _Totals:
    groups: int = 0
    computed_tokens: int = 0
    steps: int = 0
    step_seconds: float = 0.0
    failures: int = 0
    bytes_stored: int = 0


class StageWorker:
    def __init__(self, link: Link, conductor: str, config: StageConfig, engine: StageEngine) -> None:
        self._config = config
        self._engine = engine
        self._block = engine.space.block_tokens
        self._link = link
        me = describe(link, PartKind.STAGE, engine, 0, config.served_model)
        self._life = WorkerLife(link, conductor, config.node, me, self._report, self._counters, self._prepare)
        self._messenger = TcpMessenger(config.token)
        self._door = Door()
        self._server = TcpServer(config.data_host, config.data_port, config.token, self._door)
        self._in: _Membership | None = None
        self._totals = _Totals()
        self._engine_thread = ThreadPoolExecutor(1, "engine")
        self._store_thread = ThreadPoolExecutor(1, "store")

    async def run(self) -> None:
        await self._life.run(self._hear, set, lambda gateway: None, self._quiesce)

    def _quiesce(self) -> None:
        for prompt in self._in.prompts.values() if self._in is not None else ():
            prompt.dropped = True
        self._engine_thread.shutdown(cancel_futures=True)
        self._store_thread.shutdown(cancel_futures=True)
        self._messenger.close()
        self._server.close()

    def _report(self) -> Reported:
        me = self._link.me
        prompts = self._in.prompts.values() if self._in is not None else ()
        used = sum(len(prompt.pages) for prompt in prompts)
        return Reported(me.id, me.incarnation, queued=len(prompts), pages_free=self._engine.page_count - used)

    def _counters(self) -> dict[str, float]:
        t = self._totals
        prompts = self._in.prompts.values() if self._in is not None else ()
        return {
            "groups": t.groups,
            "computed_tokens": t.computed_tokens,
            "steps": t.steps,
            "step_seconds": t.step_seconds,
            "failed_steps": t.failures,
            "bytes_stored": t.bytes_stored,
            "pages_used": sum(len(prompt.pages) for prompt in prompts),
            "jobs": len(prompts),
            **{f"messenger_{name}": value for name, value in self._messenger.counters().items()},
        }

    # ---- one group after another

    async def _prepare(self) -> None:
        self._life.enter()
        while True:
            leader = await self._leader()
            slot_bytes = self._engine.hidden_bytes(self._config.chunk_tokens, self._config.chunk_tokens)
            mine = self._in = _Membership(leader, Intake(leader.incarnation, slot_bytes))
            self._door.intake = mine.intake
            tasks = [asyncio.create_task(work) for work in (self._announce(mine), self._compute_steps(mine))]
            tasks += [asyncio.create_task(work) for work in (self._pass_steps(mine), self._watch(mine))]
            over = asyncio.create_task(mine.over.wait())
            try:
                done, _ = await asyncio.wait((over, *tasks), return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            finally:
                for task in (over, *tasks):
                    task.cancel()
                await asyncio.wait((over, *tasks))
            await self._clear(mine)

    async def _leader(self) -> Peer:
        while True:
            for peer in self._life.membership.there():
                if peer.id == self._config.leader:
                    return peer
            await asyncio.sleep(LOOK_SECONDS)

    async def _announce(self, mine: _Membership) -> None:
        ready = StageReady(self._config.stage, mine.intake.address(self._life.here.id, self._server.address))
        while mine.home is None:
            self._link.post(mine.leader, ready)
            await asyncio.sleep(READY_SECONDS)
        await mine.over.wait()

    async def _watch(self, mine: _Membership) -> None:
        gone = await Neighbours(self._life.membership, [mine.leader]).lost()
        log.info("the leader %s (%s) is gone", gone.id, gone.incarnation)
        mine.over.set()

    async def _clear(self, mine: _Membership) -> None:
        """Nothing of this group is left: no compute, no I/O, no pages."""
        for prompt in mine.prompts.values():
            prompt.dropped = True
        # What the engine computes for it has ended when the thread does something else.
        await in_thread(self._engine_thread.submit(lambda: None).result)
        for prompt in mine.prompts.values():
            if prompt.loading is not None:
                await asyncio.wait([prompt.loading])
            if prompt.sink is not None:
                await prompt.sink.drain()
        self._in = self._door.intake = None
        mine.intake.close()

    # ---- what it hears

    def _hear(self, envelope: Envelope) -> None:
        mine, body = self._in, envelope.body
        if isinstance(body, Cancel):
            for (request, attempt), prompt in mine.prompts.items() if mine is not None else ():
                if request == body.request and attempt <= body.attempt:
                    prompt.dropped = True
            return
        group = getattr(body, "group", None)
        if mine is None or group != mine.group:
            log.debug("%s of another group from %s", type(body).__name__, envelope.sender.id)
            return
        match body:
            case JoinGroup():
                self._join(mine, body)
            case StageWork():
                self._take(mine, body)
            case EndStageWork(_, request, attempt):
                if known := mine.prompts.get((request, attempt)):
                    self._life.spawn(self._end(mine, known))
                else:
                    self._link.post(mine.leader, StageWorkEnded(mine.group, request, attempt, 0))
            case PassOn():
                try:
                    mine.steps.put_nowait((envelope.sender, body))
                except asyncio.QueueFull:
                    self._break(mine, f"more than {SLOTS} steps came at once")
            case Taken(_, serial):
                if mine.onward is not None:
                    mine.onward.taken(serial)
            case _:
                log.warning("%s from %s is not for a stage", type(body).__name__, envelope.sender.id)

    def _join(self, mine: _Membership, order: JoinGroup) -> None:
        if mine.home is not None:
            return
        problem = ""
        if order.stages != self._config.stages:
            problem = (
                f"it is of a pipeline of {self._config.stages}, not of {order.stages}: start all with one --pipeline"
            )
        elif order.next is not None and order.intake is not None:
            try:
                mine.onward = Onward(
                    self._link, mine.group, order.next, order.intake, self._life.here.id, self._messenger
                )
            except MoonpoolError as e:
                problem = str(e)
        mine.home = order.home
        self._totals.groups += 1
        self._link.post(mine.leader, GroupJoined(mine.group, problem))
        layers = self._engine.layers
        log.info("stage %d of %s: layers %d to %d", self._config.stage, mine.leader.id, layers.start, layers.stop - 1)

    def _break(self, mine: _Membership, reason: str) -> None:
        log.warning("the pipeline breaks: %s", reason)
        self._link.post(mine.leader, GroupBroken(mine.group, reason))

    # ---- a prompt's way

    def _take(self, mine: _Membership, order: StageWork) -> None:
        work = order.work
        id_ = work.request, work.attempt
        if id_ not in mine.prompts:
            prompt = mine.prompts[id_] = _Prompt(work, time.monotonic(), list(work.tokens), order.pages)
            prompt.loading = self._life.spawn(self._load(mine, prompt, order))

    async def _load(self, mine: _Membership, prompt: _Prompt, order: StageWork) -> None:
        problem = ""
        work, home = prompt.work, mine.home
        assert home is not None
        try:
            prompt.sink = Sink(
                self._engine,
                self._life.node,
                self._life.here,
                self._messenger,
                work,
                home=home,
                caching=order.caching,
                is_wanted=lambda: not prompt.dropped,
            )
            blocks = len(order.marks)
            await prompt.sink.open(blocks)
            if blocks and not prompt.dropped:
                await bring(
                    *(self._engine, self._life.node, self._life.here, home, self._messenger),
                    *(work.keys[:blocks], order.marks, prompt.pages, prompt.time_left()),
                )
                hits = list(zip(range(blocks), prompt.pages, strict=False))
                prompt.sink.after(self._store_thread.submit(self._store_hits, prompt, hits))
        except MoonpoolError as e:
            problem = f"{self._link.me.id}: {e}"
        self._link.post(mine.leader, StageLoaded(mine.group, work.request, work.attempt, problem))

    def _store_hits(self, prompt: _Prompt, blocks: list[tuple[int, int]]) -> None:
        """Blocks that were hits here but that the decode node lacks."""
        assert prompt.sink is not None
        for layer in self._engine.layers:
            if prompt.dropped:
                return
            prompt.sink.store_blocks(layer, blocks, prompt.time_left(), are_hits=True)

    async def _end(self, mine: _Membership, prompt: _Prompt) -> None:
        if prompt.loading is not None:
            await asyncio.wait([prompt.loading])
        problem = await prompt.sink.drain() if prompt.sink is not None else None
        stored = prompt.sink.bytes_stored if prompt.sink is not None else 0
        self._totals.bytes_stored += stored
        work = prompt.work
        mine.prompts.pop((work.request, work.attempt), None)
        self._link.post(mine.leader, StageWorkEnded(mine.group, work.request, work.attempt, stored, problem or ""))

    # ---- a step's way

    async def _compute_steps(self, mine: _Membership) -> None:
        loop = asyncio.get_running_loop()
        while True:
            sender, step = await mine.steps.get()
            began = time.monotonic()
            failure, out = step.failure, None
            if step.nbytes and not failure:
                try:
                    out = await loop.run_in_executor(self._engine_thread, self._compute, mine, step)
                except _StepAbortedError:
                    out = None
                except Exception as e:
                    log.exception("a prefill step failed")
                    failure = f"{self._link.me.id}: the engine failed: {e}"
                    self._totals.failures += 1
            seconds = time.monotonic() - began
            self._totals.steps += 1
            self._totals.step_seconds += seconds
            self._totals.computed_tokens += sum(chunk.count for chunk in step.chunks)
            self._link.post(sender, Taken(mine.group, step.serial))
            slowest = max(seconds, step.seconds)
            if mine.onward is None:
                draws = [None] * len(step.chunks) if out is None else out
                assert isinstance(draws, list)
                told = tuple(None if draw is None else _told(draw) for draw in draws)
                self._link.post(mine.leader, StepEnded(mine.group, step.serial, told, slowest, failure))
            else:
                assert not isinstance(out, list)
                nbytes = 0 if out is None else out.nbytes
                onward = PassOn(mine.group, step.serial, step.chunks, nbytes, slowest, failure)
                await mine.passing.put((onward, out))

    async def _pass_steps(self, mine: _Membership) -> None:
        """Beside the next step's compute."""
        while True:
            step, hidden = await mine.passing.get()
            assert mine.onward is not None
            try:
                await mine.onward.carry(step, hidden)
            except MoonpoolError as e:
                self._break(mine, str(e))
                await mine.over.wait()

    def _compute(self, mine: _Membership, step: PassOn) -> Bytes | list[Draw | None]:
        """On the engine's thread."""
        prompts = [mine.prompts[(chunk.request, chunk.attempt)] for chunk in step.chunks]

        def on_layer(layer: int) -> None:
            if all(prompt.dropped for prompt in prompts):
                raise _StepAbortedError
            for chunk, prompt in zip(step.chunks, prompts, strict=True):
                if not prompt.dropped and prompt.sink is not None:
                    prompt.sink.after(self._store_thread.submit(store_layer, self._block, prompt, chunk, layer))

        if all(prompt.dropped for prompt in prompts):
            raise _StepAbortedError
        rows = rows_of(self._engine, step.chunks, prompts)
        return self._engine.stage(rows, mine.intake.view(step.serial, step.nbytes), on_layer)


def _told(draw: Draw) -> Drawn:
    return Drawn(draw.token, draw.logprob, tuple(draw.top), draw.is_end, draw.error)
