"""The gateway's end of the protocol (docs/protocol.md): every request gets one ending and leaves nothing behind.

Longer than other files, because all that changes a request's state stands in this one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine

from moonpool.core.actions import (
    Cancel,
    ExpectEnd,
    Hold,
    Place,
    RegisterAgain,
    Reject,
    ReleaseRoom,
    Resubmit,
)
from moonpool.core.events import PlacedBefore, PrefillFailed, Registered, Reported, RequestCancelled
from moonpool.core.vocabulary import PartKind, Peer, RejectReason, RequestId
from moonpool.errors import PeerUnavailableError
from moonpool.gateway.fleet import FleetView
from moonpool.gateway.generation import Cancelled, Completed, Ending, Generation, Job, Refused
from moonpool.gateway.meters import Meters
from moonpool.gateway.outcomes import Outcomes
from moonpool.wire.link import Link
from moonpool.wire.membership import Absences, Books, Membership
from moonpool.wire.messages import (
    Describe,
    Description,
    Envelope,
    Message,
    PrefillOrder,
    Stop,
    TokenOut,
    Tokens,
)

log = logging.getLogger(__name__)

DESCRIBE_SECONDS = 2.0
GAP_SECONDS = 5.0
"""For a token that must have been sent already; then its attempt is over."""
WATCH_SECONDS = 1.0


class Cluster:
    """Submits requests, follows their attempts, and gathers their tokens. Everything runs on one event loop."""

    def __init__(self, link: Link, conductor: str, model: str, meters: Meters) -> None:
        self._link = link
        self._model = model
        self._meters = meters
        self.books = Books(self.check_integrity)
        """Checked while nothing is in flight."""
        self._membership = Membership(link, conductor, self._describe, self._report, self._counters)
        self.fleet = FleetView(self._membership)
        self._live: dict[RequestId, Generation] = {}
        self._requests = 0
        self._descriptions: dict[int, asyncio.Future[bytes]] = {}
        self._serial = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._submitted_to = ""
        """Incarnation of the Conductor that knows the waiting requests."""
        self.totals = {
            "requests": 0,
            "tokens": 0,
            "tokens_dropped": 0,
            "resubmissions": 0,
            "rejected": 0,
            "cancelled": 0,
            "prompt_tokens": 0,
            "cached_tokens": 0,
        }
        self.outcomes = Outcomes()

    async def run(self) -> None:
        """Join, then listen until cancelled. Raises ConfigError where no Conductor answers."""
        ears, eyes = asyncio.create_task(self._listen()), asyncio.create_task(self._watch())
        heart: asyncio.Task[None] | None = None
        try:
            await self._membership.join()
            heart = asyncio.create_task(self._membership.run())
            done, _ = await asyncio.wait((ears, eyes, heart), return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            self.cancel_all("the gateway is stopping")
            for other in (ears, eyes, heart, *self._tasks):
                if other is not None:
                    other.cancel()

    # ---- what the HTTP side sees

    @property
    def running(self) -> int:
        return sum(g.place is not None for g in self._live.values())

    @property
    def waiting(self) -> int:
        return sum(g.place is None for g in self._live.values())

    def waits(self) -> tuple[float, float]:
        """Seconds that the one which waits longest has waited for its first token, and another for its next."""
        now = asyncio.get_running_loop().time()
        first = [now - g.job.arrived for g in self._live.values() if not g.output]
        following = [now - g.last_token_at for g in self._live.values() if g.output]
        return max(first, default=0.0), max(following, default=0.0)

    def submit(self, job: Job, changed: Callable[[], None]) -> Generation:
        self._requests += 1
        request = RequestId(f"{self._link.me.incarnation}-{self._requests}")
        generation = Generation(request, job, changed, chains=job.chains)
        self._live[request] = generation
        self.totals["requests"] += 1
        loop = asyncio.get_running_loop()
        generation.timer = loop.call_at(job.deadline, self._expire, generation)
        self._spawn(self._arrive(generation, generation.attempt))
        return generation

    def cancel(self, generation: Generation, reason: str) -> None:
        """Free it everywhere; nothing happens if it has ended."""
        if generation.ending is None:
            self._withdraw(generation, reason, Cancelled(reason))
            self.totals["cancelled"] += 1
            self._meters.cancelled(reason)

    def cancel_all(self, reason: str) -> None:
        for generation in list(self._live.values()):
            self.cancel(generation, reason)

    def stop(self, generation: Generation) -> None:
        """A stop string was found in its text."""
        if generation.ending is not None:
            return
        if generation.place is None:  # the attempt that gave these tokens is over, the next one is not wanted
            self._withdraw(generation, "a stop string was found", Completed("stop"))
            return
        self._link.post(generation.place.decode, Stop(generation.request, generation.attempt))
        self._end(generation, Completed("stop"))

    async def describe(self, request: str = "", blocks_after: str | None = None, live: bool = False) -> bytes:
        """The Conductor's state, a JSON document; or what it knows of one request, by its id or its x-request-id; or a
        page of the blocks in the pool. `live`: the state with what the dashboard shows beside it.

        Raises PeerUnavailableError within DESCRIBE_SECONDS.
        """
        self._serial += 1
        serial = self._serial
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._descriptions[serial] = answer
        try:
            async with asyncio.timeout(DESCRIBE_SECONDS):
                await self._link.send(
                    self._membership.conductor, Describe(self._link.me, serial, request, blocks_after, live)
                )
                return await answer
        except TimeoutError:
            raise PeerUnavailableError(f"the Conductor gave no answer within {DESCRIBE_SECONDS:g} s") from None
        finally:
            del self._descriptions[serial]

    def check_integrity(self) -> None:
        now = asyncio.get_running_loop().time()
        for request, g in self._live.items():
            assert g.request == request, "a request is filed under another id"
            assert g.ending is None, f"{request} has ended and is still live"
            assert g.timer is not None, f"{request} has no deadline"
            assert g.timer.when() > now - 1.0, f"{request} has outlived its deadline"
            assert g.attempt >= 1, f"{request} has no attempt"
            assert g.place is None or g.place.attempt == g.attempt, f"{request} keeps the place of another attempt"
            assert len(g.output) < g.job.sampling.max_tokens, f"{request} has all its tokens and no ending"

    # ---- what other parts see

    def _describe(self) -> Registered:
        return Registered(kind=PartKind.GATEWAY, peer=self._link.me, model=self._model)

    def _report(self) -> Reported:
        me = self._link.me
        return Reported(id=me.id, incarnation=me.incarnation, queued=self.waiting, running=self.running)

    def _counters(self) -> dict[str, float]:
        broken = self.books.failures if self._live else self.books.audit()
        return {**self.totals, "in_flight": len(self._live), "integrity_failures": broken}

    # ---- what other parts say

    async def _listen(self) -> None:
        while True:
            envelope = await self._link.receive()
            is_forgotten = isinstance(envelope.body, RegisterAgain) and self._membership.is_answered
            if self._membership.heard(envelope):
                if is_forgotten and envelope.sender.incarnation == self._submitted_to:
                    self._forgotten()
                self._fleet_changed()
            else:
                self._hear(envelope)

    def _hear(self, envelope: Envelope) -> None:
        match envelope.body:
            case Tokens(tokens):
                self._accept(tokens)
            case Place():
                self._placed(envelope.body)
            case Reject(request, attempt, _, reason, message, retry_after):
                generation = self._current(request, attempt)
                if generation is not None:
                    self._cancel_workers(generation)
                    self._refuse(generation, Refused(reason, message, retry_after))
            case Resubmit(request, attempt, _, reason):
                self._resubmit(request, attempt, reason)
            case Hold(request, attempt, _, reason):
                if (generation := self._current(request, attempt)) is not None:
                    log.debug("request %s: %s is on hold: %s", generation.job.label, request, reason)
            case ExpectEnd(request, attempt):
                if (generation := self._current(request, attempt)) is not None:
                    self._end_soon(generation, "its worker is done, but its last token did not come")
            case Description(serial, state):
                answer = self._descriptions.get(serial)
                if answer is not None and not answer.done():
                    answer.set_result(state)
            case other:
                log.warning("%s from %s is not for a gateway", type(other).__name__, envelope.sender.id)

    def _fleet_changed(self) -> None:
        self.fleet.update()
        conductor = self._membership.conductor.incarnation
        if self._submitted_to and conductor != self._submitted_to:
            for generation in self._live.values():
                if generation.place is None:
                    self._arrive_anew(generation)
        self._submitted_to = conductor
        if self._membership.is_answered:
            self._tell_placed(conductor)

    def _forgotten(self) -> None:
        """The Conductor took this gateway for dead, and has cancelled its requests everywhere."""
        for generation in list(self._live.values()):
            if generation.place is None:
                self._arrive_anew(generation)
            else:
                self._give_up(generation, "the Conductor had lost this gateway")

    def _arrive_anew(self, generation: Generation) -> None:
        """At a new Conductor. What the old one has reserved for the attempt, or still says of it, counts no more."""
        for node in self.fleet.nodes:
            peer = Peer(node.id, node.incarnation, node.address)
            self._link.post(peer, ReleaseRoom(node, generation.request, generation.attempt))
        generation.begin_attempt(self.fleet.spaces)
        self._spawn(self._arrive(generation, generation.attempt))

    def _tell_placed(self, conductor: str) -> None:
        """A new Conductor learns what the old one has placed, as soon as it knows those who work on it."""
        there = self._membership.there()
        for generation in self._live.values():
            place = generation.place
            if place is not None and generation.known_to != conductor and there.issuperset(generation.needed()):
                generation.known_to = conductor
                arrived = generation.arrival(self._model, self._link.me, self._time_left(generation))
                self._tell(PlacedBefore(arrived, place, generation.drawn()))

    async def _watch(self) -> None:
        """Workers that died while there was no Conductor to notice it do not come back to its successor's fleet."""
        absences = Absences()
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            needed = {peer for generation in self._live.values() for peer in generation.needed()}
            gone = absences.over(needed - self._membership.there(), asyncio.get_running_loop().time())
            for generation in list(self._live.values()) if gone else ():
                missing = [peer.id for peer in generation.needed() if peer in gone]
                if missing:
                    self._give_up(generation, f"{missing[0]} is not in the cluster any more")

    def _accept(self, tokens: tuple[TokenOut, ...]) -> None:
        now = asyncio.get_running_loop().time()
        for token in tokens:
            generation = self._current(token.request, token.attempt)
            if generation is None or generation.place is None or token.position < len(generation.output):
                self.totals["tokens_dropped"] += 1
                self._meters.tokens_dropped.inc()
            elif token.position > len(generation.output):
                self._set_aside(generation, token)
            else:
                self._append(generation, token, now)
                while generation.ending is None and (ahead := generation.ahead.pop(len(generation.output), None)):
                    self._append(generation, ahead, now)

    def _set_aside(self, generation: Generation, token: TokenOut) -> None:
        """The first token of an attempt comes from the prefill worker and may be overtaken by those after it."""
        if not generation.ahead:
            asyncio.get_running_loop().call_later(GAP_SECONDS, self._check_gap, generation, generation.attempt)
        generation.ahead[token.position] = token

    def _append(self, generation: Generation, token: TokenOut, now: float) -> None:
        meters = self._meters
        if not generation.output:
            prompt = len(generation.job.prompt)
            generation.cached_tokens = min(token.cached_tokens or 0, prompt)
            generation.first_token_at = now
            self.outcomes.began(generation)
            self.totals["prompt_tokens"] += prompt
            self.totals["cached_tokens"] += generation.cached_tokens
            meters.ttft.observe(now - generation.job.arrived)
            meters.prompt_tokens.inc(prompt)
            meters.prefix_queries.inc(prompt)
            meters.prefix_hits.inc(generation.cached_tokens)
        else:
            gap = now - generation.last_token_at
            generation.gaps.append(gap)
            meters.tbt.observe(gap)
            if token.cached_tokens is not None and not generation.begin:
                # An external instance knows it for certain at the end only.
                cached = min(token.cached_tokens, len(generation.job.prompt))
                more = max(cached - generation.cached_tokens, 0)
                self.totals["cached_tokens"] += more
                meters.prefix_hits.inc(more)
                generation.cached_tokens = cached
        generation.last_token_at = now
        generation.output.append(token.token)
        generation.fresh.append(token)
        self.totals["tokens"] += 1
        meters.generation_tokens.inc()
        if token.finish is not None:
            self._end(generation, Completed(token.finish))
        elif len(generation.output) >= generation.job.sampling.max_tokens:
            self._withdraw(generation, "it has all its tokens", Completed("length"))
        else:
            generation.changed()

    def _placed(self, place: Place) -> None:
        generation = self._live.get(place.request)
        if generation is None:
            self._tell_cancelled(place.request, "it has ended")
        elif place.attempt == generation.attempt and generation.place is None:
            generation.place, generation.known_to = place, self._membership.conductor.incarnation
            generation.priority = place.priority
            self._spawn(self._order(generation, place))

    async def _order(self, generation: Generation, place: Place) -> None:
        if generation.ending is not None or generation.place is not place:
            return
        work = generation.work(place, self._link.me, self._time_left(generation))
        try:
            await self._link.send(place.prefill, PrefillOrder(work))
        except PeerUnavailableError as e:
            if generation.ending is None and generation.place is place:
                failure = PrefillFailed(generation.request, place.attempt, place.prefill.id, str(e))
                self._tell(failure)
                # There may be no Conductor to hear it.
                self._end_soon(generation, f"{place.prefill.id} took no order")

    def _resubmit(self, request: RequestId, attempt: int, reason: str) -> None:
        generation = self._live.get(request)
        if generation is None:
            self._tell_cancelled(request, "it has ended")
        elif attempt == generation.attempt:
            log.info("request %s: %s attempt %d is over: %s", generation.job.label, request, attempt, reason)
            self._next_attempt(generation)

    def _check_gap(self, generation: Generation, attempt: int) -> None:
        if generation.ending is None and generation.attempt == attempt and generation.ahead:
            missing, came = len(generation.output), min(generation.ahead)
            self._give_up(generation, f"token {missing} did not come, but {came} did")

    def _end_soon(self, generation: Generation, why: str) -> None:
        """An attempt that is still the current one in a while is over."""
        attempt = generation.attempt

        def check() -> None:
            if generation.ending is None and generation.attempt == attempt:
                self._give_up(generation, why)

        asyncio.get_running_loop().call_later(GAP_SECONDS, check)

    def _give_up(self, generation: Generation, why: str) -> None:
        log.warning(
            "request %s: %s attempt %d is over: %s", generation.job.label, generation.request, generation.attempt, why
        )
        self._cancel_workers(generation)
        self._next_attempt(generation)

    def _next_attempt(self, generation: Generation) -> None:
        generation.begin_attempt(self.fleet.spaces)
        self.totals["resubmissions"] += 1
        self._meters.resubmissions.inc()
        self._spawn(self._arrive(generation, generation.attempt))

    async def _arrive(self, generation: Generation, attempt: int) -> None:
        """Tell the Conductor, as often as it takes: while it is away, placement only pauses."""
        while generation.ending is None and generation.attempt == attempt and generation.place is None:
            arrived = generation.arrival(self._model, self._link.me, self._time_left(generation))
            try:
                await self._link.send(self._membership.conductor, arrived)
            except PeerUnavailableError as e:
                log.warning("request %s: %s waits for the Conductor: %s", arrived.label, arrived.request, e)
            else:
                return

    # ---- endings

    def _expire(self, generation: Generation) -> None:
        seconds = generation.job.deadline - generation.job.arrived
        message = f"the request's deadline of {seconds:g} s has passed after {len(generation.output)} output tokens"
        self._count_refusal(RejectReason.DEADLINE)
        self._withdraw(generation, "its deadline has passed", Refused(RejectReason.DEADLINE, message, None))

    def _refuse(self, generation: Generation, ending: Refused) -> None:
        self._count_refusal(ending.reason)
        self._end(generation, ending)

    def _count_refusal(self, reason: RejectReason) -> None:
        self.totals["rejected"] += 1
        self._meters.rejected(reason.value)

    def _withdraw(self, generation: Generation, reason: str, ending: Ending) -> None:
        self._tell_cancelled(generation.request, reason)
        self._cancel_workers(generation)
        self._end(generation, ending)

    def _end(self, generation: Generation, ending: Ending) -> None:
        assert generation.ending is None, f"{generation.request} ends twice"
        del self._live[generation.request]
        if generation.timer is not None:
            generation.timer.cancel()
        generation.ending = ending
        generation.ahead.clear()
        self.outcomes.ended(generation, asyncio.get_running_loop().time())
        if isinstance(ending, Completed):
            self._meters.succeeded(ending.reason)
            self._meters.e2e.observe(asyncio.get_running_loop().time() - generation.job.arrived)
        generation.changed()

    def _cancel_workers(self, generation: Generation) -> None:
        if generation.place is not None:
            for worker in (generation.place.prefill, generation.place.decode):
                self._link.post(worker, Cancel(generation.request, generation.attempt, worker))

    # ---- small things

    def _current(self, request: RequestId, attempt: int) -> Generation | None:
        generation = self._live.get(request)
        return generation if generation is not None and generation.attempt == attempt else None

    def _time_left(self, generation: Generation) -> float:
        return max(0.0, generation.job.deadline - asyncio.get_running_loop().time())

    def _tell(self, body: Message) -> None:
        self._link.post(self._membership.conductor, body)

    def _tell_cancelled(self, request: RequestId, reason: str) -> None:
        self._tell(RequestCancelled(request, reason))

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._sent)

    def _sent(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a message could not be sent", exc_info=error)
