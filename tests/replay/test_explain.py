"""Why a request was placed, held or refused: told by the cluster, and by its journal when that is gone."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from moonpool.command.explain import from_journal
from moonpool.command.telling import tell
from moonpool.core.conductor import ConductorConfig
from moonpool.core.placement import PLACEMENT_POLICIES
from moonpool.core.vocabulary import Slo
from moonpool.errors import JournalError
from moonpool.wire import journal
from tests.core.conductor_scene import arrival
from tests.replay import kit

ROUGH = ConductorConfig(slo=Slo(ttft=20.0, tbt=2.0))


@pytest.mark.parametrize("policy", PLACEMENT_POLICIES)
def test_the_journal_tells_what_the_cluster_told(policy: str, tmp_path: Path) -> None:
    config = msgspec.structs.replace(ROUGH, placement=policy)
    scene = kit.record(config, tmp_path, most_bytes=1 << 20, requests=50)
    assert len(journal.segments_in(tmp_path)) >= 2
    outcomes = set()
    for i in range(0, 50, 7):
        live = kit.stories_of(scene, f"label-{i}")
        told, source = from_journal(f"label-{i}", tmp_path)
        assert [story.request for story in live] == [f"r{i}"]
        assert told == live
        assert str(tmp_path) in source
        outcomes.add(live[0].outcome)
        for weighing in live[0].weighings:
            _check(weighing)
    assert "finished" in outcomes


def _check(weighing: object) -> None:
    """What was chosen is among the candidates, with the very figures of the choice."""
    chosen = [c for c in weighing.prefill if c.id == weighing.chosen_prefill]  # type: ignore[attr-defined]
    assert len(chosen) == 1
    assert chosen[0].ttft_seconds == weighing.ttft_seconds  # type: ignore[attr-defined]
    assert [d.tbt_seconds for d in weighing.decode if d.id == weighing.chosen_decode] == [weighing.tbt_seconds]  # type: ignore[attr-defined]
    assert chosen[0].hit_blocks <= weighing.blocks  # type: ignore[attr-defined]


def test_a_request_that_waited_and_ran_is_told_in_order(tmp_path: Path) -> None:
    scene = kit.recorded_scene(ConductorConfig(), tmp_path)
    scene.odds = type(scene.odds)()
    kit.start(scene)
    for i in range(16):
        scene.request(arrival(f"r{i}", 100, 30, family="f", label=f"label-{i}"))
    scene.run(60.0)
    kit.recorder_of(scene).close()
    live = [kit.stories_of(scene, f"label-{i}")[0] for i in range(16)]
    held = next(story for story in live if story.waitings)
    lines = tell(held)
    assert lines == tell(from_journal(held.label, tmp_path)[0][0])
    assert lines[0] == f"request {held.request} (x-request-id {held.label}): finished"
    order = [
        "arrived: 100 tokens",
        "held: ",
        "weighed by ",
        "is asked for room",
        "has room; ",
        "placed on ",
        "prefill done on ",
    ]
    at = [
        next(i for i, line in enumerate(lines) if part in line)
        for part in [*order, "joined the batch of", "finished on"]
    ]
    assert at == sorted(at)
    assert any("no decode instance has room (looked at" in line for line in lines)
    assert ", predicted " in lines[at[6]]
    rows = [line for line in lines if "prefill-" in line and "/6" in line]
    assert len(rows) == 3, "each prefill instance is a candidate"
    assert sum(row.strip().startswith(">") for row in rows) == 1


def test_a_refusal_tells_its_costs_and_its_limit(tmp_path: Path) -> None:
    config = ConductorConfig(admission="early", slo=Slo(ttft=0.001, tbt=None))
    scene = kit.recorded_scene(config, tmp_path)
    kit.start(scene)
    scene.request(arrival("r", 200, label="mine"))
    scene.run(1.0)
    kit.recorder_of(scene).close()
    (story,) = from_journal("mine", tmp_path)[0]
    assert story.outcome == "refused"
    assert story.weighings[0].verdict == "refused"
    assert len(story.weighings[0].prefill) == 3
    text = "\n".join(tell(story))
    assert "refused, ttft-slo: the first token is predicted after" in text
    assert "(limits: first token 1.00 ms)" in text


def test_what_is_not_in_the_journal_is_an_error_that_says_where_it_looked(tmp_path: Path) -> None:
    kit.record(ROUGH, tmp_path, requests=5)
    with pytest.raises(JournalError, match=r"the journal in .* has no arrival of 'nobody'"):
        from_journal("nobody", tmp_path)
    done = kit.moonpool_command("explain", "nobody", "--journal", str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("moonpool: the journal in ")
    assert len(done.stderr.splitlines()) == 1
    told = kit.moonpool_command("explain", "label-3", "--journal", str(tmp_path), hash_seed="17")
    assert told.returncode == 0, told.stderr
    assert "request r3 (x-request-id label-3)" in told.stdout
    as_json = kit.moonpool_command("explain", "r3", "--json", "--journal", str(tmp_path))
    assert msgspec.json.decode(as_json.stdout)[0]["request"] == "r3"


def test_a_journal_of_other_code_still_tells_what_was_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kit.record(ROUGH, tmp_path, requests=5)
    (file,) = journal.segments_in(tmp_path)
    origin = journal.read_origin(file)
    other = msgspec.structs.replace(origin, code="0.0.9+0123456789ab")
    file.write_bytes(file.read_bytes().replace(journal.pack(origin), journal.pack(other)))
    (story,) = from_journal("label-3", tmp_path)[0]
    assert story.moments[0].what == "arrived"
    assert any(moment.what == "placed" for moment in story.moments)
    assert not story.weighings
    assert "costs are left out" in capsys.readouterr().err
