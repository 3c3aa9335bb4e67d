"""A journal as a trace: arrivals, lengths and what prompts share; nothing else leaves it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moonpool.command.record import Recording, record
from moonpool.core import events as ev
from moonpool.core.conductor import ConductorConfig
from moonpool.core.vocabulary import PartId, PartKind, RequestId
from moonpool.errors import ConfigError, JournalError
from moonpool.trace.read import TraceFile
from moonpool.trace.request import TraceRequest
from moonpool.wire.journal import Entry, Origin, Segment, segments_in
from tests.core.conductor_scene import SPACE, arrival, worker
from tests.replay.kit import recorded_scene, recorder_of, rough_minute, start


def segment(*events: tuple[float, ev.Event], conductor: str = "c", written_at: float = 1000.0) -> Segment:
    entries = tuple(Entry(at, now, event, b"") for at, (now, event) in enumerate(events))
    return Segment(Path("x"), Origin("", conductor, 1, 1, written_at), None, (), entries, "", True)


def finished(name: str, tokens: int) -> ev.Finished:
    return ev.Finished(RequestId(name), 1, PartId("decode-0"), tokens, "length")


def heard(*segments: Segment, model: str | None = None) -> Recording:
    recording = Recording(model)
    for each in segments:
        recording.offset(each)
    for each in segments:
        recording.take(each)
    return recording


def traced(recording: Recording, block_tokens: int = 16) -> list[TraceRequest]:
    found = recording.space()
    assert found is not None
    return list(recording.requests(found[0], found[1], block_tokens))


REGISTERED = (0.0, worker(PartKind.PREFILL, 0))


def test_arrivals_lengths_and_what_is_shared() -> None:
    requests = traced(
        heard(
            segment(
                REGISTERED,
                (5.0, arrival("a", 40, 8, waited=0.5)),
                (5.5, arrival("b", 64, 30, family="a")),
                (6.0, arrival("c", 64, 30, family="other")),
                (7.0, finished("a", 8)),
                (8.0, finished("b", 25)),
                (9.0, finished("c", 3)),
            )
        )
    )
    assert [(r.arrival, r.input_tokens, r.output_tokens) for r in requests] == [
        (0.0, 40, 8),
        (1.0, 64, 25),
        (1.5, 64, 3),
    ]
    a, b, c = (r.blocks for r in requests)
    assert a[:2] == b[:2]
    assert [len(a), len(b), len(c)] == [3, 4, 4]
    assert a[2] not in b, "what fills no block is its own"
    assert not set(c) & {*a, *b}


def test_further_attempts_repeats_and_other_models_are_no_requests() -> None:
    first = arrival("a", 40, 8)
    again = arrival("a", 43, 5, attempt=2, output_tokens=3)
    recording = heard(segment(REGISTERED, (1.0, first), (1.1, first), (2.0, again), (3.0, finished("a", 8))))
    assert [(r.input_tokens, r.output_tokens) for r in traced(recording)] == [(40, 8)]
    assert not len(heard(segment(REGISTERED, (1.0, first)), model="large"))
    assert heard(segment(REGISTERED, (1.0, first)), model="large").models == {"tiny": 1}


def test_who_has_no_whole_answer_gets_the_usual_one() -> None:
    events = [(1.0, arrival(f"r{at}", 20, 100)) for at in range(3)]
    ends = [(2.0, finished(f"r{at}", 10 * (at + 1))) for at in range(3)]
    lost = [(3.0, arrival("long", 20, 100)), (3.0, arrival("short", 20, 4))]
    recording = heard(segment(REGISTERED, *events, *ends, *lost))
    assert recording.unfinished == 2
    assert [r.output_tokens for r in traced(recording)] == [10, 20, 30, 20, 4]


def test_larger_blocks_are_every_so_many_th_key() -> None:
    recording = heard(
        segment(
            REGISTERED,
            (1.0, arrival("a", 100)),
            (1.0, arrival("b", 130, family="a")),
            (1.0, arrival("c", 31, family="a")),
        )
    )
    a, b, c = (r.blocks for r in traced(recording, 32))
    assert [len(a), len(b), len(c)] == [4, 5, 1]
    assert a[:3] == b[:3]
    assert not set(c) & {*a, *b}


def test_conductors_have_clocks_of_their_own() -> None:
    """The second one begins a minute later and counts from 0; its later segment tells best when that was."""
    one = segment((500.0, worker(PartKind.PREFILL, 0)), (502.0, arrival("a")), written_at=1000.0)
    two = segment((0.4, arrival("b")), conductor="d", written_at=1060.0)
    three = segment((30.0, arrival("c")), conductor="d", written_at=1090.0)
    assert [r.arrival for r in traced(heard(one, two, three))] == pytest.approx([0.0, 58.4, 88.0])


def test_the_size_of_a_block_follows_from_the_prompts() -> None:
    told = heard(segment((1.0, arrival("a", 40)), (1.0, arrival("b", 47)), (1.0, arrival("c", 1000))))
    assert told.space() == (SPACE.id, 16)
    with pytest.raises(JournalError, match="longer part"):
        heard(segment((1.0, arrival("a", 4)))).space()


def test_a_rough_minute_becomes_a_trace_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scene = recorded_scene(ConductorConfig(), tmp_path / "kept", most_bytes=1 << 21)
    rough_minute(scene)
    recorder_of(scene).close()
    assert len(segments_in(tmp_path / "kept")) > 1
    out = tmp_path / "out.jsonl"
    assert record(out, tmp_path / "kept", None, None) == 0
    requests = list(TraceFile(out))
    assert len(requests) == 100
    assert "100 requests in" in capsys.readouterr().out
    assert {r.input_tokens for r in requests} == {20 + 7 * at % 200 for at in range(100)}
    assert all(
        set(json.loads(line)) == {"timestamp", "input_length", "output_length", "hash_ids"}
        for line in out.read_text().splitlines()
    )
    assert record(out, tmp_path / "kept", 64, None) == 0
    assert {len(r.blocks) - -(-r.input_tokens // 64) for r in TraceFile(out)} == {0}


def test_mistakes_are_told(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="no journal in"):
        record(tmp_path / "o", tmp_path, None, None)
    scene = recorded_scene(ConductorConfig(), tmp_path / "kept")
    start(scene)
    scene.request(arrival("a"))
    scene.run(5.0)
    recorder_of(scene).close()
    with pytest.raises(JournalError, match="no requests for large; it has requests for tiny"):
        record(tmp_path / "o", tmp_path / "kept", None, "large")
    with pytest.raises(ConfigError, match="--block-size 24: must be a multiple of the cluster's own, 16 tokens"):
        record(tmp_path / "o", tmp_path / "kept", 24, None)
    (damaged,) = segments_in(tmp_path / "kept")
    damaged.write_bytes(b"nonsense")
    with pytest.raises(JournalError, match="is no journal"):
        record(tmp_path / "o", tmp_path / "kept", None, None)
