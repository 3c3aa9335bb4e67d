"""The coupled instance: what each mode puts into a step; pages accounted for by brute force."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from moonpool.core.cost import DecodeCoefficients, PrefillCoefficients
from moonpool.core.coupled import (
    COUPLED_MODES,
    CoupledAction,
    CoupledEvent,
    CoupledInstance,
    CoupledMode,
    Ordered,
    Step,
    step_growth,
    step_seconds,
)
from moonpool.core.decode import Drain, Dropped, Ending, KvStored, Refuse, Stepped, Stopped
from moonpool.core.prefill import Chunk, Load, Loaded
from moonpool.core.vocabulary import RequestId

BLOCK = 4


def instance(
    mode: CoupledMode = "chunked", pages: int = 40, slots: int = 4, step_tokens: int = 8, bound: int = 6
) -> CoupledInstance:
    return CoupledInstance(
        pages=pages, block_tokens=BLOCK, slots=slots, step_tokens=step_tokens, mode=mode, queue_bound=bound
    )


def rid(n: int) -> RequestId:
    return RequestId(f"r{n}")


def come(c: CoupledInstance, n: int, tokens: int, most: int | None = None, hit: int = 0) -> Step | None:
    """Ordered and loaded; the step that this starts."""
    actions = [*c.handle(Ordered(rid(n), 1, tokens, most or tokens + 20), 0.0)]
    if any(isinstance(action, Load) for action in actions):
        actions += c.handle(Loaded(rid(n), 1, hit), 0.0)
    return step_of(tuple(actions))


def step_of(actions: tuple[CoupledAction, ...]) -> Step | None:
    steps = [action for action in actions if isinstance(action, Step)]
    assert len(steps) <= 1
    return steps[0] if steps else None


def next_step(c: CoupledInstance, *finished: int) -> Step:
    """After loading whoever is asked for."""
    actions = [*c.handle(Stepped(tuple(rid(n) for n in finished)), 0.0)]
    for action in tuple(actions):
        if isinstance(action, Load):
            actions += c.handle(Loaded(action.request, action.attempt, 0), 0.0)
    step = step_of(tuple(actions))
    assert step is not None
    return step


def shape(step: Step | None) -> tuple[list[tuple[str, int, int, bool]], list[tuple[str, int]]]:
    assert step is not None
    return (
        [(chunk.request, chunk.start, chunk.count, chunk.last) for chunk in step.chunks],
        [(row.request, row.tokens) for row in step.rows],
    )


def test_chunks_take_what_the_running_requests_leave_of_a_step() -> None:
    c = instance()
    assert shape(come(c, 1, 6)) == ([("r1", 0, 6, True)], [])
    come(c, 2, 10)
    assert shape(next_step(c)) == ([("r2", 0, 7, False)], [("r1", 7)])
    come(c, 3, 9)
    # The end of one prompt and the beginning of the next share a step.
    assert shape(next_step(c)) == ([("r2", 7, 3, True), ("r3", 0, 4, False)], [("r1", 8)])
    assert shape(next_step(c)) == ([("r3", 4, 5, True)], [("r1", 9), ("r2", 11)])


def test_prefill_first_takes_whole_prompts_and_decode_waits() -> None:
    c = instance("prefill-first")
    assert shape(come(c, 1, 30)) == ([("r1", 0, 30, True)], [])
    come(c, 2, 3)
    come(c, 3, 4)
    assert shape(next_step(c)) == ([("r2", 0, 3, True), ("r3", 0, 4, True)], [])
    come(c, 4, 20, hit=2)
    assert shape(next_step(c)) == ([("r4", 8, 12, True)], [])
    assert shape(next_step(c)) == ([], [("r1", 31), ("r2", 4), ("r3", 5), ("r4", 21)])


def test_one_at_a_time_is_alone_to_its_end() -> None:
    c = instance("one-at-a-time")
    assert shape(come(c, 1, 30)) == ([("r1", 0, 30, True)], [])
    assert come(c, 2, 3) is None
    assert shape(next_step(c)) == ([], [("r1", 31)])
    assert shape(next_step(c, 1)) == ([("r2", 0, 3, True)], [])


def test_a_prompt_looks_into_the_cache_late_and_never_overtakes() -> None:
    c = instance()
    c.handle(Ordered(rid(1), 1, 40, 60), 0.0)
    c.handle(Loaded(rid(1), 1, 0), 0.0)
    assert c.handle(Ordered(rid(2), 1, 4, 8), 0.0) == (), "32 tokens are loaded: more than a step"
    loads: list[CoupledAction] = []
    while not loads:
        loads = [action for action in c.handle(Stepped(()), 0.0) if isinstance(action, Load)]
    assert loads[0].request == rid(2)
    assert c.queued_tokens < 8 + 4


def test_a_request_whose_first_token_is_its_last_leaves_after_prefill() -> None:
    c = instance()
    come(c, 1, 6)
    assert c.handle(Stepped((rid(1),)), 0.0) == (Drain(rid(1), 1, 7, (0, 1), Ending.FINISHED),)
    assert c.pool.used == 2
    c.handle(KvStored(rid(1), 1), 0.0)
    assert c.pool.used == 0


def test_the_newest_gives_way_even_in_its_prefill() -> None:
    c = instance(pages=8, step_tokens=6)
    come(c, 1, 4, most=30)
    next_step(c)
    come(c, 2, 20, most=24)
    drains: list[CoupledAction] = []
    for _ in range(20):
        drains += [action for action in c.handle(Stepped(()), 0.0) if isinstance(action, Drain)]
        if drains:
            break
    (drain,) = drains
    assert isinstance(drain, Drain)
    assert (drain.request, drain.ending) == (rid(2), Ending.PREEMPTED)


def test_what_can_never_fit_is_refused_by_name() -> None:
    (refusal,) = instance(pages=4).handle(Ordered(rid(1), 1, 5, 17), 0.0)
    assert isinstance(refusal, Refuse)
    assert "5 pages" in refusal.reason
    assert "has 4" in refusal.reason


def test_a_failed_step_drops_all_that_it_held() -> None:
    c = instance()
    come(c, 1, 6)
    come(c, 2, 12)
    next_step(c)
    drains = c.handle(Stepped((), failed=True), 0.0)
    assert [(d.request, d.ending) for d in drains if isinstance(d, Drain)] == [
        (rid(1), Ending.DROPPED),
        (rid(2), Ending.DROPPED),
    ]


def test_a_mixed_step_reads_the_weights_once() -> None:
    p, d = PrefillCoefficients(0.001, 1e-4, 1e-9), DecodeCoefficients(0.02, 1e-6, 4e-8)
    small, large = (Chunk(rid(1), 1, 1000, 50, False),), (Chunk(rid(1), 1, 1000, 512, False),)
    decode = step_seconds(p, d, (), 10, 10_000)
    assert decode == pytest.approx(0.02 + 10e-6 + 4e-4)
    assert step_seconds(p, d, small, 10, 10_000) - decode == pytest.approx(1e-9 * (1050**2 - 1000**2))
    squares = 1512**2 - 1000**2
    assert step_seconds(p, d, large, 0, 0) == pytest.approx(0.001 + 0.0512 + 1e-9 * squares)
    mixed = step_seconds(p, d, large, 10, 10_000)
    assert mixed == pytest.approx(0.001 + 0.0522 + 1e-9 * squares + 10e-6 + 4e-4)
    again = (Chunk(rid(1), 1, 1512, 512, False),)
    assert step_seconds(p, d, again, 10, 10_010) - mixed == pytest.approx(step_growth(p, d, large, 10))


class CoupledMachine(RuleBasedStateMachine):
    """The driver's part, in any order; `live` holds what the instance must still let go of."""

    def __init__(self) -> None:
        super().__init__()
        self.c = instance()
        self.next = 0
        self.live: dict[RequestId, int] = {}
        """Request -> tokens with KV."""
        self.prompt: dict[RequestId, int] = {}
        self.most: dict[RequestId, int] = {}
        self.first: set[RequestId] = set()
        """Those that have their first token."""
        self.loading: list[RequestId] = []
        self.draining: list[RequestId] = []
        self.owner: dict[int, RequestId] = {}
        self.step: Step | None = None

    @initialize(mode=st.sampled_from(COUPLED_MODES))
    def begin(self, mode: CoupledMode) -> None:
        self.c = instance(mode, pages=10)

    def feed(self, event: CoupledEvent) -> None:
        for action in self.c.handle(event, 0.0):
            self.follow(action)

    def own(self, request: RequestId, pages: tuple[int, ...]) -> None:
        for page in pages:
            assert self.owner.setdefault(page, request) == request, "a page in use was given out again"

    def follow(self, action: CoupledAction) -> None:
        match action:
            case Load(request, _, pages):
                self.own(request, pages)
                assert len(pages) == -(-self.prompt[request] // BLOCK)
                self.loading.append(request)
            case Step():
                self.check(action)
                self.step = action
            case Drain(request, _, tokens, pages, _):
                assert all(self.owner[p] == request for p in pages)
                if pages:
                    assert tokens == self.live[request] + 1
                    self.draining.append(request)
                else:
                    self.gone(request)
            case Refuse(request, _, _):
                self.gone(request)

    def check(self, step: Step) -> None:
        assert self.step is None
        assert step.rows or step.chunks
        together = len({*(row.request for row in step.rows), *(chunk.request for chunk in step.chunks)})
        assert together == len(step.rows) + len(step.chunks) <= 4
        if self.c.mode == "chunked":
            assert len(step.rows) + sum(chunk.count for chunk in step.chunks) <= 8
        else:
            assert not (step.rows and step.chunks)
            assert all(chunk.last for chunk in step.chunks)
        if self.c.mode == "one-at-a-time":
            assert together == 1
        for row in step.rows:
            self.own(row.request, row.pages)
            assert row.request in self.first
            assert row.tokens == self.live[row.request] + 1
            assert len(row.pages) * BLOCK >= row.tokens
        for chunk in step.chunks:
            assert chunk.request not in self.first
            assert chunk.count > 0
            assert chunk.start == self.live[chunk.request]
            assert chunk.last == (chunk.start + chunk.count == self.prompt[chunk.request])

    def gone(self, request: RequestId) -> None:
        for books in (self.live, self.prompt, self.most):
            del books[request]
        self.first.discard(request)
        self.owner = {p: r for p, r in self.owner.items() if r != request}

    @rule(tokens=st.integers(1, 20), more=st.integers(1, 20))
    def order(self, tokens: int, more: int) -> None:
        self.next += 1
        request = rid(self.next)
        self.live[request], self.prompt[request], self.most[request] = 0, tokens, tokens + more
        self.feed(Ordered(request, 1, tokens, tokens + more))

    @precondition(lambda self: self.loading)
    @rule(data=st.data())
    def load(self, data: st.DataObject) -> None:
        request = self.loading.pop()
        blocks = data.draw(st.integers(0, (self.prompt[request] - 1) // BLOCK))
        self.live[request] = blocks * BLOCK
        self.feed(Loaded(request, 1, blocks))

    def computed(self, steps: int = 1) -> list[RequestId]:
        """Books the step in flight; those of it that have all their tokens."""
        assert self.step is not None
        step, self.step = self.step, None
        for row in step.rows:
            self.live[row.request] += steps
        for chunk in step.chunks:
            self.live[chunk.request] += steps * chunk.count
            if chunk.last:
                self.first.add(chunk.request)
        drawn = [row.request for row in step.rows] + [chunk.request for chunk in step.chunks if chunk.last]
        return [request for request in drawn if self.live[request] + 1 >= self.most[request]]

    @precondition(lambda self: self.step)
    @rule(more=st.data())
    def end_step(self, more: st.DataObject) -> None:
        assert self.step is not None
        drawn = [row.request for row in self.step.rows]
        left = min((self.most[request] - self.live[request] - 1 for request in drawn), default=1 << 20)
        steps = more.draw(st.integers(1, min(self.c.steps_ahead, left)))
        done = self.computed(steps)
        done += [request for request in drawn if request not in done and more.draw(st.booleans())]
        self.feed(Stepped(tuple(done), steps=steps))

    @precondition(lambda self: self.step)
    @rule()
    def fail_step(self) -> None:
        """Its tokens have no KV, whatever was in flight."""
        assert self.step is not None
        step, self.step = self.step, None
        for chunk in step.chunks:
            self.live[chunk.request] += chunk.count
        for row in step.rows:
            self.live[row.request] += 1
        self.feed(Stepped((), failed=True))

    @precondition(lambda self: self.draining)
    @rule(data=st.data())
    def stored(self, data: st.DataObject) -> None:
        request = self.draining.pop(data.draw(st.integers(0, len(self.draining) - 1)))
        self.gone(request)
        self.feed(KvStored(request, 1))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), stop=st.booleans())
    def end(self, data: st.DataObject, stop: bool) -> None:
        request = data.draw(st.sampled_from(sorted(self.live)))
        self.feed(Stopped(request, 1) if stop else Dropped(request, 1))

    @invariant()
    def sound(self) -> None:
        self.c.check_integrity()

    def teardown(self) -> None:
        """Everybody gets done without help: steps alone must lead there."""
        for _ in range(5000):
            if self.loading:
                self.feed(Loaded(self.loading.pop(), 1, 0))
            elif self.draining:
                request = self.draining.pop()
                self.gone(request)
                self.feed(KvStored(request, 1))
            elif self.step is not None:
                self.feed(Stepped(tuple(self.computed())))
            else:
                break
        assert not self.live, "a request was forgotten"
        assert self.c.pool.used == 0


TestCoupledMachine = CoupledMachine.TestCase
