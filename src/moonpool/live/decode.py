"""The decode worker: drives `core.decode.DecodeInstance` with a real engine and node."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from msgspec import Struct

from moonpool.core import decode as core
from moonpool.core.actions import Cancel
from moonpool.core.blocks import extend_keys
from moonpool.core.cost import DecodeCoefficients, DecodeCost
from moonpool.core.events import DecodeJoined, DecodeRefused, DecodeStepped, Finished, Preempted, Reported
from moonpool.core.vocabulary import PartId, PartKind, Peer, RequestId
from moonpool.engine.engine import Draw, Engine, Row
from moonpool.errors import MoonpoolError
from moonpool.live.sink import copy_in_room, keep
from moonpool.live.worker import Endings, WorkerLife, describe, in_thread
from moonpool.store.pending import awaited
from moonpool.store.views import RoomContents
from moonpool.wire.link import Link
from moonpool.wire.membership import Books
from moonpool.wire.messages import Abandon, Envelope, HandOver, Stop, TokenOut, Tokens, Work

log = logging.getLogger(__name__)

REPORT_STEPS_SECONDS = 0.5


class DecodeConfig(Struct, frozen=True):
    served_model: str
    node: PartId | None = None
    """None: the only node on this host."""
    max_batch: int = 16
    queue_bound: int = 256
    cost: DecodeCoefficients = DecodeCoefficients()
    """What a step is thought to take before any was measured."""


async def run_decode(link: Link, conductor: str, config: DecodeConfig, engine: Engine) -> None:
    """Join the cluster and serve until cancelled or until the node is gone."""
    await DecodeWorker(link, conductor, config, engine).run()


@dataclass(slots=True)
class _Job:
    work: Work
    arrived: float
    tokens: list[int]
    contents: RoomContents | None = None
    refusal: str | None = None
    """Why the request was dropped by this worker itself."""
    finish: str | None = None
    last: TokenOut | None = None
    """The final token, sent when the blocks are kept: whoever asks the next turn at once finds them."""
    dropped: bool = False

    @property
    def id(self) -> tuple[RequestId, int]:
        return self.work.request, self.work.attempt

    @property
    def position(self) -> int:
        """Of the next output token."""
        return len(self.tokens) - self.work.prompt_tokens

    def time_left(self) -> float:
        return self.work.time_left - (time.monotonic() - self.arrived)


@dataclass(slots=True)
class _Totals:
    joined: int = 0
    finished: int = 0
    refused: int = 0
    tokens: int = 0
    steps: int = 0
    step_seconds: float = 0.0
    blocks_loaded: int = 0
    blocks_stored: int = 0


class DecodeWorker:
    def __init__(self, link: Link, conductor: str, config: DecodeConfig, engine: Engine) -> None:
        self._config = config
        self._engine = engine
        self._block = engine.space.block_tokens
        self._cost = DecodeCost(config.cost)
        self._instance = core.DecodeInstance(
            pages=engine.page_count,
            block_tokens=self._block,
            slots=config.max_batch,
            queue_bound=config.queue_bound,
            cost=self._cost,
        )
        me = describe(link, PartKind.DECODE, engine, config.max_batch, config.served_model)
        self._life = WorkerLife(link, conductor, config.node, me, self._report, self._counters)
        self._jobs: dict[RequestId, _Job] = {}
        self._books = Books(self._instance.check_integrity)
        self._ended = Endings()
        self._stopped = Endings()
        """Stops that came before their hand-over."""
        self._totals = _Totals()
        self._told_steps = 0.0
        self._engine_thread = ThreadPoolExecutor(1, "engine")

    async def run(self) -> None:
        await self._life.run(
            self._hear, self._gateways, self._drop_gateway, lambda: self._engine_thread.shutdown(cancel_futures=True)
        )

    def _gateways(self) -> set[Peer]:
        return {job.work.gateway for job in self._jobs.values()}

    def _drop_gateway(self, gateway: Peer) -> None:
        for job in [j for j in self._jobs.values() if j.work.gateway == gateway]:
            self._drop(job)

    # ---- what the cluster hears of this worker

    def _report(self) -> Reported:
        return Reported(
            id=self._life.link.me.id,
            incarnation=self._life.link.me.incarnation,
            queued=self._instance.queued,
            running=self._instance.running,
            pages_free=self._instance.pool.free,
            context_tokens=self._instance.context_tokens,
        )

    def _counters(self) -> dict[str, float]:
        t = self._totals
        return {
            "joined": t.joined,
            "finished": t.finished,
            "refused": t.refused,
            "preempted": self._instance.preemptions,
            "generated_tokens": t.tokens,
            "steps": t.steps,
            "step_seconds": t.step_seconds,
            "blocks_loaded": t.blocks_loaded,
            "blocks_stored": t.blocks_stored,
            "pages_used": self._instance.pool.used,
            "jobs": len(self._jobs),
            "integrity_failures": self._books.failures if self._jobs else self._books.audit(),
        }

    # ---- what it hears

    def _hear(self, envelope: Envelope) -> None:
        match envelope.body:
            case HandOver(work):
                self._take(work)
            case Cancel(request, attempt):
                self._drop_up_to(request, attempt)
            case Abandon(request, attempt):
                self._abandoned(request, attempt)
            case Stop(request, attempt):
                self._stop(request, attempt)
            case other:
                log.warning("%s from %s is not for a decode worker", type(other).__name__, envelope.sender.id)

    def _take(self, work: Work) -> None:
        if self._ended.has(work.request, work.attempt):
            return
        known = self._jobs.get(work.request)
        if known is not None:
            if known.work.attempt >= work.attempt:
                return
            self._drop(known)
        job = _Job(work, time.monotonic(), list(work.tokens))
        if work.request in self._jobs:
            self._refuse(job, "an older attempt still holds pages here")
            return
        self._jobs[work.request] = job
        if self._stopped.has(work.request, work.attempt):
            job.finish = "stop"
        most = work.prompt_tokens + work.sampling.max_tokens
        self._feed(core.HandedOver(*job.id, len(job.tokens), most, work.place.rank, work.place.tbt_limit))
        if job.finish is not None:
            self._feed(core.Stopped(*job.id))
        elif self._jobs.get(work.request) is job:
            self._life.spawn(self._await_kv(job))

    def _drop_up_to(self, request: RequestId, attempt: int) -> None:
        self._ended.add(request, attempt)
        job = self._jobs.get(request)
        if job is not None and job.work.attempt <= attempt:
            self._drop(job)

    def _drop(self, job: _Job) -> None:
        job.dropped = True
        self._ended.add(*job.id)
        self._feed(core.Dropped(*job.id))

    def _abandoned(self, request: RequestId, attempt: int) -> None:
        """The prefill worker has told the Conductor already."""
        self._ended.add(request, attempt)
        job = self._jobs.get(request)
        if job is not None and job.work.attempt == attempt:
            self._drop(job)

    def _stop(self, request: RequestId, attempt: int) -> None:
        job = self._jobs.get(request)
        if job is None or job.work.attempt != attempt:
            if not self._ended.has(request, attempt):
                self._stopped.add(request, attempt)
            return
        if job.finish is None:
            job.finish = "stop"
            self._feed(core.Stopped(*job.id))

    def _feed(self, event: core.DecodeEvent) -> None:
        for action in self._instance.handle(event, time.monotonic()):
            match action:
                case core.LoadKv(request, _, pages):
                    self._life.spawn(self._load(self._jobs[request], pages))
                case core.Step(rows):
                    self._life.spawn(self._step(rows))
                case core.Drain(request, _, tokens, pages, ending):
                    job = self._jobs[request]
                    if pages:
                        self._life.spawn(self._drain(job, tokens, pages, ending))
                    else:
                        self._leave(job, ending)
                case core.Refuse(request, _, reason, limit):
                    self._refuse(self._jobs.pop(request), reason, limit)

    # ---- one request's way

    async def _await_kv(self, job: _Job) -> None:
        """Until prefill has delivered everything into the room, or never will."""
        try:
            job.contents = await awaited(self._life.node.await_room(*job.id, job.time_left()))
            if job.contents is not None and job.work.place.lacking:
                # Prefill may have written them from elsewhere.
                self._life.node.tell_tokens(job.contents, job.work.tokens)
        except MoonpoolError as e:
            job.refusal = str(e)
        if job.contents is None:
            job.refusal = job.refusal or "its KV did not arrive"
            self._feed(core.Dropped(*job.id))
        elif job.dropped or job.finish is not None:
            self._life.node.close_room(job.contents)
        else:
            self._feed(core.KvArrived(*job.id))

    async def _load(self, job: _Job, pages: tuple[int, ...]) -> None:
        assert job.contents is not None
        blocks = len(job.contents.blocks)
        await in_thread(copy_in_room, self._engine, job.contents, len(job.work.tokens) - 1, pages)
        self._life.node.close_room(job.contents)
        job.contents = None
        self._totals.joined += 1
        self._totals.blocks_loaded += blocks
        if not job.dropped:
            self._life.tell(DecodeJoined(*job.id, self._life.link.me.id))
            log.info("request %s: %s attempt %d joined with %d tokens", job.work.label, *job.id, len(job.tokens))
        self._feed(core.KvLoaded(*job.id))

    async def _step(self, rows: tuple[core.StepRow, ...]) -> None:
        jobs = [self._jobs[row.request] for row in rows]
        began = time.monotonic()
        try:
            draws = await asyncio.get_running_loop().run_in_executor(self._engine_thread, self._compute, rows, jobs)
        except Exception as e:
            log.exception("a decode step failed")
            for job in jobs:
                job.refusal = f"the engine failed: {e}"
            self._feed(core.Stepped((), failed=True))
            return
        seconds = time.monotonic() - began
        self._totals.steps += 1
        self._totals.step_seconds += seconds
        self._totals.tokens += sum(draw.error is None for draw in draws)
        self._emit(jobs, draws)
        self._tell_step(rows, seconds)
        self._feed(core.Stepped(tuple(job.work.request for job in jobs if job.finish is not None)))

    def _compute(self, rows: tuple[core.StepRow, ...], jobs: list[_Job]) -> list[Draw]:
        """On the engine's thread."""
        for row in rows:
            if row.tokens % self._block == 1 or self._block == 1:
                self._engine.clear(row.pages[-1])
        draws = self._engine.step(
            [
                Row(
                    tokens=job.tokens,
                    prompt_tokens=job.work.prompt_tokens,
                    start=row.tokens - 1,
                    count=1,
                    pages=row.pages,
                    sampling=job.work.sampling,
                )
                for row, job in zip(rows, jobs, strict=True)
            ]
        )
        return [draw for draw in draws if draw is not None]

    def _emit(self, jobs: list[_Job], draws: list[Draw]) -> None:
        """All tokens of the step but final ones, one message a gateway. Requests without a token are dropped."""
        out: dict[Peer, list[TokenOut]] = defaultdict(list)
        for job, draw in zip(jobs, draws, strict=True):
            if draw.error is not None:
                if not job.dropped and job.finish is None:
                    job.refusal = draw.error
                    self._drop(job)
                continue
            position = job.position
            job.tokens.append(draw.token)
            if job.dropped or job.finish is not None:
                continue
            if draw.is_end:
                job.finish = "stop"
            elif position + 1 >= job.work.sampling.max_tokens:
                job.finish = "length"
            token = TokenOut(*job.id, position, draw.token, draw.logprob, tuple(draw.top), job.finish)
            if job.finish is None:
                out[job.work.gateway].append(token)
            else:
                job.last = token
        for gateway, tokens in out.items():
            self._life.link.post(gateway, Tokens(tuple(tokens)))

    def _tell_step(self, rows: tuple[core.StepRow, ...], seconds: float) -> None:
        now = time.monotonic()
        if now - self._told_steps >= REPORT_STEPS_SECONDS:
            self._told_steps = now
            context = sum(row.tokens for row in rows)
            self._cost.observe(len(rows), context, seconds)
            self._life.tell(DecodeStepped(self._life.link.me.id, len(rows), context, seconds))

    async def _drain(self, job: _Job, tokens: int, pages: tuple[int, ...], ending: core.Ending) -> None:
        """Keep the whole blocks that have KV for the next turn, or for the next attempt."""
        whole = (tokens - 1) // self._block
        if ending is not core.Ending.DROPPED and whole:
            space = self._engine.space
            keys = extend_keys(job.work.keys, job.tokens[: whole * self._block], space, job.work.salt)
            try:
                self._totals.blocks_stored += await keep(self._engine, self._life.node, keys, job.tokens, pages)
            except MoonpoolError as e:
                log.warning("request %s: its blocks were not kept: %s", job.work.label, e)
        self._leave(job, ending)
        self._feed(core.KvStored(*job.id))

    def _leave(self, job: _Job, ending: core.Ending) -> None:
        """Out of the tables; whoever must know is told."""
        me = self._life.link.me.id
        if job.contents is not None:
            self._life.node.close_room(job.contents)
            job.contents = None
        self._ended.add(*job.id)
        del self._jobs[job.work.request]
        if ending is core.Ending.FINISHED:
            if job.last is not None and not job.dropped:
                self._life.link.post(job.work.gateway, Tokens((job.last,)))
            self._totals.finished += 1
            self._life.tell(Finished(*job.id, me, job.position, job.finish or "stop"))
            log.info("request %s: %s attempt %d finished, %d tokens", job.work.label, *job.id, job.position)
        elif ending is core.Ending.PREEMPTED:
            self._life.tell(Preempted(*job.id, me))
            log.info("request %s: %s attempt %d preempted at %d tokens", job.work.label, *job.id, len(job.tokens))
        elif job.refusal is not None:
            self._refuse(job, job.refusal)

    def _refuse(self, job: _Job, reason: str, limit: bool = False) -> None:
        self._totals.refused += 1
        self._ended.add(*job.id)
        log.warning("request %s: %s attempt %d refused: %s", job.work.label, *job.id, reason)
        self._life.tell(DecodeRefused(*job.id, self._life.link.me.id, reason, limit))
