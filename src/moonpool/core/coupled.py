"""One instance that prefills and decodes with the same engine: the baseline that separate pools are measured against.

A pure state machine in the events and actions of `prefill.py` and `decode.py`. A request is in one of these states:

    queued -> loading -> ready -> running -> draining -> gone
       |         |         |         |          ^
       +-> gone  +---------+---------+----------+   dropped / stopped / finished / preempted

`ready`: what its node has of the prefix is in its pages, the rest is to be computed; `running`: it has its first token.
What a step holds depends on the mode:

- `prefill-first`: prompts as soon as there are any, whole, and decode waits meanwhile (the paper's vLLM);
- `one-at-a-time`: the same, and a request is alone from its first page to its last token (the paper's vLLM for long
  prompts, PAPER §6);
- `chunked`: a token of every running request, and prompt tokens up to `step_tokens` with them (today's vLLM).

Prompts keep their order of arrival. When a running request needs a page and none is free, the newest gives way.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

from msgspec import Struct

from moonpool.core.cost import DecodeCoefficients, PrefillCoefficients
from moonpool.core.decode import Drain, Dropped, Ending, KvStored, Refuse, Stepped, StepRow, Stopped
from moonpool.core.pages import PagePool, pages_for
from moonpool.core.prefill import Chunk, Load, Loaded
from moonpool.core.vocabulary import RequestId

CoupledMode = Literal["prefill-first", "one-at-a-time", "chunked"]
COUPLED_MODES: tuple[CoupledMode, ...] = get_args(CoupledMode)


class Ordered(Struct, frozen=True):
    """A prompt of `tokens` tokens is to be computed and decoded here, to at most `most_tokens` in the end."""

    request: RequestId
    attempt: int
    tokens: int
    most_tokens: int


class Step(Struct, frozen=True):
    """Compute the chunks and the last token of each row as one packed batch, then say `Stepped`.

    A token is drawn for each row and for each chunk that is the last of its prompt.
    """

    chunks: tuple[Chunk, ...]
    rows: tuple[StepRow, ...]


class Span(Protocol):
    """Prompt tokens of one request that a step computes: a `Chunk`, or an engine's row."""

    @property
    def start(self) -> int: ...

    @property
    def count(self) -> int: ...


CoupledEvent = Ordered | Loaded | Stepped | KvStored | Dropped | Stopped
CoupledAction = Load | Step | Drain | Refuse


class _State(enum.Enum):
    QUEUED = "queued"
    LOADING = "loading"
    READY = "ready"
    RUNNING = "running"
    DRAINING = "draining"


@dataclass(slots=True, eq=False)
class _Request:
    request: RequestId
    attempt: int
    tokens: int
    """Known so far; of a running one the last has no KV yet."""
    state: _State = _State.QUEUED
    computed: int = 0
    """Tokens of the prompt that have KV, those of the step in flight counted."""
    pages: tuple[int, ...] = ()
    ending: Ending | None = None
    """Set while a step or load still touches the pages; it drains when that has ended."""

    @property
    def rest(self) -> int:
        """Prompt tokens that no step has taken yet."""
        return self.tokens - self.computed


