"""The prefill worker: drives `core.prefill.PrefillInstance` with a real engine, node and Messenger."""

from __future__ import annotations

import asyncio
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from msgspec import Struct
from msgspec.structs import replace

from moonpool.core import prefill as core
from moonpool.core.actions import Cancel
from moonpool.core.arrival import patience
from moonpool.core.cost import PrefillCoefficients, PrefillCost
from moonpool.core.events import Finished, PrefillDone, PrefillFailed, Reported
from moonpool.core.vocabulary import PartId, PartKind, Peer, RequestId
from moonpool.engine.engine import Bytes, Draw
from moonpool.engine.pipeline import StageEngine
from moonpool.errors import MoonpoolError, PeerUnavailableError
from moonpool.live.chunks import rows_of, store_layer
from moonpool.live.group import Group
from moonpool.live.prefix import Prefix
from moonpool.live.sink import Sink
from moonpool.live.worker import Endings, WorkerLife, describe
from moonpool.messenger.tcp import TcpMessenger
from moonpool.store.pending import awaited
from moonpool.store.views import Stream
from moonpool.wire.link import Link
from moonpool.wire.membership import Books
from moonpool.wire.messages import Abandon, Envelope, HandOver, PrefillOrder, TokenOut, Tokens, Work

log = logging.getLogger(__name__)

STALL_SECONDS = 0.25
"""The most that a step waits for a layer of one of its prompts, which was to come sooner: the others wait with it."""


class PrefillConfig(Struct, frozen=True):
    served_model: str
    node: PartId | None = None
    """None: the only node on this host."""
    chunk_tokens: int = 512
    """Most tokens of one step; several prompts share a step."""
    queue_bound: int = 256
    token: str | None = None
    """The cluster's."""
    stages: int = 1
    """Of the pipeline that it leads: the engine is its first stage."""
    cost: PrefillCoefficients = PrefillCoefficients()
    """What steps are thought to take before any was measured; of all layers."""


async def run_prefill(link: Link, conductor: str, config: PrefillConfig, engine: StageEngine) -> None:
    """Join the cluster and serve until cancelled or until the node is gone.

    Raises StageLostError where another stage of its pipeline is: run it again with a new link.
    """
    worker = PrefillWorker(link, conductor, config, engine)
    await worker.run()


class _StepAbortedError(Exception):
    """Nobody wants the running step any more."""


class _StepFailedError(Exception):
    """In a further stage."""


@dataclass(slots=True)
class _Job:
    work: Work
    arrived: float
    tokens: list[int]
    pages: tuple[int, ...] = ()
    sink: Sink | None = None
    prefix: Prefix | None = None
    stumbled: bool = False
    """A layer of its prefix did not come before it was needed: the step counts for nothing."""
    loading: asyncio.Task[None] | None = None
    handing: asyncio.Task[None] | None = None
    load_seconds: float = 0.0
    started: float = 0.0
    compute_seconds: float = 0.0
    dropped: bool = False
    finish: str | None = None
    """Set when the first token already ends the request."""
    failure: str | None = None
    late: bool = False
    """It was given up: its first token could not come in time any more."""

    @property
    def id(self) -> tuple[RequestId, int]:
        return self.work.request, self.work.attempt

    @property
    def hit_blocks(self) -> int:
        return 0 if self.prefix is None else self.prefix.blocks

    def time_left(self) -> float:
        return self.work.time_left - (time.monotonic() - self.arrived)


@dataclass(slots=True)
class _Totals:
    prompts: int = 0
    computed_tokens: int = 0
    cached_tokens: int = 0
    steps: int = 0
    step_seconds: float = 0.0
    failures: int = 0
    late_layers: int = 0
    stall_seconds: float = 0.0
    bytes_stored: int = 0


@dataclass(slots=True)
class _Stall:
    """Of one step: how long it has waited for layers."""

    seconds: float = 0.0

    def has(self, prefix: Prefix | None, layer: int) -> bool:
        """Whether that layer is in the pages, or comes as long as the step may wait."""
        if prefix is None:
            return True
        began = time.monotonic()
        found = prefix.has(layer, began + STALL_SECONDS - self.seconds)
        self.seconds += time.monotonic() - began
        return found


