"""One server's adapter: our orders in, completions out; its tokens go to the gateways as our workers' do.

It lives as long as the server is well. Whatever it works on when the server fails is placed again elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import aclosing

from msgspec import structs

from moonpool.core.actions import Cancel
from moonpool.core.blocks import extend_keys, hit_limit
from moonpool.core.events import (
    DecodeJoined,
    DecodeRefused,
    DecodeStepped,
    Finished,
    PrefillDone,
    PrefillFailed,
    Registered,
    Reported,
)
from moonpool.core.vocabulary import BlockKey, Capacity, KeySpace, Peer, RequestId
from moonpool.live.external.breaker import Breaker
from moonpool.live.external.cache import CachePart
from moonpool.live.external.config import Instance
from moonpool.live.external.dialect import Drawn, FaultError, Load, Piece, RefusedError, body_of
from moonpool.live.external.job import Job, Totals
from moonpool.live.external.pace import Prompted, PromptPace, StepPace
from moonpool.live.external.server import Facts, Server
from moonpool.live.worker import Endings, WorkerLife
from moonpool.wire.link import Link
from moonpool.wire.messages import Abandon, Envelope, HandOver, PrefillOrder, Stop, TokenOut, Tokens, Work

log = logging.getLogger(__name__)

WATCH_SECONDS = 0.5
END_SECONDS = 5.0
"""What comes after the last token, above all how much was cached, is waited for so long."""
TOGETHER_SECONDS = 0.005
"""First tokens that come within so long were computed together."""


class DownError(FaultError):
    """The server has failed too often: this life of the instance is over."""


class Adapter:
    def __init__(
        self,
        link: Link,
        conductor: str,
        instance: Instance,
        model: str,
        facts: Facts,
        space: KeySpace,
        server: Server,
        caches: Sequence[CachePart],
    ) -> None:
        """`caches`: where blocks are once it has computed them: its own cache first, then the pool, if it uses that."""
        self._instance = instance
        self._model = model
        self._space = space
        self._server = server
        self._caches = caches
        self._facts = facts
        me = Registered(
            instance.kind,
            link.me,
            Capacity(pages=facts.blocks, slots=instance.max_sequences, context_tokens=facts.context_tokens),
            space=space,
            first_layer=0,
            last_layer=1,
            node=caches[0].id,
            model=model,
        )
        self._life = WorkerLife(link, conductor, None, me, self._report, self._counters)
        self._jobs: dict[tuple[RequestId, int], Job] = {}
        self._ended = Endings()
        self._stopped = Endings()
        """Before they were handed over."""
        self._totals = Totals()
        self._load = Load()
        self._strangers = 0
        """Requests there that did not come from here."""
        self._requests, self._polls = Breaker(), Breaker()
        self._prompt_pace, self._step_pace = PromptPace(), StepPace()
        self._prompted: list[tuple[Job, Prompted]] = []
        """First tokens of this moment."""
        self._heard_at = time.monotonic()
        """When a token came, or there was nothing to wait for."""

    async def run(self) -> None:
        """Join the cluster and serve until cancelled. Raises DownError when the server has failed too often."""
        self._life.spawn(self._watch())
        await self._life.run(self._hear, self._gateways, self._drop_gateway, lambda: None)

    @property
    def _gives_transfer(self) -> bool:
        return self._instance.role == "prefill" and self._instance.kv_transfer_params

    # ---- what the cluster hears of it

    def _report(self) -> Reported:
        me, load = self._life.link.me, self._load
        waiting = sum(not job.is_answered for job in self._jobs.values())
        return Reported(
            id=me.id,
            incarnation=me.incarnation,
            queued=min(waiting, load.waiting),
            running=len(self._jobs) - min(waiting, load.waiting) + self._strangers,
            pages_free=int(self._facts.blocks * (1.0 - load.usage)),
            context_tokens=sum(len(job.tokens) for job in self._jobs.values() if job.has_first),
        )

    def _counters(self) -> dict[str, float]:
        t = self._totals
        return {
            "prompts": t.prompts,
            "computed_tokens": t.computed_tokens,
            "cached_tokens": t.cached_tokens,
            "finished": t.finished,
            "failed_prompts": t.failed_prompts,
            "generated_tokens": t.generated_tokens,
            "refused_by_server": t.refused,
            "server_faults": t.faults,
            "server_running": self._load.running,
            "server_waiting": self._load.waiting,
            "requests_of_others": self._strangers,
            "jobs": len(self._jobs),
        }

    def _gateways(self) -> set[Peer]:
        return {job.work.gateway for job in self._jobs.values()}

    def _drop_gateway(self, gateway: Peer) -> None:
        for job in [j for j in self._jobs.values() if j.work.gateway == gateway]:
            self._drop(job)

    # ---- what it hears

    def _hear(self, envelope: Envelope) -> None:
        match envelope.body:
            case PrefillOrder(work) if self._instance.kind.prefills:
                self._begin(work)
            case HandOver(work, _, cached, transfer) if self._instance.kind.decodes:
                self._begin(work, cached, transfer)
            case Cancel(request, attempt) | Abandon(request, attempt):
                self._drop_up_to(request, attempt)
            case Stop(request, attempt):
                self._stop(request, attempt)
            case other:
                log.warning(
                    "%s from %s is not for %s, whose role is %s",
                    *(type(other).__name__, envelope.sender.id, self._instance.id, self._instance.role),
                )

    def _begin(self, work: Work, prompt_cached: int | None = None, transfer: bytes = b"") -> None:
        """`prompt_cached`: tokens, of what was prefilled elsewhere; `transfer`: as its server said."""
        if self._ended.has(work.request, work.attempt) or (work.request, work.attempt) in self._jobs:
            return
        self._drop_up_to(work.request, work.attempt - 1)
        now = time.monotonic()
        limit = hit_limit(len(work.tokens), self._space.block_tokens)
        blocks = max(cache.match(work.keys[:limit]) for cache in self._caches)
        if self._instance.pool == "exact":
            blocks = max(blocks, min(work.place.hit_blocks, limit))
        cached = blocks * self._space.block_tokens
        handed = prompt_cached is not None
        job = Job(work, now, list(work.tokens), cached, prompt_cached, transfer, handed, heard_at=now)
        if not self._jobs:
            self._heard_at = now
        self._jobs[job.id] = job
        if job.has_first and self._stopped.has(*job.id):
            job.finish = "stop"
            self._leave(job)
            return
        self._step_pace.restart(now)
        log.debug("request %s: %s attempt %d, %d tokens", work.label, *job.id, len(job.tokens))
        job.task = self._life.spawn(self._serve(job))

    def _drop_up_to(self, request: RequestId, attempt: int) -> None:
        self._ended.add(request, attempt)
        for job in [j for j in self._jobs.values() if j.work.request == request and j.work.attempt <= attempt]:
            self._drop(job)

    def _drop(self, job: Job) -> None:
        job.dropped = True
        self._end(job)

    def _stop(self, request: RequestId, attempt: int) -> None:
        job = self._jobs.get((request, attempt))
        if job is None:
            self._stopped.add(request, attempt)
        elif job.finish is None:
            job.finish = "stop"
            self._end(job)

    def _end(self, job: Job) -> None:
        """The server drops a request whose connection is closed."""
        if job.task is not None:
            job.task.cancel()

    # ---- one request's way

    async def _serve(self, job: Job) -> None:
        is_prefill = self._instance.role == "prefill"
        body = body_of(
            job.work,
            self._model,
            priorities=self._instance.priorities,
            only_first=is_prefill,
            gives_transfer=self._gives_transfer,
            transfer=job.transfer,
        )
        try:
            async with (
                asyncio.timeout(left := max(job.time_left(), 0.0)) as limit,
                aclosing(self._server.complete(body)) as pieces,
            ):
                async for piece in pieces:
                    self._take(job, piece)
                    if job.finish is not None:
                        limit.reschedule(asyncio.get_running_loop().time() + min(END_SECONDS, left))
            if job.finish is None and not (is_prefill and job.is_answered):
                raise FaultError("it ended the stream without saying why")
            self._requests.success()
        except RefusedError as e:
            self._totals.refused += 1
            job.unservable = not e.is_busy
            job.failure = f"{self._instance.url} refused it: {e}"
        except FaultError as e:
            self._fault(job, str(e))
        except TimeoutError:
            job.failure = "its deadline has passed"
        except asyncio.CancelledError:
            job.dropped |= job.finish is None and job.failure is None
            raise
        finally:
            self._leave(job)

    def _take(self, job: Job, piece: Piece) -> None:
        if piece.cached_tokens is not None:
            job.cached_tokens = min(piece.cached_tokens, len(job.work.tokens) - 1)
        if not piece.drawn:
            if piece.finish is not None:
                raise FaultError(f"it ended the request ({piece.finish}) without a token")
            return
        if job.finish is not None or (job.is_answered and self._instance.role == "prefill"):
            raise FaultError("it goes on after the end of what it was asked for")
        if self._gives_transfer and not piece.transfer:
            raise FaultError("it gives no kv_transfer_params: has it a connector that hands over?")
        job.transfer = piece.transfer or job.transfer
        job.heard_at = self._heard_at = now = time.monotonic()
        is_first, out = not job.is_answered, []
        for at, drawn in enumerate(piece.drawn, 1):
            token = self._token(job, drawn, piece.finish if at == len(piece.drawn) else None)
            if self._instance.role == "prefill" and token.finish is None:
                break  # the decode server draws it, right before the next one
            job.tokens.append(drawn.token)
            if token.finish is not None:
                job.finish, job.last = token.finish, token
                break  # what it may have drawn beyond is nobody's
            out.append(token)
        self._totals.generated_tokens += len(piece.drawn)
        if out:
            self._life.link.post(job.work.gateway, Tokens(tuple(out)))
        if is_first:
            self._answered(job, now)
        else:
            self._tell_step(len(piece.drawn), now)

    def _token(self, job: Job, drawn: Drawn, finish: str | None) -> TokenOut:
        cached = None if job.is_answered or job.has_first else job.cached_tokens
        is_final = job.position + 1 >= job.work.sampling.max_tokens
        if finish is None and is_final:
            finish = "length"
        elif finish == "length" and not is_final and self._instance.role == "prefill":
            finish = None  # it was asked for one token only
        return TokenOut(*job.id, job.position, drawn.token, drawn.logprob, drawn.top, finish, cached)

    def _answered(self, job: Job, now: float) -> None:
        """Its prompt is computed: where it was not handed over, that was its prefill."""
        job.is_answered = True
        self._totals.prompts += 1
        self._use(job.work.keys)
        if not job.has_first:
            job.has_first = True
            if not self._prompted:
                asyncio.get_running_loop().call_later(TOGETHER_SECONDS, self._tell_prompted)
            self._prompted.append((job, Prompted(job.sent, job.computed_tokens, now)))
        if job.finish is None and self._instance.kind.decodes:
            self._life.tell(DecodeJoined(*job.id, self._life.link.me.id))
        self._step_pace.restart(now)

    def _tell_prompted(self) -> None:
        together, self._prompted = self._prompted, []
        if not together:
            return
        me = self._life.link.me.id
        for (job, _), taken in zip(together, self._prompt_pace.take([p for _, p in together]), strict=True):
            cached, computed = job.cached_tokens, job.computed_tokens
            self._life.tell(PrefillDone(*job.id, me, computed, cached, taken.queue_seconds, taken.compute_seconds))

    def _tell_step(self, tokens: int, now: float) -> None:
        decoding = [job for job in self._jobs.values() if job.is_answered]
        is_prefilling = len(decoding) < len(self._jobs)
        seconds = self._step_pace.note(tokens, len(decoding), is_prefilling, now)
        if seconds is not None:
            context = sum(len(job.tokens) for job in decoding)
            self._life.tell(DecodeStepped(self._life.link.me.id, len(decoding), context, seconds))

    def _leave(self, job: Job) -> None:
        """Out of the tables; whoever must know is told."""
        self._ended.add(*job.id)
        del self._jobs[job.id]
        self._step_pace.restart(time.monotonic())
        if job.is_answered:
            self._keep(job)
        if any(other is job for other, _ in self._prompted):
            self._tell_prompted()
        if job.dropped:
            return
        if job.finish is not None:
            self._finished(job)
        elif job.failure is not None:
            self._failed(job, job.failure)
        elif job.is_answered and not self._instance.kind.decodes:
            self._hand_over(job)

    def _keep(self, job: Job) -> None:
        """The server has KV of all tokens but the last."""
        self._totals.cached_tokens += job.cached_tokens
        self._totals.computed_tokens += job.computed_tokens
        self._use(extend_keys(job.work.keys, job.tokens[:-1], self._space, job.work.salt))

    def _use(self, keys: Sequence[BlockKey]) -> None:
        for cache in self._caches:
            cache.use(keys)

    def _finished(self, job: Job) -> None:
        me = self._life.link.me.id
        if (last := job.last) is not None:
            cached = job.cached_tokens if job.prompt_cached is None else job.prompt_cached
            self._life.link.post(job.work.gateway, Tokens((structs.replace(last, cached_tokens=cached),)))
        self._totals.finished += 1
        self._life.tell(Finished(*job.id, me, job.position, job.finish or "stop"))
        log.info("request %s: %s attempt %d finished, %d tokens", job.work.label, *job.id, job.position)

    def _hand_over(self, job: Job) -> None:
        """The KV is in the pool, where the decode instance's server finds it, or where the server said."""
        work = structs.replace(job.work, tokens=tuple(job.tokens), time_left=max(job.time_left(), 0.0))
        self._life.link.post(work.place.decode, HandOver(work, self._life.link.me, job.cached_tokens, job.transfer))

    def _failed(self, job: Job, reason: str) -> None:
        """Before its first token the request failed in prefill, after it in decode."""
        self._totals.failed_prompts += 1
        log.warning("request %s: %s attempt %d gave up: %s", job.work.label, *job.id, reason)
        me = self._life.link.me.id
        if job.has_first and self._instance.kind.decodes:
            self._life.tell(DecodeRefused(*job.id, me, reason))
        else:
            self._life.tell(PrefillFailed(*job.id, me, reason, unservable=job.unservable))

    # ---- is the server well?

    def _fault(self, job: Job, what: str) -> None:
        if job.finish is not None or (job.is_answered and self._instance.role == "prefill"):
            return  # all that is wanted of it is there
        self._totals.faults += 1
        self._requests.fault()
        job.failure = f"{self._instance.url}: {what}"

    async def _watch(self) -> None:
        """Raises DownError."""
        while True:
            try:
                await self._server.check_health()
                load = await self._server.load()
            except FaultError as e:
                self._totals.faults += 1
                self._polls.fault()
                log.warning("%s: %s", self._instance.id, e)
                trouble = str(e)
            else:
                self._polls.success()
                self._load = load
                self._strangers = max(load.running + load.waiting - len(self._jobs), 0)
                trouble = "its requests fail"
            self._check_stalls()
            if self._polls.is_open or self._requests.is_open:
                raise DownError(f"{self._instance.url} is taken as down: {trouble}")
            await asyncio.sleep(WATCH_SECONDS)

    def _check_stalls(self) -> None:
        """Raises DownError where nothing at all comes; a stream that stands still alone is given up."""
        now, limit = time.monotonic(), self._instance.stall_seconds
        if not self._jobs:
            self._heard_at = now
        if now - self._heard_at > limit:
            raise DownError(f"{self._instance.url} is taken as down: no token came for {limit:g} s")
        for job in [j for j in self._jobs.values() if j.is_answered and now - j.heard_at > limit]:
            self._fault(job, f"no token came for {limit:g} s")
            self._end(job)