class CoupledInstance:
    def __init__(
        self, *, pages: int, block_tokens: int, slots: int, step_tokens: int, mode: CoupledMode, queue_bound: int
    ) -> None:
        """`slots`: most requests inside. `step_tokens`: most tokens of a step, or a longer whole prompt."""
        self.pool = PagePool(pages)
        self.mode: CoupledMode = mode
        self._block_tokens = block_tokens
        self._slots = 1 if mode == "one-at-a-time" else slots
        self._step_tokens = step_tokens
        self._queue_bound = queue_bound
        self._requests: dict[RequestId, _Request] = {}
        self._waiting: dict[RequestId, _Request] = {}
        self._loading: _Request | None = None
        self._ready: list[_Request] = []
        self._running: list[_Request] = []
        """The oldest first, as in `_ready`, all of which are newer."""
        self._chunks: tuple[Chunk, ...] = ()
        """Of the step in flight."""
        self._prefilling: tuple[_Request, ...] = ()
        self._decoding: tuple[_Request, ...] = ()
        self.preemptions = 0

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def queued(self) -> int:
        return len(self._waiting) + len(self._ready) + (self._loading is not None)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that no step has taken yet."""
        inside = self._ready if self._loading is None else [*self._ready, self._loading]
        return sum(r.rest for r in self._waiting.values()) + sum(r.rest for r in inside)

    @property
    def context_tokens(self) -> int:
        return sum(r.tokens for r in self._running)

    @property
    def is_starved(self) -> bool:
        """A running request sits the step in flight out, because it needs a page."""
        return len(self._decoding) < len(self._running)

    @property
    def steps_ahead(self) -> int:
        """How often the step in flight could be repeated, itself counted, before a page or the next prompt is needed.

        Each repetition takes the next token of each row, and as many of the chunk's prompt as the chunk has.
        """
        size = self._block_tokens
        most = min((len(r.pages) * size - r.tokens + 1 for r in self._decoding), default=1)
        if not self._chunks:
            return most
        chunk = self._chunks[-1]
        if len(self._chunks) > 1 or chunk.last:
            return 1
        spare = min(sum(r.rest for r in self._ready) - self._step_tokens, self._prefilling[0].rest - 1)
        own = 1 + max(spare, 0) // chunk.count
        return min(own, most) if self._decoding else own

    def handle(self, event: CoupledEvent, now: float) -> tuple[CoupledAction, ...]:
        del now
        actions: list[CoupledAction] = []
        match event:
            case Ordered():
                self._take(event, actions)
            case Loaded():
                self._loaded(event, actions)
            case Stepped():
                self._stepped(event, actions)
            case KvStored():
                if (r := self._find(event)) and r.state is _State.DRAINING:
                    self.pool.release(list(r.pages))
                    del self._requests[r.request]
            case Dropped():
                self._end(self._find(event), Ending.DROPPED, actions)
            case Stopped():
                self._end(self._find(event), Ending.FINISHED, actions)
        # Who runs comes before who waits where pages are short.
        if not self._prefilling and not self._decoding:
            self._start_step(actions)
        self._start_load(actions)
        return tuple(actions)

    def _find(self, event: Loaded | KvStored | Dropped | Stopped) -> _Request | None:
        r = self._requests.get(event.request)
        return r if r is not None and r.attempt == event.attempt else None

    def _take(self, event: Ordered, actions: list[CoupledAction]) -> None:
        id_ = event.request, event.attempt
        known = self._requests.get(event.request)
        most = pages_for(event.most_tokens, self._block_tokens)
        if known is not None:
            if known.attempt != event.attempt:
                actions.append(Refuse(*id_, f"attempt {known.attempt} is still leaving"))
        elif most > self.pool.count:
            actions.append(Refuse(*id_, f"it may need {most} pages, this instance has {self.pool.count}"))
        elif self.queued >= self._queue_bound:
            actions.append(Refuse(*id_, f"{self._queue_bound} prompts wait here already"))
        else:
            r = _Request(*id_, event.tokens)
            self._requests[r.request] = self._waiting[r.request] = r

    def _start_load(self, actions: list[CoupledAction]) -> None:
        """One at a time, and only where what is loaded does not fill a step: who looks later finds more of its prefix.

        Each request inside is left a page to grow into.
        """
        inside = len(self._ready) + len(self._running)
        if not self._waiting or self._loading is not None or inside >= self._slots:
            return
        if sum(r.rest for r in self._ready) >= self._step_tokens:
            return
        r = next(iter(self._waiting.values()))
        needed = pages_for(r.tokens, self._block_tokens)
        if self.pool.can_allocate(needed + inside):
            del self._waiting[r.request]
            self._loading, r.state, r.pages = r, _State.LOADING, tuple(self.pool.allocate(needed))
            actions.append(Load(r.request, r.attempt, r.pages))

    def _loaded(self, event: Loaded, actions: list[CoupledAction]) -> None:
        r = self._find(event)
        if r is None or r is not self._loading:
            return
        r.computed = event.blocks * self._block_tokens
        if r.computed >= r.tokens:
            raise ValueError(f"{r.computed} of {r.tokens} tokens loaded: one must be left to compute")
        self._loading, r.state = None, _State.READY
        self._ready.append(r)
        if r.ending is not None:
            self._drain(r, r.ending, actions)

    def _start_step(self, actions: list[CoupledAction]) -> None:
        whole = self.mode != "chunked"
        room = self._step_tokens
        if not (whole and self._ready):
            self._decoding = tuple([r for r in tuple(self._running) if self._grows(r, actions)])
            room -= len(self._decoding)
        chunks: list[Chunk] = []
        for r in self._ready:
            count = r.rest if whole else min(r.rest, room)
            if count <= 0 or (chunks and count > room):
                break
            chunks.append(Chunk(r.request, r.attempt, r.computed, count, count == r.rest))
            room -= count
        self._prefilling = tuple(self._ready[: len(chunks)])
        for r, chunk in zip(self._prefilling, chunks, strict=True):
            r.computed += chunk.count
        self._chunks = tuple(chunks)
        if chunks or self._decoding:
            rows = [StepRow(r.request, r.attempt, r.tokens, r.pages) for r in self._decoding]
            actions.append(Step(self._chunks, tuple(rows)))

    def _grows(self, r: _Request, actions: list[CoupledAction]) -> bool:
        """Whether the request has a page for the token to compute; else it must sit this step out."""
        if r.state is not _State.RUNNING:
            return False
        if len(r.pages) * self._block_tokens >= r.tokens:
            return True
        if not self.pool.can_allocate(1):
            # Pages of who is leaving come free soon, and who is loading can be asked to leave once it is there.
            waits = self._loading is not None or any(o.state is _State.DRAINING for o in self._requests.values())
            if not waits and len(self._running) + len(self._ready) > 1:
                self.preemptions += 1
                self._drain((self._ready or self._running)[-1], Ending.PREEMPTED, actions)
            return False
        r.pages += tuple(self.pool.allocate(1))
        return True

    def _stepped(self, event: Stepped, actions: list[CoupledAction]) -> None:
        chunks, prefilling, decoding = self._chunks, self._prefilling, self._decoding
        self._chunks, self._prefilling, self._decoding = (), (), ()
        finished = frozenset(event.finished)
        for r in decoding:
            r.tokens += event.steps
            self._after_step(r, event.failed, finished, actions)
        for r, chunk in zip(prefilling, chunks, strict=True):
            r.computed += chunk.count * (event.steps - 1)
            if chunk.last and not event.failed:
                self._ready.remove(r)
                r.tokens, r.state = r.tokens + 1, _State.RUNNING
                self._running.append(r)
            self._after_step(r, event.failed, finished, actions)

    def _after_step(
        self, r: _Request, failed: bool, finished: frozenset[RequestId], actions: list[CoupledAction]
    ) -> None:
        if failed:
            self._drain(r, Ending.DROPPED, actions)
        elif r.ending is not None:
            self._drain(r, r.ending, actions)
        elif r.request in finished:
            self._drain(r, Ending.FINISHED, actions)

    def _end(self, r: _Request | None, ending: Ending, actions: list[CoupledAction]) -> None:
        if r is None or r.state is _State.DRAINING:
            return
        if r.state is _State.QUEUED:
            del self._requests[r.request], self._waiting[r.request]
            actions.append(Drain(r.request, r.attempt, 1, (), ending))
        elif r.state is _State.LOADING or r in self._prefilling or r in self._decoding:
            r.ending = ending
        else:
            self._drain(r, ending, actions)

    def _drain(self, r: _Request, ending: Ending, actions: list[CoupledAction]) -> None:
        """Its `tokens` count one beyond those that have KV, as a running request's do."""
        running = r.state is _State.RUNNING
        (self._running if running else self._ready).remove(r)
        r.state, r.ending = _State.DRAINING, ending
        tokens = r.tokens if running else r.computed + 1
        actions.append(Drain(r.request, r.attempt, tokens, r.pages, ending))

    def check_integrity(self) -> None:
        self.pool.check_integrity()
        requests = self._requests.values()
        held = [page for r in requests for page in r.pages]
        assert len(held) == len(set(held)) == self.pool.used
        for state, members in (
            (_State.QUEUED, [*self._waiting.values()]),
            (_State.LOADING, [self._loading] if self._loading else []),
            (_State.READY, self._ready),
            (_State.RUNNING, self._running),
        ):
            assert members == [r for r in requests if r.state is state], f"the books of what is {state.value} are wrong"
        for r in requests:
            assert bool(r.pages) == (r.state is not _State.QUEUED)
            assert 0 <= r.computed <= r.tokens
            assert r.ending is None or r.state is not _State.QUEUED
        assert len(self._ready) + len(self._running) + (self._loading is not None) <= self._slots
        assert all(r in self._ready for r in self._prefilling)
        assert all(r in self._running for r in self._decoding)


