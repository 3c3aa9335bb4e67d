"""What was weighed is kept for the newest requests, within bounds, as it was then."""

from __future__ import annotations

import pytest

from moonpool.core import why
from moonpool.core.conductor import Conductor, ConductorConfig
from moonpool.core.vocabulary import PartId, PartKind, RequestId
from moonpool.core.why import Why
from tests.core.conductor_scene import Scene, arrival, gateway, node, worker


def scene_of(instances: int = 2, config: ConductorConfig | None = None) -> Scene:
    scene = Scene(1, config or ConductorConfig())
    scene.start(gateway())
    for i in range(instances):
        scene.start(node(i))
        for kind in (PartKind.PREFILL, PartKind.DECODE):
            scene.start(worker(kind, i, on=i))
    return scene


def memory(scene: Scene) -> Why:
    return scene.conductor._attempts.why


def test_a_candidate_costs_what_it_would_have_cost_then() -> None:
    scene = scene_of()
    scene.request(arrival("a", 200, family="f"))
    scene.run(5.0)
    scene.request(arrival("b", 200, family="f"))
    scene.run(0.05)
    (before,) = scene.conductor.weighings(RequestId("b"))
    assert {c.id for c in before.prefill} == {"prefill-0", "prefill-1"}
    assert before.blocks == 12
    assert max(c.hit_blocks for c in before.prefill) == 12
    assert min(c.ttft_seconds for c in before.prefill) == before.ttft_seconds
    for load in scene.conductor._fleet.prefill.values():
        for _ in range(20):
            load.cost.observe(200, 0, 60.0)
    assert scene.conductor.weighings(RequestId("b")) == (before,)


def test_requests_that_wait_say_for_what_and_how_long() -> None:
    scene = scene_of(0)
    scene.request(arrival("a", time_left=5.0))
    scene.run(2.0)
    (waiting,) = scene.conductor.waitings(RequestId("a"))
    assert waiting.reason == "no prefill instance of 'tiny' is up"
    assert waiting.times > 3
    assert waiting.last_at - waiting.first_at > 1.0
    assert scene.conductor.weighings(RequestId("a")) == ()


def test_the_newest_weighing_is_worked_out_only_where_it_is_news() -> None:
    scene = scene_of()
    scene.request(arrival("a", 200))
    scene.run(0.05)
    newest = scene.conductor.weighing(RequestId("a"), -1.0)
    assert newest == scene.conductor.weighings(RequestId("a"))[-1]
    assert scene.conductor.weighing(RequestId("a"), newest.at) is None
    assert scene.conductor.weighing(RequestId("nobody"), -1.0) is None


def test_nothing_is_noted_where_nobody_asks() -> None:
    scene = Scene(1, ConductorConfig())
    scene.conductor = Conductor(ConductorConfig(), 1, explains=False)
    scene.start(gateway())
    scene.request(arrival("a", time_left=5.0))
    for registered in (node(0), worker(PartKind.PREFILL, 0), worker(PartKind.DECODE, 0)):
        scene.start(registered)
    scene.request(arrival("b"))
    scene.run(5.0)
    for id_ in (RequestId("a"), RequestId("b")):
        assert scene.conductor.weighings(id_) == scene.conductor.waitings(id_) == ()


def test_only_so_many_requests_attempts_and_options_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(why, "KEPT_REQUESTS", 8)
    scene = scene_of()
    for i in range(12):
        scene.request(arrival(f"r{i}"))
        scene.run(1.0)
    assert [bool(scene.conductor.weighings(RequestId(f"r{i}"))) for i in range(12)] == [False] * 4 + [True] * 8
    assert memory(scene)._options == 8 * 4
    monkeypatch.setattr(why, "KEPT_OPTIONS", 12)
    scene.request(arrival("last"))
    scene.run(1.0)
    assert memory(scene)._options == 12
    assert scene.conductor.weighings(RequestId("last"))
    assert not scene.conductor.weighings(RequestId("r9"))


def test_of_a_request_that_fails_again_and_again_the_newest_attempts_are_kept() -> None:
    scene = scene_of()
    scene.odds.prefill_failed = 1.0
    scene.request(arrival("a"))
    scene.run(40.0)
    kept = scene.conductor.weighings(RequestId("a"))
    assert len(kept) == why.KEPT_ATTEMPTS
    assert kept[-1].attempt > why.KEPT_ATTEMPTS
    assert memory(scene)._options == sum(len(w.prefill) + len(w.decode) for w in kept)


def test_one_that_is_weighed_and_held_again_and_again_is_told_of_once() -> None:
    scene = scene_of()
    scene.request(arrival("a"))
    scene.run(0.05)
    kept = memory(scene)
    last = kept._notes[RequestId("a")].weighed[-1]
    for i in range(10):
        kept.weighed(last.request, last.options, last.choice, None, 200.0 + i)
        kept.waits(last.request, "its instance has no room yet", 200.0 + i)
    placed, held = scene.conductor.weighings(RequestId("a"))
    assert (placed.verdict, held.verdict) == ("placed", "held")
    assert (held.at, held.reason) == (209.0, "its instance has no room yet")
    assert kept._options == 8
    kept.weighed(last.request, last.options, last.choice, None, 300.0)
    assert [w.verdict for w in scene.conductor.weighings(RequestId("a"))] == ["placed", "placed"]
    assert scene.conductor.waitings(RequestId("a"))[-1].times == 10


def test_with_many_instances_the_costs_of_today_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(why, "EXACT_OPTIONS", 1)
    scene = scene_of()
    scene.request(arrival("a", 200))
    scene.run(0.05)
    (before,) = scene.conductor.weighings(RequestId("a"))
    scene.conductor._fleet.prefill[PartId("prefill-1")].cost.observe(200, 0, 60.0)
    (after,) = scene.conductor.weighings(RequestId("a"))
    assert after.prefill[0] == before.prefill[0]
    assert after.prefill[1].compute_seconds > before.prefill[1].compute_seconds
