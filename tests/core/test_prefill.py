"""The prefill instance against a brute-force account of who holds which page."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from moonpool.core.cost import PrefillCoefficients
from moonpool.core.prefill import (
    Chunk,
    Drain,
    Dropped,
    GiveUp,
    KvStored,
    Load,
    Loaded,
    Ordered,
    Passed,
    PrefillAction,
    PrefillEvent,
    PrefillInstance,
    Refuse,
    Step,
    StepDone,
)
from moonpool.core.vocabulary import RequestId

BLOCK = 4


def instance(pages: int = 8, chunk: int = 6, bound: int = 4) -> PrefillInstance:
    return PrefillInstance(pages=pages, block_tokens=BLOCK, chunk_tokens=chunk, queue_bound=bound)


def rid(n: int) -> RequestId:
    return RequestId(f"r{n}")


def test_one_prompt_is_loaded_computed_in_chunks_and_drained() -> None:
    p = instance()
    assert p.handle(Ordered(rid(1), 1, 17), 0.0) == (Load(rid(1), 1, (0, 1, 2, 3, 4)),)
    assert p.handle(Loaded(rid(1), 1, 2), 0.0) == (Step((Chunk(rid(1), 1, 8, 6, False),)),)
    assert p.handle(StepDone(), 0.0) == (Step((Chunk(rid(1), 1, 14, 3, True),)),)
    assert p.handle(StepDone(), 0.0) == (Drain(rid(1), 1),)
    assert p.pool.used == 5, "stores may still read the pages"
    assert p.handle(KvStored(rid(1), 1), 0.0) == ()
    assert p.pool.used == 0


def test_short_prompts_share_a_step() -> None:
    p = instance()
    p.handle(Ordered(rid(1), 1, 9), 0.0)
    p.handle(Ordered(rid(2), 1, 2), 0.0)
    p.handle(Ordered(rid(3), 1, 2), 0.0)
    first = p.handle(Loaded(rid(1), 1, 0), 0.0)
    assert first == (Step((Chunk(rid(1), 1, 0, 6, False),)),)
    assert p.handle(Loaded(rid(2), 1, 0), 0.0) == ()
    assert p.handle(Loaded(rid(3), 1, 0), 0.0) == ()
    second = p.handle(StepDone(), 0.0)
    assert second == (
        Step((Chunk(rid(1), 1, 6, 3, True), Chunk(rid(2), 1, 0, 2, True), Chunk(rid(3), 1, 0, 1, False))),
    )


def test_a_prompt_dropped_mid_step_keeps_its_pages_until_the_step_and_its_stores_end() -> None:
    p = instance()
    p.handle(Ordered(rid(1), 1, 17), 0.0)
    p.handle(Loaded(rid(1), 1, 0), 0.0)
    assert p.handle(Dropped(rid(1), 1), 0.0) == ()
    assert p.pool.used == 5
    assert p.handle(StepDone(), 0.0) == (Drain(rid(1), 1),)
    p.handle(KvStored(rid(1), 1), 0.0)
    assert p.pool.used == 0


def test_what_cannot_fit_is_refused_by_name() -> None:
    p = instance(pages=4, bound=1)
    (refusal,) = p.handle(Ordered(rid(1), 1, 17), 0.0)
    assert isinstance(refusal, Refuse)
    assert "5 pages" in refusal.reason
    assert "has 4" in refusal.reason
    p.handle(Ordered(rid(2), 1, 4), 0.0)
    (refusal,) = p.handle(Ordered(rid(3), 1, 4), 0.0)
    assert isinstance(refusal, Refuse)
    assert "1 prompts wait" in refusal.reason


def test_a_short_prompt_goes_between_the_chunks_of_a_long_one_that_can_afford_it() -> None:
    p = instance(pages=16)
    p.handle(Ordered(rid(1), 1, 24, seconds=24.0, ttft_left=43.0), 0.0)
    assert chunks(p.handle(Loaded(rid(1), 1, 0), 0.0)) == [(rid(1), 0, 6)]
    p.handle(Ordered(rid(2), 1, 4, seconds=4.0, ttft_left=30.0), 1.0)
    p.handle(Ordered(rid(3), 1, 4, seconds=4.0, ttft_left=30.0), 1.0)
    for n in (2, 3):
        assert p.handle(Loaded(rid(n), 1, 0), 1.0) == ()
    # At 1.0 it has 42 s left, of which it keeps one and a half times its 24 s: enough for one of the two.
    assert chunks(p.handle(StepDone(), 6.0)) == [(rid(2), 0, 4), (rid(1), 6, 2)]
    assert chunks(p.handle(StepDone(), 12.0)) == [(rid(1), 8, 6)]
    assert chunks(p.handle(StepDone(), 18.0)) == [(rid(1), 14, 6)]
    assert chunks(p.handle(StepDone(), 24.0)) == [(rid(1), 20, 4), (rid(3), 0, 2)]


def test_a_prompt_that_would_be_late_by_it_shares_no_step() -> None:
    shared = [(rid(2), 0, 2), (rid(3), 0, 4)]
    for left, step in ((None, shared), (9.0, shared), (8.9, [(rid(2), 0, 2)]), (1.9, shared)):
        p = instance(pages=16)
        p.handle(Ordered(rid(1), 1, 6, seconds=6.0), 0.0)
        p.handle(Loaded(rid(1), 1, 0), 0.0)
        p.handle(Ordered(rid(2), 1, 2, seconds=2.0, ttft_left=None if left is None else 6.0 + left), 0.0)
        p.handle(Ordered(rid(3), 1, 40, seconds=40.0), 0.0)
        for n in (2, 3):
            p.handle(Loaded(rid(n), 1, 0), 0.0)
        # Together they take 6 s, of which half is kept in hand; one that is late anyway keeps nobody.
        assert chunks(p.handle(StepDone(), 6.0)) == step, left


def test_a_sooner_rank_is_loaded_and_computed_first() -> None:
    p = instance(pages=4, bound=9)
    p.handle(Ordered(rid(1), 1, 16, rank=5, seconds=1.0), 0.0)
    p.handle(Ordered(rid(2), 1, 16, rank=5, seconds=1.0), 0.0)
    p.handle(Ordered(rid(3), 1, 16, rank=0, seconds=1.0), 0.0)
    p.handle(Dropped(rid(1), 1), 0.0)
    (load,) = p.handle(KvStored(rid(1), 1), 0.0)
    assert isinstance(load, Load)
    assert load.request == rid(3)


def test_a_later_rank_that_computes_blocks_is_not_waited_for() -> None:
    for rank, loads in ((5, 1), (0, 0)):
        p = instance(pages=16)
        p.handle(Ordered(rid(1), 1, 16, rank=rank), 0.0)
        assert len(p.handle(Ordered(rid(2), 1, 16, after=(rid(1), 1)), 0.0)) == loads


def test_one_that_has_not_begun_and_cannot_be_in_time_is_given_up() -> None:
    p = instance(pages=16)
    for n, left in ((1, 6.0), (2, 7.0), (3, 10.5), (4, None)):
        p.handle(Ordered(rid(n), 1, 5, seconds=5.0, ttft_left=left), 0.0)
        p.handle(Loaded(rid(n), 1, 0), 0.0)
    actions = p.handle(StepDone(), 6.0)
    (late,) = [a for a in actions if isinstance(a, GiveUp)]
    assert late.request == rid(2), "the first has begun"
    assert "waited 6.0 s" in late.reason
    assert Drain(rid(2), 1) in actions
    assert [c.request for a in actions if isinstance(a, Step) for c in a.chunks] == [rid(3), rid(4)]


def test_chunks_of_one_prompt_follow_each_other_through_a_pipeline() -> None:
    p = instance()
    p.handle(Ordered(rid(1), 1, 17), 0.0)
    assert chunks(p.handle(Loaded(rid(1), 1, 0), 0.0)) == [(rid(1), 0, 6)]
    assert chunks(p.handle(Passed(), 1.0)) == [(rid(1), 6, 6)], "the first is still under way in the second machine"
    assert p.handle(StepDone(), 1.5) == (), "the first machine is not free before it says so"
    assert chunks(p.handle(Passed(), 2.0)) == [(rid(1), 12, 5)]
    assert p.handle(Passed(), 3.0) == ()
    assert p.handle(StepDone(), 3.0) == (), "its last chunk is still in flight"
    assert p.handle(StepDone(), 4.0) == (Drain(rid(1), 1),)


def test_a_pipeline_learns_what_its_steps_take_and_sizes_its_chunks_by_that() -> None:
    thought = PrefillCoefficients(fixed=0.01, per_token=1e-3, per_token_squared=0.0)

    def first_chunk(p: PrefillInstance, n: int) -> int:
        p.handle(Ordered(rid(n), 1, 2000), 0.0)
        ((_, _, count),) = chunks(p.handle(Loaded(rid(n), 1, 0), 0.0))
        return count

    p = PrefillInstance(pages=1024, block_tokens=BLOCK, chunk_tokens=1024, queue_bound=4, machines=2, step=thought)
    found = [first_chunk(p, 1)]
    assert found[0] == 143, "the square root of 2000 x 0.01 / 0.001"
    for n in range(2, 12):
        count = found[-1]
        actions: tuple[PrefillAction, ...] = ()
        while Drain(rid(n - 1), 1) not in actions:
            actions = p.handle(StepDone(seconds=0.2 + count * 1e-3), 0.0)
            count = sum(count for _, _, count in chunks(actions))
        p.handle(KvStored(rid(n - 1), 1), 0.0)
        found.append(first_chunk(p, n))
    assert found[-1] > 3 * found[0], "each step has a fixed part of 0.2 s"


def test_a_dropped_prompt_begins_no_further_chunk_and_keeps_its_pages_until_all_in_flight_are_done() -> None:
    p = instance()
    p.handle(Ordered(rid(1), 1, 24), 0.0)
    p.handle(Loaded(rid(1), 1, 0), 0.0)
    p.handle(Passed(), 1.0)
    assert p.handle(Dropped(rid(1), 1), 1.0) == ()
    assert p.handle(Passed(), 2.0) == ()
    assert p.handle(StepDone(), 2.0) == ()
    assert p.pool.used == 6
    assert p.handle(StepDone(), 3.0) == (Drain(rid(1), 1),)


def chunks(actions: tuple[PrefillAction, ...]) -> list[tuple[RequestId, int, int]]:
    return [(c.request, c.start, c.count) for a in actions if isinstance(a, Step) for c in a.chunks]


class PrefillMachine(RuleBasedStateMachine):
    """Any order of events: no page has two owners, every order ends, nothing stays behind."""

    def __init__(self) -> None:
        super().__init__()
        self.p = instance()
        self.next = 0
        self.now = 0.0
        self.loading: list[tuple[RequestId, int]] = []
        self.draining: list[tuple[RequestId, int]] = []
        self.owner: dict[int, RequestId] = {}
        self.pages: dict[RequestId, tuple[int, ...]] = {}
        self.tokens: dict[RequestId, int] = {}
        self.computed: dict[RequestId, int] = {}
        self.steps: list[Step] = []
        self.is_entered = False
        self.open: set[RequestId] = set()

    def feed(self, event: PrefillEvent) -> None:
        for action in self.p.handle(event, self.now):
            self.follow(action)

    def follow(self, action: PrefillAction) -> None:
        match action:
            case Load(request, attempt, pages):
                for page in pages:
                    assert page not in self.owner, "a page in use was given out again"
                    self.owner[page] = request
                self.pages[request] = pages
                self.loading.append((request, attempt))
            case Step(chunks):
                assert not self.is_entered
                assert sum(c.count for c in chunks) <= 6
                for c in chunks:
                    assert c.start == self.computed[c.request], "tokens computed twice or skipped"
                    self.computed[c.request] += c.count
                    assert c.last == (self.computed[c.request] == self.tokens[c.request])
                self.steps.append(action)
                self.is_entered = True
            case Drain(request, attempt):
                self.draining.append((request, attempt))
            case GiveUp(request, _, _):
                assert not self.computed[request] or request in self.pages
                if request not in self.pages:
                    self.open.discard(request)
            case Refuse(request, _, _):
                self.open.discard(request)

    @rule(
        tokens=st.integers(1, 40),
        rank=st.integers(0, 1),
        seconds=st.sampled_from([0.0, 1.0, 5.0]),
        left=st.sampled_from([None, 2.0, 8.0]),
    )
    def order(self, tokens: int, rank: int, seconds: float, left: float | None) -> None:
        self.next += 1
        self.tokens[rid(self.next)] = tokens
        self.computed[rid(self.next)] = 0
        self.open.add(rid(self.next))
        self.feed(Ordered(rid(self.next), 1, tokens, rank, seconds, left))

    def loadable(self) -> list[tuple[RequestId, int]]:
        """One that loads again may still be in a step."""
        flying = {c.request for step in self.steps for c in step.chunks}
        return [id_ for id_ in self.loading if id_[0] not in flying]

    @precondition(lambda self: self.loadable())
    @rule(data=st.data())
    def load(self, data: st.DataObject) -> None:
        request, attempt = data.draw(st.sampled_from(self.loadable()))
        self.loading.remove((request, attempt))
        blocks = data.draw(st.integers(0, (self.tokens[request] - 1) // BLOCK))
        self.computed[request] = blocks * BLOCK
        self.feed(Loaded(request, attempt, blocks))

    @rule(seconds=st.floats(0, 3))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.is_entered)
    @rule()
    def enter_next(self) -> None:
        """The instance is a pipeline: as many steps are in flight as it has machines, or fewer."""
        self.is_entered = False
        self.feed(Passed())

    @precondition(lambda self: self.steps)
    @rule(failed=st.booleans(), late=st.integers(0, 3))
    def end_step(self, failed: bool, late: int) -> None:
        """`late`: a bitmask of those for which a layer did not come in time."""
        step = self.steps.pop(0)
        self.is_entered &= bool(self.steps)
        again = [(c.request, c.attempt) for n, c in enumerate(step.chunks) if late >> n & 1 and not failed]
        self.loading += [id_ for id_ in again if id_ not in self.loading]
        self.feed(StepDone(failed, tuple(again)))

    @precondition(lambda self: self.draining)
    @rule(data=st.data())
    def stored(self, data: st.DataObject) -> None:
        request, attempt = self.draining.pop(data.draw(st.integers(0, len(self.draining) - 1)))
        for page in self.pages.pop(request):
            del self.owner[page]
        self.open.discard(request)
        self.feed(KvStored(request, attempt))

    @precondition(lambda self: self.next)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        request = rid(data.draw(st.integers(1, self.next)))
        if request not in self.pages:
            self.open.discard(request)
        self.feed(Dropped(request, 1))

    @invariant()
    def sound(self) -> None:
        self.p.check_integrity()
        assert self.p.pool.used == len(self.owner)

    def teardown(self) -> None:
        for _ in range(1000):
            if loadable := self.loadable():
                self.loading.remove(loadable[0])
                self.computed[loadable[0][0]] = 0
                self.feed(Loaded(*loadable[0], 0))
            elif self.steps:
                self.end_step(False, 0)
            elif self.draining:
                request, attempt = self.draining.pop()
                for page in self.pages.pop(request):
                    del self.owner[page]
                self.open.discard(request)
                self.feed(KvStored(request, attempt))
            else:
                break
        assert not self.open, "an order was forgotten"
        assert self.p.pool.used == 0
        assert self.p.queued == 0


TestPrefillMachine = PrefillMachine.TestCase


def test_an_order_loads_when_the_one_that_computes_its_prefix_is_gone() -> None:
    p = instance(pages=20, chunk=40)
    p.handle(Ordered(rid(1), 1, 17), 0.0)
    assert p.handle(Ordered(rid(2), 1, 17, after=(rid(1), 1)), 0.0) == ()
    third = p.handle(Ordered(rid(3), 1, 4), 0.0)
    assert third == (Load(rid(3), 1, (5,)),), "who waits for blocks holds nobody up"
    p.handle(Loaded(rid(1), 1, 0), 0.0)
    assert p.handle(StepDone(), 0.0) == (Drain(rid(1), 1),)
    (load,) = p.handle(KvStored(rid(1), 1), 0.0)
    assert isinstance(load, Load)
    assert load.request == rid(2)


def test_an_order_waits_neither_for_one_that_failed_nor_for_one_that_is_not_here() -> None:
    p = instance(pages=20)
    assert len(p.handle(Ordered(rid(1), 1, 4, after=(rid(9), 1)), 0.0)) == 1
    p.handle(Ordered(rid(2), 1, 4, after=(rid(1), 1)), 0.0)
    assert p.handle(Dropped(rid(1), 1), 0.0) == (Drain(rid(1), 1),)
    assert p.handle(KvStored(rid(1), 1), 0.0)[0] == Load(rid(2), 1, (0,))
    p.check_integrity()


def test_one_whose_prefix_did_not_come_in_time_loads_again_and_others_go_on() -> None:
    p = instance(pages=16)
    p.handle(Ordered(rid(1), 1, 17), 0.0)
    p.handle(Ordered(rid(2), 1, 3), 0.0)
    assert p.handle(Loaded(rid(1), 1, 3), 0.0) == (Step((Chunk(rid(1), 1, 12, 5, True),)),)
    p.handle(Loaded(rid(2), 1, 0), 0.0)
    assert p.handle(StepDone(again=((rid(1), 1),)), 0.0) == (Step((Chunk(rid(2), 1, 0, 3, True),)),)
    p.check_integrity()
    assert p.handle(Loaded(rid(1), 1, 1), 0.0) == (), "the other one is being computed"
    assert p.handle(StepDone(), 0.0) == (Drain(rid(2), 1), Step((Chunk(rid(1), 1, 4, 6, False),)))
    assert p.handle(StepDone(), 0.0) == (Step((Chunk(rid(1), 1, 10, 6, False),)),)
    p.check_integrity()


def test_one_that_loads_again_may_be_dropped_meanwhile() -> None:
    p = instance()
    p.handle(Ordered(rid(1), 1, 17), 0.0)
    p.handle(Loaded(rid(1), 1, 3), 0.0)
    p.handle(StepDone(again=((rid(1), 1),)), 0.0)
    assert p.handle(Dropped(rid(1), 1), 0.0) == (Drain(rid(1), 1),)
    assert p.handle(Loaded(rid(1), 1, 2), 0.0) == ()
    p.handle(KvStored(rid(1), 1), 0.0)
    p.check_integrity()
    assert p.pool.used == 0