def step_seconds(
    prefill: PrefillCoefficients, decode: DecodeCoefficients, chunks: Sequence[Span], batch: int, context_tokens: int
) -> float:
    """Of one step with these chunks, and with `batch` rows that hold `context_tokens` tokens of KV.

    Without rows it is a prefill step, c0 + a·T + b·Σ(e² − s²); without chunks a decode step, d0 + d1·B + d2·C. With
    both the matrix products take T + B tokens at once, and the weights, whose reading d0 is for, are read only once:

        max(d0, c0 + a·(T + B)) + b·Σ(e² − s²) + d1·B + d2·C
    """
    tokens, squares = 0, 0
    for chunk in chunks:
        end = chunk.start + chunk.count
        tokens += chunk.count
        squares += end * end - chunk.start * chunk.start
    attention = prefill.per_token_squared * squares
    rows = decode.per_request * batch + decode.per_context_token * context_tokens
    if not batch:
        return prefill.fixed + prefill.per_token * tokens + attention
    if not chunks:
        return decode.fixed + rows
    return max(decode.fixed, prefill.fixed + prefill.per_token * (tokens + batch)) + attention + rows


def step_growth(prefill: PrefillCoefficients, decode: DecodeCoefficients, chunks: Sequence[Chunk], batch: int) -> float:
    """By how much each repetition of the step (`steps_ahead`) takes longer than the one before it, seconds."""
    squares = sum(chunk.count * chunk.count for chunk in chunks)
    return 2 * prefill.per_token_squared * squares + decode.per_context_token * batch
