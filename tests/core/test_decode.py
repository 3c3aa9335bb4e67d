"""The decode instance: joining, growing, giving way, leaving; pages accounted for by brute force."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from moonpool.core.decode import (
    DecodeAction,
    DecodeEvent,
    DecodeInstance,
    Drain,
    Dropped,
    Ending,
    HandedOver,
    KvArrived,
    KvLoaded,
    KvStored,
    LoadKv,
    Refuse,
    Step,
    Stepped,
    Stopped,
)
from moonpool.core.vocabulary import RequestId

BLOCK = 4


def instance(pages: int = 8, slots: int = 4, bound: int = 6) -> DecodeInstance:
    return DecodeInstance(pages=pages, block_tokens=BLOCK, slots=slots, queue_bound=bound)


def rid(n: int) -> RequestId:
    return RequestId(f"r{n}")


def join(d: DecodeInstance, n: int, tokens: int, most: int = 16, rank: int = 0) -> tuple[DecodeAction, ...]:
    d.handle(HandedOver(rid(n), 1, tokens, most, rank), 0.0)
    d.handle(KvArrived(rid(n), 1), 0.0)
    return d.handle(KvLoaded(rid(n), 1), 0.0)


def test_a_request_joins_steps_and_leaves() -> None:
    d = instance()
    d.handle(HandedOver(rid(1), 1, 5, 20), 0.0)
    assert d.handle(KvArrived(rid(1), 1), 0.0) == (LoadKv(rid(1), 1, (0, 1)),)
    (step,) = d.handle(KvLoaded(rid(1), 1), 0.0)
    assert isinstance(step, Step)
    assert step.rows[0].tokens == 5
    (step,) = d.handle(Stepped(()), 0.0)
    assert isinstance(step, Step)
    assert step.rows[0].tokens == 6
    assert d.handle(Stepped((rid(1),)), 0.0) == (Drain(rid(1), 1, 7, (0, 1), Ending.FINISHED),)
    assert d.pool.used == 2
    d.handle(KvStored(rid(1), 1), 0.0)
    assert d.pool.used == 0


def test_the_newest_gives_way_and_the_oldest_goes_on() -> None:
    d = instance(pages=4)
    join(d, 1, 4)
    join(d, 2, 4)
    actions: list[DecodeAction] = []
    for _ in range(20):
        actions += d.handle(Stepped(()), 0.0)
        if d.preemptions:
            break
    (drain,) = [a for a in actions if isinstance(a, Drain)]
    assert drain.request == rid(2)
    assert drain.ending is Ending.PREEMPTED
    after = d.handle(KvStored(rid(2), 1), 0.0)
    rows = [row.request for a in (*actions, *after) if isinstance(a, Step) for row in a.rows]
    assert rows[-1] == rid(1)


def test_a_later_rank_gives_way_before_a_newer_one() -> None:
    d = instance(pages=4)
    join(d, 1, 4, rank=1)
    join(d, 2, 4, rank=0)
    actions: list[DecodeAction] = []
    for _ in range(20):
        actions += d.handle(Stepped(()), 0.0)
        if d.preemptions:
            break
    (drain,) = [a for a in actions if isinstance(a, Drain)]
    assert drain.request == rid(1)


def test_what_can_never_fit_is_refused_by_name() -> None:
    (refusal,) = instance(pages=4).handle(HandedOver(rid(1), 1, 5, 17), 0.0)
    assert isinstance(refusal, Refuse)
    assert "5 pages" in refusal.reason
    assert "has 4" in refusal.reason


def test_a_stop_during_a_step_finishes_after_it() -> None:
    d = instance()
    join(d, 1, 5)
    assert d.handle(Stopped(rid(1), 1), 0.0) == ()
    (drain,) = d.handle(Stepped(()), 0.0)
    assert isinstance(drain, Drain)
    assert drain.ending is Ending.FINISHED


class DecodeMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.d = instance()
        self.next = 0
        self.live: dict[RequestId, int] = {}
        """Request -> tokens, while the instance has not let go of it."""
        self.most: dict[RequestId, int] = {}
        self.awaiting: list[RequestId] = []
        self.loading: list[RequestId] = []
        self.draining: list[RequestId] = []
        self.owner: dict[int, RequestId] = {}
        self.step: Step | None = None
        self.stepping: set[RequestId] = set()
        """As a driver without rows knows it."""

    def feed(self, event: DecodeEvent) -> None:
        for action in self.d.handle(event, 0.0):
            self.follow(action)

    def own(self, request: RequestId, pages: tuple[int, ...]) -> None:
        for page in pages:
            assert self.owner.setdefault(page, request) == request, "a page in use was given out again"

    def follow(self, action: DecodeAction) -> None:
        match action:
            case LoadKv(request, _, pages):
                self.own(request, pages)
                assert len(pages) == -(-self.live[request] // BLOCK)
                self.loading.append(request)
            case Step(rows):
                assert self.step is None
                assert 0 < len(rows) <= 4
                for row in rows:
                    self.own(row.request, row.pages)
                    assert row.tokens == self.live[row.request]
                    assert len(row.pages) * BLOCK >= row.tokens
                self.step = action
                assert self.stepping >= set(action.pauses)
                self.stepping -= set(action.pauses)
                assert self.stepping.isdisjoint(action.joins)
                self.stepping |= set(action.joins)
                assert self.stepping == {row.request for row in rows}
                assert (action.batch, action.tokens) == (len(rows), sum(row.tokens for row in rows))
                assert self.d.steps_ahead == min(len(row.pages) * BLOCK - row.tokens for row in rows) + 1
            case Drain(request, _, tokens, pages, _):
                assert tokens == self.live[request]
                assert all(self.owner[p] == request for p in pages)
                self.stepping.discard(request)
                if pages:
                    self.draining.append(request)
                else:
                    self.gone(request)
            case Refuse(request, _, _):
                self.gone(request)

    def gone(self, request: RequestId) -> None:
        del self.live[request]
        if request in self.awaiting:
            self.awaiting.remove(request)
        self.owner = {p: r for p, r in self.owner.items() if r != request}

    @rule(tokens=st.integers(2, 20), more=st.integers(0, 20), rank=st.integers(0, 1))
    def hand_over(self, tokens: int, more: int, rank: int) -> None:
        self.next += 1
        request = rid(self.next)
        self.live[request] = tokens
        self.most[request] = tokens + more
        self.awaiting.append(request)
        self.feed(HandedOver(request, 1, tokens, tokens + more, rank))

    @precondition(lambda self: self.awaiting)
    @rule(data=st.data())
    def arrive(self, data: st.DataObject) -> None:
        request = self.awaiting.pop(data.draw(st.integers(0, len(self.awaiting) - 1)))
        self.feed(KvArrived(request, 1))

    @precondition(lambda self: self.loading)
    @rule(data=st.data())
    def load(self, data: st.DataObject) -> None:
        self.feed(KvLoaded(self.loading.pop(data.draw(st.integers(0, len(self.loading) - 1))), 1))

    @precondition(lambda self: self.step)
    @rule(failed=st.booleans(), data=st.data())
    def end_step(self, failed: bool, data: st.DataObject) -> None:
        assert self.step is not None
        rows, self.step = self.step.rows, None
        most = min(self.d.steps_ahead, *(self.most[r.request] - r.tokens for r in rows))
        steps = 1 if failed else data.draw(st.integers(1, max(most, 1)))
        done = [r.request for r in rows if r.tokens + steps >= self.most[r.request] or data.draw(st.booleans())]
        if not failed:
            for row in rows:
                self.live[row.request] += steps
        self.feed(Stepped(tuple(done), failed, steps))

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
        self.d.check_integrity()

    def teardown(self) -> None:
        """Everybody gets done without help: steps alone must lead there."""
        for _ in range(5000):
            if self.awaiting:
                self.feed(KvArrived(self.awaiting.pop(), 1))
            elif self.loading:
                self.feed(KvLoaded(self.loading.pop(), 1))
            elif self.draining:
                request = self.draining.pop()
                self.gone(request)
                self.feed(KvStored(request, 1))
            elif self.step is not None:
                rows, self.step = self.step.rows, None
                for row in rows:
                    self.live[row.request] += 1
                self.feed(Stepped(tuple(r.request for r in rows if r.tokens + 1 >= self.most[r.request])))
            else:
                break
        assert not self.live, "a request was forgotten"
        assert self.d.pool.used == 0


TestDecodeMachine = DecodeMachine.TestCase
