"""The coupled worker: drives `core.coupled.CoupledInstance` with a real engine and node.

It is prefill and decode instance of a request in one: nothing is handed over, and no room is reserved for it. Its
node is its prefix cache: a prompt's whole blocks go there after its last chunk, those of the answer at the end.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from msgspec import Struct

from moonpool.core import coupled as core
from moonpool.core.actions import Cancel
from moonpool.core.blocks import extend_keys, hit_limit
from moonpool.core.decode import Drain, Dropped, Ending, KvStored, Refuse, Stepped, StepRow, Stopped
from moonpool.core.events import (
    DecodeJoined,
    DecodeRefused,
    DecodeStepped,
    Finished,
    Preempted,
    PrefillDone,
    PrefillFailed,
    Reported,
)
from moonpool.core.prefill import Chunk, Load, Loaded
from moonpool.core.vocabulary import PartId, PartKind, Peer, RequestId
from moonpool.engine.engine import Draw, Engine, Row
from moonpool.errors import MoonpoolError
from moonpool.live.coupled_job import Job, Totals
from moonpool.live.sink import copy_in, keep
from moonpool.live.worker import Endings, WorkerLife, describe, in_thread
from moonpool.store.pending import awaited
from moonpool.wire.link import Link
from moonpool.wire.membership import Books
from moonpool.wire.messages import Envelope, PrefillOrder, Stop, TokenOut, Tokens, Work

log = logging.getLogger(__name__)

REPORT_STEPS_SECONDS = 0.5


class CoupledConfig(Struct, frozen=True):
    served_model: str
    node: PartId | None = None
    """None: the only node on this host."""
    mode: core.CoupledMode = "chunked"
    step_tokens: int = 512
    """Most tokens of a chunked step; whole prompts share a step up to it."""
    max_batch: int = 16
    queue_bound: int = 256


async def run_coupled(link: Link, conductor: str, config: CoupledConfig, engine: Engine) -> None:
    """Join the cluster and serve until cancelled or until the node is gone."""
    await CoupledWorker(link, conductor, config, engine).run()


class _StepAbortedError(Exception):
    """Nobody wants the running step any more."""


class CoupledWorker:
    def __init__(self, link: Link, conductor: str, config: CoupledConfig, engine: Engine) -> None:
        self._engine = engine
        self._block = engine.space.block_tokens
        self._instance = core.CoupledInstance(
            pages=engine.page_count,
            block_tokens=self._block,
            slots=config.max_batch,
            step_tokens=config.step_tokens,
            mode=config.mode,
            queue_bound=config.queue_bound,
        )
        beside = config.step_tokens if config.mode == "chunked" else 0
        me = describe(link, PartKind.COUPLED, engine, config.max_batch, config.served_model, beside)
        self._life = WorkerLife(link, conductor, config.node, me, self._report, self._counters)
        self._jobs: dict[RequestId, Job] = {}
        self._books = Books(self._instance.check_integrity)
        self._ended = Endings()
        self._totals = Totals()
        self._told_steps = 0.0
        self._engine_thread = ThreadPoolExecutor(1, "engine")

    async def run(self) -> None:
        await self._life.run(self._hear, self._gateways, self._drop_gateway, self._quiesce)

    def _gateways(self) -> set[Peer]:
        return {job.work.gateway for job in self._jobs.values()}

    def _drop_gateway(self, gateway: Peer) -> None:
        for job in [j for j in self._jobs.values() if j.work.gateway == gateway]:
            self._drop(job)

    def _quiesce(self) -> None:
        for job in self._jobs.values():
            job.dropped = True
        self._engine_thread.shutdown(cancel_futures=True)

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
            "prompts": t.prompts,
            "computed_tokens": t.computed_tokens,
            "cached_tokens": t.cached_tokens,
            "finished": t.finished,
            "failed_prompts": t.failures,
            "preempted": self._instance.preemptions,
            "generated_tokens": t.tokens,
            "steps": t.steps,
            "mixed_steps": t.mixed_steps,
            "step_seconds": t.step_seconds,
            "blocks_stored": t.blocks_stored,
            "pages_used": self._instance.pool.used,
            "jobs": len(self._jobs),
            "integrity_failures": self._books.failures if self._jobs else self._books.audit(),
        }

    # ---- what it hears

    def _hear(self, envelope: Envelope) -> None:
        match envelope.body:
            case PrefillOrder(work):
                self._order(work)
            case Cancel(request, attempt):
                self._drop_up_to(request, attempt)
            case Stop(request, attempt):
                self._stop(request, attempt)
            case other:
                log.warning("%s from %s is not for a coupled worker", type(other).__name__, envelope.sender.id)

    def _order(self, work: Work) -> None:
        known = self._jobs.get(work.request)
        if self._ended.has(work.request, work.attempt) or (known and known.work.attempt >= work.attempt):
            return
        self._drop_up_to(work.request, work.attempt - 1)
        job = Job(work, time.monotonic(), list(work.tokens))
        if work.request in self._jobs:
            self._fail(job, "an older attempt still holds pages here")
            return
        self._jobs[work.request] = job
        log.debug("request %s: %s attempt %d, %d tokens", work.label, *job.id, len(job.tokens))
        self._feed(core.Ordered(*job.id, len(job.tokens), work.prompt_tokens + work.sampling.max_tokens))

    def _drop_up_to(self, request: RequestId, attempt: int) -> None:
        self._ended.add(request, attempt)
        job = self._jobs.get(request)
        if job is not None and job.work.attempt <= attempt:
            self._drop(job)

    def _drop(self, job: Job) -> None:
        job.dropped = True
        self._ended.add(*job.id)
        self._feed(Dropped(*job.id))

    def _stop(self, request: RequestId, attempt: int) -> None:
        """It has had a token of this request, so the request is here, or over."""
        job = self._jobs.get(request)
        if job is not None and job.work.attempt == attempt and job.finish is None:
            job.finish = "stop"
            self._feed(Stopped(*job.id))

    def _feed(self, event: core.CoupledEvent) -> None:
        for action in self._instance.handle(event, time.monotonic()):
            match action:
                case Load(request, _, pages):
                    job = self._jobs[request]
                    job.pages = pages
                    job.tasks += (self._life.spawn(self._load(job)),)
                case core.Step():
                    self._life.spawn(self._step(action))
                case Drain(request, _, tokens, pages, ending):
                    job = self._jobs[request]
                    if pages:
                        self._life.spawn(self._drain(job, tokens, pages, ending))
                    else:
                        self._leave(job, ending)
                case Refuse(request, _, reason):
                    self._fail(self._jobs.pop(request), reason)

    # ---- one request's way

    async def _load(self, job: Job) -> None:
        """Fetch, lease and copy what the pool has of the prefix; the rest will be computed."""
        began, blocks = time.monotonic(), 0
        place = job.work.place
        keys = job.work.keys[: hit_limit(len(job.tokens), self._block)]
        try:
            if (fetch := place.fetch) is not None:
                wanted = keys[: fetch.first + fetch.count]
                await awaited(self._life.node.fetch(fetch.source, place.space, wanted, job.time_left()))
            if keys and not job.dropped:
                lease = await awaited(self._life.node.lease(place.space, keys))
                with lease:
                    blocks = lease.count
                    await in_thread(copy_in, self._engine, lease.views[:blocks], job.pages)
        except MoonpoolError as e:
            job.failure = str(e)
            self._drop(job)
            blocks = 0
        job.cached_tokens = blocks * self._block
        job.load_seconds = time.monotonic() - began
        self._feed(Loaded(*job.id, blocks))

    async def _step(self, step: core.Step) -> None:
        prefilled = [self._jobs[chunk.request] for chunk in step.chunks]
        decoded = [self._jobs[row.request] for row in step.rows]
        began = time.monotonic()
        for job in prefilled:
            job.started = job.started or began
        try:
            draws = await asyncio.get_running_loop().run_in_executor(
                self._engine_thread, self._compute, step, prefilled, decoded
            )
        except _StepAbortedError:
            draws = [None] * (len(prefilled) + len(decoded))
        except Exception as e:
            log.exception("a step failed")
            for job in (*prefilled, *decoded):
                job.failure = f"the engine failed: {e}"
            self._feed(Stepped((), failed=True))
            return
        seconds = time.monotonic() - began
        totals = self._totals
        totals.steps += 1
        totals.mixed_steps += bool(prefilled and decoded)
        totals.step_seconds += seconds
        tokens = sum(chunk.count for chunk in step.chunks)
        for job, chunk in zip(prefilled, step.chunks, strict=True):
            job.compute_seconds += seconds * chunk.count / tokens
            totals.computed_tokens += chunk.count
        self._emit((*prefilled, *decoded), draws)
        if not prefilled:
            self._tell_step(step.rows, seconds)
        ended = [job.work.request for job in (*prefilled, *decoded) if job.finish is not None]
        self._feed(Stepped(tuple(ended)))

    def _compute(self, step: core.Step, prefilled: list[Job], decoded: list[Job]) -> list[Draw | None]:
        """On the engine's thread."""
        rows = [self._chunk_row(chunk, job) for chunk, job in zip(step.chunks, prefilled, strict=True)]
        rows += [self._token_row(row, job) for row, job in zip(step.rows, decoded, strict=True)]
        jobs = (*prefilled, *decoded)

        def on_layer(layer: int) -> None:
            del layer
            if all(job.dropped for job in jobs):
                raise _StepAbortedError

        # A step that only decodes is short, and keeps its contexts at hand where nobody looks between its layers.
        return self._engine.step(rows, on_layer if prefilled else None)

    def _chunk_row(self, chunk: Chunk, job: Job) -> Row:
        end = chunk.start + chunk.count
        for page in job.pages[-(-chunk.start // self._block) : -(-end // self._block)]:
            self._engine.clear(page)
        return Row(
            tokens=job.tokens,
            prompt_tokens=job.work.prompt_tokens,
            start=chunk.start,
            count=chunk.count,
            pages=job.pages,
            sampling=job.work.sampling if chunk.last else None,
        )

    def _token_row(self, row: StepRow, job: Job) -> Row:
        if row.tokens % self._block == 1 or self._block == 1:
            self._engine.clear(row.pages[-1])
        return Row(
            tokens=job.tokens,
            prompt_tokens=job.work.prompt_tokens,
            start=row.tokens - 1,
            count=1,
            pages=row.pages,
            sampling=job.work.sampling,
        )

    def _emit(self, jobs: Sequence[Job], draws: Sequence[Draw | None]) -> None:
        """All tokens of the step but final ones, one message a gateway. Requests without a token are dropped."""
        out: dict[Peer, list[TokenOut]] = defaultdict(list)
        for job, draw in zip(jobs, draws, strict=True):
            if draw is None:
                continue
            if draw.error is not None:
                if not job.dropped and job.finish is None:
                    job.failure = draw.error
                    self._drop(job)
                continue
            position, is_first = job.position, not job.joined
            job.tokens.append(draw.token)
            self._totals.tokens += 1
            if job.dropped or job.finish is not None:
                continue
            if draw.is_end:
                job.finish = "stop"
            elif position + 1 >= job.work.sampling.max_tokens:
                job.finish = "length"
            cached = job.cached_tokens if is_first else None
            token = TokenOut(*job.id, position, draw.token, draw.logprob, tuple(draw.top), job.finish, cached)
            if job.finish is None:
                out[job.work.gateway].append(token)
            else:
                job.last = token
            if is_first:
                self._join(job)
        for gateway, tokens in out.items():
            self._life.link.post(gateway, Tokens(tuple(tokens)))

    def _join(self, job: Job) -> None:
        """It has its first token: for the Conductor prefill is done, and it decodes."""
        job.joined = True
        me, computed = self._life.link.me.id, len(job.tokens) - 1 - job.cached_tokens
        self._totals.prompts += 1
        self._totals.cached_tokens += job.cached_tokens
        queued = max(job.started - job.arrived - job.load_seconds, 0.0)
        self._life.tell(PrefillDone(*job.id, me, computed, job.cached_tokens, queued, job.compute_seconds))
        if job.finish is None:
            self._life.tell(DecodeJoined(*job.id, me))
            job.tasks += (self._life.spawn(self._keep(job, len(job.tokens) - 1, job.pages)),)
        log.info(
            "request %s: %s attempt %d prefilled %d tokens (%d cached) in %.3f s",
            job.work.label,
            *job.id,
            computed,
            job.cached_tokens,
            job.compute_seconds,
        )

    def _tell_step(self, rows: Sequence[StepRow], seconds: float) -> None:
        now = time.monotonic()
        if now - self._told_steps >= REPORT_STEPS_SECONDS:
            self._told_steps = now
            context = sum(row.tokens for row in rows)
            self._life.tell(DecodeStepped(self._life.link.me.id, len(rows), context, seconds))

    async def _keep(self, job: Job, tokens: int, pages: tuple[int, ...]) -> None:
        """The whole blocks of its first `tokens` tokens, which all have KV, go to the node as far as there is room."""
        whole = tokens // self._block
        if not whole:
            return
        keys = extend_keys(job.work.keys, job.tokens[: whole * self._block], self._engine.space, job.work.salt)
        try:
            self._totals.blocks_stored += await keep(self._engine, self._life.node, keys, job.tokens, pages)
        except MoonpoolError as e:
            log.warning("request %s: its blocks were not kept: %s", job.work.label, e)

    async def _drain(self, job: Job, tokens: int, pages: tuple[int, ...], ending: Ending) -> None:
        if job.tasks:
            await asyncio.wait(job.tasks)
        if ending is not Ending.DROPPED:
            await self._keep(job, tokens - 1, pages)
        self._leave(job, ending)
        self._feed(KvStored(*job.id))

    def _leave(self, job: Job, ending: Ending) -> None:
        """Out of the tables; whoever must know is told."""
        me = self._life.link.me.id
        self._ended.add(*job.id)
        del self._jobs[job.work.request]
        if ending is Ending.FINISHED:
            if job.last is not None and not job.dropped:
                self._life.link.post(job.work.gateway, Tokens((job.last,)))
            self._totals.finished += 1
            self._life.tell(Finished(*job.id, me, job.position, job.finish or "stop"))
            log.info("request %s: %s attempt %d finished, %d tokens", job.work.label, *job.id, job.position)
        elif ending is Ending.PREEMPTED:
            self._life.tell(Preempted(*job.id, me))
            log.info("request %s: %s attempt %d preempted at %d tokens", job.work.label, *job.id, len(job.tokens))
        elif job.failure is not None:
            self._fail(job, job.failure)

    def _fail(self, job: Job, reason: str) -> None:
        """Before its first token the request failed in prefill, after it in decode."""
        self._totals.failures += 1
        self._ended.add(*job.id)
        log.warning("request %s: %s attempt %d gave up: %s", job.work.label, *job.id, reason)
        failed = DecodeRefused if job.joined else PrefillFailed
        self._life.tell(failed(*job.id, self._life.link.me.id, reason))