class PrefillWorker:
    def __init__(self, link: Link, conductor: str, config: PrefillConfig, engine: StageEngine) -> None:
        self._config = config
        self._engine = engine
        self._block = engine.space.block_tokens
        stages = config.stages
        self._instance = core.PrefillInstance(
            pages=engine.page_count,
            block_tokens=self._block,
            chunk_tokens=config.chunk_tokens,
            queue_bound=config.queue_bound,
            machines=stages,
            step=config.cost.shared(1 / stages),
        )
        me = describe(link, PartKind.PREFILL, engine, config.queue_bound, config.served_model, stages=stages)
        prepare = self._form if stages > 1 else None
        self._life = WorkerLife(link, conductor, config.node, me, self._report, self._counters, prepare)
        self._messenger = TcpMessenger(config.token)
        self._group = Group(self._life, self._messenger, stages) if stages > 1 else None
        self._jobs: dict[tuple[RequestId, int], _Job] = {}
        self._books = Books(self._instance.check_integrity)
        self._ended = Endings()
        self._totals = _Totals()
        self._cost = PrefillCost(config.cost)
        """As measured here."""
        self._load_thread = ThreadPoolExecutor(1, "load")
        self._engine_thread = ThreadPoolExecutor(1, "engine")
        self._store_thread = ThreadPoolExecutor(1, "store")

    async def run(self) -> None:
        await self._life.run(self._hear, self._gateways, self._drop_gateway, self._quiesce)

    async def _form(self) -> None:
        assert self._group is not None
        await self._group.form()

    def _gateways(self) -> set[Peer]:
        return {job.work.gateway for job in self._jobs.values()}

    def _drop_gateway(self, gateway: Peer) -> None:
        for job in [j for j in self._jobs.values() if j.work.gateway == gateway]:
            self._drop(job)

    def _quiesce(self) -> None:
        for job in self._jobs.values():
            job.dropped = True
        self._engine_thread.shutdown(cancel_futures=True)
        self._load_thread.shutdown(cancel_futures=True)
        self._store_thread.shutdown(cancel_futures=True)
        self._messenger.close()

    # ---- what the cluster hears of this worker

    def _report(self) -> Reported:
        return Reported(
            id=self._life.link.me.id,
            incarnation=self._life.link.me.incarnation,
            queued=self._instance.queued,
            pages_free=self._instance.pool.free,
            context_tokens=self._instance.queued_tokens,
        )

    def _counters(self) -> dict[str, float]:
        t = self._totals
        return {
            "prompts": t.prompts,
            "computed_tokens": t.computed_tokens,
            "cached_tokens": t.cached_tokens,
            "steps": t.steps,
            "step_seconds": t.step_seconds,
            "failed_prompts": t.failures,
            "late_layers": t.late_layers,
            "stall_seconds": t.stall_seconds,
            "bytes_stored": t.bytes_stored,
            "pages_used": self._instance.pool.used,
            "jobs": len(self._jobs),
            "integrity_failures": self._books.failures if self._jobs else self._books.audit(),
            **{f"messenger_{name}": value for name, value in self._messenger.counters().items()},
        }

    # ---- what it hears

    def _hear(self, envelope: Envelope) -> None:
        match envelope.body:
            case PrefillOrder(work):
                self._order(work)
            case Cancel(request, attempt):
                self._drop_up_to(request, attempt)
            case _ if self._group is not None and self._group.hear(envelope):
                pass
            case other:
                log.warning("%s from %s is not for a prefill worker", type(other).__name__, envelope.sender.id)

    def _order(self, work: Work) -> None:
        if self._ended.has(work.request, work.attempt) or (work.request, work.attempt) in self._jobs:
            return
        self._drop_up_to(work.request, work.attempt - 1)
        job = _Job(work, time.monotonic(), list(work.tokens))
        self._jobs[job.id] = job
        log.debug("request %s: %s attempt %d, %d tokens", work.label, *job.id, len(job.tokens))
        place = work.place
        self._feed(
            core.Ordered(*job.id, len(job.tokens), place.rank, place.compute_seconds, place.ttft_left, place.awaits)
        )

    def _drop_up_to(self, request: RequestId, attempt: int) -> None:
        self._ended.add(request, attempt)
        for job in [j for j in self._jobs.values() if j.work.request == request and j.work.attempt <= attempt]:
            self._drop(job)

    def _drop(self, job: _Job) -> None:
        job.dropped = True
        if not job.pages:
            del self._jobs[job.id]
        if self._group is not None:
            self._group.drop(job.id)
        self._feed(core.Dropped(*job.id))

    def _feed(self, event: core.PrefillEvent) -> None:
        for action in self._instance.handle(event, time.monotonic()):
            match action:
                case core.Load(request, attempt, pages):
                    job = self._jobs[(request, attempt)]
                    job.pages = pages
                    job.loading = self._life.spawn(self._load(job))
                case core.Step(chunks):
                    self._life.spawn(self._step(chunks))
                case core.Drain(request, attempt):
                    self._life.spawn(self._drain(self._jobs[(request, attempt)]))
                case core.GiveUp(request, attempt, reason):
                    job = self._jobs[(request, attempt)]
                    job.failure, job.late, job.dropped = reason, True, True
                    if not job.pages:
                        del self._jobs[job.id]
                        self._fail(job, reason)
                case core.Refuse(request, attempt, reason):
                    job = self._jobs.pop((request, attempt))
                    self._fail(job, reason)

    # ---- one order's way

    async def _load(self, job: _Job) -> None:
        """Have what the pool has of the prefix come into the pages; the rest will be computed, from when it may begin.

        Layer by layer (PAPER §3): the others come while the first ones are computed on.
        """
        began = time.monotonic()
        work = job.work
        keys = work.keys[: (len(job.tokens) - 1) // self._block]
        fetch = work.place.fetch
        stream: Stream | None = None
        source, fetched = (None, 0) if fetch is None else (fetch.source, fetch.first + fetch.count)
        try:
            is_shared = self._group is not None
            job.sink = Sink(
                self._engine,
                self._life.node,
                self._life.here,
                self._messenger,
                work,
                is_shared=is_shared,
                is_wanted=lambda: not job.dropped,
            )
            if not job.dropped:
                stream = await awaited(
                    self._life.node.stream(work.place.space, keys, source, fetched, job.time_left(), is_shared)
                )
                try:
                    if source is not None:
                        self._life.node.tell_tokens(stream, job.tokens)
                    await job.sink.open(len(stream.views))
                except BaseException:
                    stream.close()
                    raise
                job.prefix = self._prefix(job, stream)
        except MoonpoolError as e:
            job.failure = str(e)
            self._drop(job)
            return
        await self._await_prefix(job)
        if self._group is not None and job.sink is not None and not job.dropped:
            try:
                left = replace(work, time_left=job.time_left())
                marks = () if stream is None else stream.marks(job.hit_blocks)
                await self._group.load(left, job.pages, marks, job.sink.caching)
            except MoonpoolError as e:
                job.failure = str(e)
                self._drop(job)
                return
        job.load_seconds = time.monotonic() - began
        self._feed(core.Loaded(*job.id, job.hit_blocks))

    def _prefix(self, job: _Job, stream: Stream) -> Prefix:
        """On the load thread each layer of the hits is given to the store thread: the decode node may lack some."""

        def on_layer(layer: int, blocks: int) -> None:
            assert job.sink is not None
            job.sink.after(self._store_thread.submit(self._store_hits, job, layer, blocks))

        return Prefix(self._engine, self._load_thread, stream, job.pages, on_layer)

    async def _await_prefix(self, job: _Job) -> None:
        """Until computing may begin; blocks that do not come sooner than they are computed are given up."""
        prefix = job.prefix
        if prefix is None:
            return
        hits = prefix.blocks * self._block
        chunk = self._cost.seconds(min(len(job.tokens), hits + self._config.chunk_tokens), hits)
        until = time.monotonic() + patience(self._cost.seconds(hits, 0), job.time_left())
        by_layers = self._engine.takes_layers and self._group is None
        if job.dropped:
            await prefix.stop()
        elif not await (prefix.enough(chunk, until) if by_layers else prefix.complete(until)):
            log.info("request %s: not all of its %d cached blocks came", job.work.label, prefix.blocks)
            await self._give_up_rest(job, prefix)

    async def _give_up_rest(self, job: _Job, prefix: Prefix) -> None:
        """The blocks that are not whole will be computed, in pages whose layers may be on their way to decode."""
        await prefix.cut()
        if job.sink is not None:
            await job.sink.settle()

    async def _load_again(self, job: _Job) -> None:
        """Its step went on without a layer. It begins again with the blocks that are whole; nothing of it is stored."""
        assert job.prefix is not None
        prefix = job.prefix
        seconds = patience(self._cost.seconds(prefix.blocks * self._block, 0), job.time_left())
        await prefix.complete(time.monotonic() + seconds)
        await self._give_up_rest(job, prefix)
        job.stumbled = False
        self._feed(core.Loaded(*job.id, job.hit_blocks))

    def _store_hits(self, job: _Job, layer: int, blocks: int) -> None:
        """On the store thread: hits here that the decode node lacks."""
        if job.sink is not None and not job.dropped:
            hits = list(zip(range(blocks), job.pages, strict=False))
            job.sink.store_blocks(layer, hits, job.time_left(), are_hits=True)

    async def _step(self, chunks: tuple[core.Chunk, ...]) -> None:
        jobs = [self._jobs[(c.request, c.attempt)] for c in chunks]
        loop = asyncio.get_running_loop()
        began = time.monotonic()
        for job in jobs:
            job.started = job.started or began
        try:
            if self._group is None:
                out = await loop.run_in_executor(self._engine_thread, self._compute, chunks, jobs)
                assert isinstance(out, list)
                draws = out
                seconds = time.monotonic() - began
                self._totals.step_seconds += seconds
            else:
                draws, seconds = await self._compute_in_stages(self._group, chunks, jobs)
        except _StepAbortedError:
            draws, seconds = [None] * len(chunks), time.monotonic() - began
            self._totals.step_seconds += seconds
        except Exception as e:
            log.exception("a prefill step failed")
            for job in jobs:
                job.failure = f"the engine failed: {e}"
            self._feed(core.StepDone(failed=True))
            return
        self._totals.steps += 1
        tokens = sum(chunk.count for chunk in chunks)
        for chunk, job, draw in zip(chunks, jobs, draws, strict=True):
            job.compute_seconds += seconds * chunk.count / tokens
            self._totals.computed_tokens += chunk.count
            if draw is None or job.dropped or job.stumbled:
                continue
            if draw.error is None:
                self._first_token(job, draw)
            else:
                job.failure = draw.error
                self._drop(job)
        again = [job for job in jobs if job.stumbled and not job.dropped]
        whole = 0.0 if all(job.dropped or job.stumbled for job in jobs) else seconds
        self._feed(core.StepDone(again=tuple(job.id for job in again), seconds=whole))
        for job in again:
            job.loading = self._life.spawn(self._load_again(job))

    async def _compute_in_stages(
        self, group: Group, chunks: tuple[core.Chunk, ...], jobs: list[_Job]
    ) -> tuple[list[Draw | None], float]:
        """The draws, and the seconds of the slowest stage. The next step begins when this stage has done its part.

        Steps end in order, so one that is aborted or fails here goes through the other stages too.
        """
        began = time.monotonic()
        failure, hidden = "", None
        try:
            hidden = await asyncio.get_running_loop().run_in_executor(self._engine_thread, self._compute, chunks, jobs)
        except _StepAbortedError:
            pass
        except Exception as e:
            log.exception("a prefill step failed")
            failure = str(e) or type(e).__name__
        seconds = time.monotonic() - began
        self._totals.step_seconds += seconds
        assert not isinstance(hidden, list), "the leader of a pipeline is not its last stage"
        passed = await group.pass_on(chunks, hidden, seconds, failure)
        self._feed(core.Passed())
        ended = await passed
        if ended.failure:
            raise _StepFailedError(ended.failure)
        return ended.draws, ended.seconds

    def _compute(self, chunks: tuple[core.Chunk, ...], jobs: list[_Job]) -> Bytes | list[Draw | None]:
        """On the engine's thread: draws, or what the next stage of the pipeline takes."""
        rows = rows_of(self._engine, chunks, jobs)
        stall = _Stall()

        def on_layer(layer: int) -> None:
            for chunk, job in zip(chunks, jobs, strict=True):
                if not (job.dropped or job.stumbled) and job.sink is not None:
                    job.sink.after(self._store_thread.submit(store_layer, self._block, job, chunk, layer))
            for job in jobs:
                if not (job.dropped or job.stumbled) and not stall.has(job.prefix, layer):
                    job.stumbled = True
                    self._totals.late_layers += 1
                    log.warning("request %s: layer %d of its prefix did not come in time", job.work.label, layer)
            if all(job.dropped or job.stumbled for job in jobs):
                raise _StepAbortedError

        try:
            if self._group is not None:
                return self._engine.stage(rows, None, on_layer)
            return self._engine.step(rows, on_layer)
        finally:
            self._totals.stall_seconds += stall.seconds

    def _first_token(self, job: _Job, draw: Draw) -> None:
        """The token to the gateway, the request to its decode worker, the facts to the Conductor."""
        work = job.work
        position = len(job.tokens) - work.prompt_tokens
        cached = job.hit_blocks * self._block
        if draw.is_end:
            job.finish = "stop"
        elif position + 1 >= work.sampling.max_tokens:
            job.finish = "length"
        token = TokenOut(
            work.request,
            work.attempt,
            position,
            draw.token,
            draw.logprob,
            tuple(draw.top),
            job.finish,
            cached,
        )
        self._life.link.post(work.gateway, Tokens((token,)))
        self._totals.prompts += 1
        self._totals.cached_tokens += cached
        computed = len(job.tokens) - cached
        self._cost.observe(len(job.tokens), cached, job.compute_seconds)
        job.tokens.append(draw.token)
        if job.finish is None:
            handed = replace(work, tokens=tuple(job.tokens), time_left=job.time_left())
            job.handing = self._life.spawn(self._hand_over(job, HandOver(handed, self._life.link.me, cached)))
        queue_seconds = job.started - job.arrived - job.load_seconds
        self._life.tell(
            PrefillDone(*job.id, self._life.link.me.id, computed, cached, queue_seconds, job.compute_seconds)
        )
        log.info(
            "request %s: %s attempt %d prefilled %d tokens (%d cached) in %.3f s",
            work.label,
            *job.id,
            computed,
            cached,
            job.compute_seconds,
        )

    async def _hand_over(self, job: _Job, order: HandOver) -> None:
        try:
            await self._life.link.send(job.work.place.decode, order)
        except PeerUnavailableError as e:
            job.failure = str(e)

    async def _drain(self, job: _Job) -> None:
        if job.prefix is not None:
            await job.prefix.stop()
        if running := [task for task in (job.loading, job.handing) if task is not None]:
            await asyncio.wait(running)
        if job.prefix is not None:
            await job.prefix.stop()  # it may have come while the load was awaited
        elsewhere = ("", 0) if self._group is None else await self._group.end(job.id)
        problem = await job.sink.drain() if job.sink is not None else None
        problem = problem or elsewhere[0] or None
        self._totals.bytes_stored += elsewhere[1]
        self._jobs.pop(job.id, None)
        self._ended.add(*job.id)
        if job.sink is not None:
            self._totals.bytes_stored += job.sink.bytes_stored
        failure = job.failure or (None if job.dropped else problem)
        if failure is not None:
            self._life.link.post(job.work.place.decode, Abandon(*job.id))
            self._fail(job, failure)
        elif job.finish is not None and not job.dropped:
            output = len(job.tokens) - job.work.prompt_tokens
            self._life.tell(Finished(*job.id, self._life.link.me.id, output, job.finish))
        self._feed(core.KvStored(*job.id))

    def _fail(self, job: _Job, reason: str) -> None:
        self._totals.failures += 1
        self._ended.add(*job.id)
        log.warning("request %s: %s attempt %d gave up: %s", job.work.label, *job.id, reason)
        self._life.tell(PrefillFailed(*job.id, self._life.link.me.id, reason, job.late))
