"""The journal of a Conductor: it replays to the byte elsewhere, it is bounded, and what is damaged is said."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from moonpool.command.journal import directory_of
from moonpool.core.admission import ADMISSION_POLICIES
from moonpool.core.conductor import ConductorConfig
from moonpool.core.placement import PLACEMENT_POLICIES
from moonpool.core.vocabulary import Slo
from moonpool.errors import ConfigError, JournalError
from moonpool.wire import journal
from moonpool.wire import recorder as recording
from moonpool.wire.replay import replay, restore
from tests.core.conductor_scene import arrival
from tests.replay import kit

CONFIG = ConductorConfig(slo=Slo(ttft=20.0, tbt=2.0))


def compared(path: Path) -> list[int]:
    """Records of each segment, all decided again as they were."""
    counts = []
    for file in journal.segments_in(path):
        segment = journal.read_segment(file)
        done = replay(segment, restore(segment))
        assert done.difference is None
        assert done.records == len(segment.entries)
        counts.append(done.records)
    return counts


@pytest.mark.parametrize("policy", PLACEMENT_POLICIES)
def test_every_segment_replays_alone_in_another_process_under_another_hash_seed(policy: str, tmp_path: Path) -> None:
    admission = ADMISSION_POLICIES[PLACEMENT_POLICIES.index(policy) % len(ADMISSION_POLICIES)]  # type: ignore[arg-type]
    config = ConductorConfig(placement=policy, admission=admission, slo=Slo(ttft=20.0, tbt=2.0))  # type: ignore[arg-type]
    scene = kit.record(config, tmp_path, most_bytes=1 << 20, requests=75)
    files = journal.segments_in(tmp_path)
    # How many depends on when the writer's thread comes to look.
    assert len(files) >= 2, "the scene makes several segments"
    done = kit.moonpool_command("journal", "replay", str(tmp_path), hash_seed="4711")
    assert done.returncode == 0, done.stdout + done.stderr
    segments = [journal.read_segment(file) for file in files]
    assert all(segment.is_ended and not segment.damage for segment in segments)
    entries = [entry for segment in segments for entry in segment.entries]
    assert [entry.seq for entry in entries] == list(range(1, len(scene.journal) + 1))
    assert [(entry.now, entry.event, entry.actions) for entry in entries] == scene.journal
    for file, segment in zip(files, segments, strict=True):
        assert f"{file.name}: " in done.stdout
        assert f"{len(segment.entries)} of {len(segment.entries)} records" in done.stdout


def test_only_so_many_bytes_are_kept_and_what_is_left_replays(tmp_path: Path) -> None:
    scene = kit.record(CONFIG, tmp_path, most_bytes=300_000)
    files = journal.segments_in(tmp_path)
    assert sum(file.stat().st_size for file in files[:-1]) <= 300_000
    first = journal.read_segment(files[0])
    assert first.origin.number > 1, "older segments are gone"
    assert sum(compared(tmp_path)) == len(scene.journal) - first.origin.seq + 1
    counters = kit.recorder_of(scene).counters()
    assert counters["journal_records"] == len(scene.journal)
    assert counters["journal_dropped"] == 0
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in files)


def test_a_cut_or_damaged_end_is_said_and_what_is_good_replays(tmp_path: Path) -> None:
    kit.record(CONFIG, tmp_path, requests=40)
    (file,) = journal.segments_in(tmp_path)
    whole, data = journal.read_segment(file), file.read_bytes()
    file.write_bytes(data[:-100])
    cut = journal.read_segment(file)
    assert "bytes are cut off" in cut.damage
    assert not cut.is_ended
    assert len(whole.entries) - 3 <= len(cut.entries) < len(whole.entries)
    assert compared(file) == [len(cut.entries)]
    at = len(data) * 2 // 3
    file.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    flipped = journal.read_segment(file)
    assert "the checksum at byte" in flipped.damage or "cut off" in flipped.damage
    assert flipped.entries == whole.entries[: len(flipped.entries)]
    assert 0 < len(flipped.entries) < len(whole.entries)
    done = kit.moonpool_command("journal", "replay", str(file))
    assert done.returncode == 0
    assert "not read: " in done.stdout


def test_what_is_no_journal_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="no journal in"):
        journal.segments_in(tmp_path)
    file = tmp_path / "x.journal"
    for content, said in ((b"", "does not begin with"), (b"hello" * 9, "does not begin"), (journal.MAGIC, "cut off")):
        file.write_bytes(content)
        with pytest.raises(JournalError, match=said):
            journal.read_segment(file)
    done = kit.moonpool_command("journal", "replay", str(file))
    assert done.returncode == 2
    assert done.stderr.startswith("moonpool: ")
    assert len(done.stderr.splitlines()) == 1


def test_a_segment_that_ends_within_its_snapshot_does_not_replay(tmp_path: Path) -> None:
    kit.record(CONFIG, tmp_path, requests=40)
    (file,) = journal.segments_in(tmp_path)
    data = file.read_bytes()
    origin = journal.pack(journal.read_origin(file))
    file.write_bytes(data[: len(journal.MAGIC) + len(origin) + 500])
    segment = journal.read_segment(file)
    with pytest.raises(JournalError, match=r"does not replay alone: the last .* bytes are cut off"):
        restore(segment)


def test_a_journal_of_other_code_says_so(tmp_path: Path) -> None:
    kit.record(CONFIG, tmp_path, requests=40)
    (file,) = journal.segments_in(tmp_path)
    data = file.read_bytes()
    origin = journal.read_origin(file)
    other = msgspec.structs.replace(origin, code="0.0.9+0123456789ab")
    file.write_bytes(data.replace(journal.pack(origin), journal.pack(other)))
    segment = journal.read_segment(file)
    with pytest.raises(JournalError, match=r"written by version 0\.0\.9\+0123456789ab, this is .*--anyway"):
        restore(segment)
    assert replay(segment, restore(segment, anyway=True)).difference is None


def test_the_first_difference_is_shown(tmp_path: Path) -> None:
    kit.record(CONFIG, tmp_path, requests=40)
    (file,) = journal.segments_in(tmp_path)
    segment = journal.read_segment(file)
    at = next(i for i, entry in enumerate(segment.entries) if "Place" in str(entry.actions))
    forged = msgspec.structs.replace(segment.entries[at], recorded=journal.encode_actions(()))
    entries = (*segment.entries[:at], forged, *segment.entries[at + 1 :])
    done = replay(msgspec.structs.replace(segment, entries=entries), restore(segment))
    assert done.difference is not None
    assert done.difference.seq == forged.seq
    assert done.difference.recorded == "[]"
    assert "Place" in done.difference.replayed


def test_a_slow_disk_costs_records_and_a_new_segment_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "MOST_WAITING", 40)
    scene = kit.recorded_scene(CONFIG, tmp_path)
    writer = kit.recorder_of(scene)._writer
    write, blocked = writer._write, [True]

    def slow(batch: list[recording._Item]) -> None:
        while blocked[0] and not any(isinstance(item, recording._End) for item in batch):
            writer.bell.wait(0.01)
        write(batch)

    monkeypatch.setattr(writer, "_write", slow)
    kit.start(scene)
    for i in range(30):
        scene.request(arrival(f"r{i}"))
        scene.run(0.2)
    assert kit.recorder_of(scene).counters()["journal_dropped"] > 100
    blocked[0] = False
    until = len(scene.journal) + 100_000
    while writer._queue and until:
        until -= 1
        writer.bell.wait(0.01)
    scene.run(20.0)
    kit.recorder_of(scene).close()
    segments = [journal.read_segment(file) for file in journal.segments_in(tmp_path)]
    assert len(segments) >= 2
    assert segments[0].origin.dropped == 0
    assert segments[-1].origin.dropped > 0
    for before, after in pairwise(segments):
        gap = after.origin.seq - (before.origin.seq + len(before.entries))
        assert gap == after.origin.dropped - before.origin.dropped
    assert sum(compared(tmp_path)) + kit.recorder_of(scene).counters()["journal_dropped"] == len(scene.journal)


def test_a_disk_that_refuses_is_tried_again_and_nothing_else_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(recording, "RETRY_SECONDS", 0.0)
    directory = tmp_path / "journal"
    directory.write_text("a file where the directory should be")
    scene = kit.recorded_scene(CONFIG, directory)
    recorder = kit.recorder_of(scene)
    while not recorder._writer.failed:
        recorder._writer.bell.wait(0.01)
    kit.start(scene)
    assert any("is not written" in record.getMessage() for record in caplog.records)
    directory.unlink()
    for i in range(30):
        scene.request(arrival(f"r{i}"))
        scene.run(0.2)
        recorder._writer.bell.wait(0.01)
    recorder.close()
    assert recorder.counters()["journal_records"] > 0
    assert compared(directory)


def test_what_a_journal_cannot_keep_turns_it_off_and_not_the_conductor(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scene = kit.recorded_scene(CONFIG, tmp_path)
    recorder = kit.recorder_of(scene)
    recorder._core.later = iter(())  # type: ignore[attr-defined]
    recorder._begin()
    kit.start(scene)
    recorder.close()
    assert any("there is no journal: moonpool.core.conductor:Conductor.later" in r.getMessage() for r in caplog.records)


def test_where_the_journal_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONPOOL_HOME", str(tmp_path))
    assert directory_of("off") is None
    assert directory_of(None) == tmp_path / "journal"
    assert directory_of(str(tmp_path / "a" / "b")) == tmp_path / "a" / "b"
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--journal .*file: cannot make this directory: .*give another, or `off`"):
        directory_of(str(tmp_path / "file"))


RECORD = """
import sys
from pathlib import Path
from tests.replay import kit
from moonpool.core.conductor import ConductorConfig
kit.record(ConductorConfig(), Path(sys.argv[1]), requests=40)
"""
SMUGGLED_CLOCK = """

import time as _time
_honest = Conductor.handle


def _handle(self, event, now):
    return _honest(self, event, now + 1e-9 * (_time.perf_counter_ns() % 1_000_000))


Conductor.handle = _handle
"""
RANDOM_TIE_BREAK = """

from msgspec import structs as _structs
_honest = place


def place(policy, view, wanted, rng, threshold):
    least = min(view.prefill, key=lambda p: (p.queue_seconds, hash(p.id)))
    return _honest(policy, _structs.replace(view, prefill=type(view.prefill)([least])), wanted, rng, threshold)
"""


@pytest.mark.parametrize(
    ("module", "sabotage"),
    [("conductor.py", SMUGGLED_CLOCK), ("placement.py", RANDOM_TIE_BREAK), ("conductor.py", "")],
    ids=["a smuggled clock", "a tie broken by hash", "none"],
)
def test_a_replay_tells_of_a_core_that_is_not_pure(module: str, sabotage: str, tmp_path: Path) -> None:
    """Recorded and replayed by one and the same code, a copy of this one with a fault in it."""
    source = tmp_path / "src"
    shutil.copytree(kit.SOURCE / "moonpool", source / "moonpool", ignore=shutil.ignore_patterns("__pycache__"))
    with (source / "moonpool" / "core" / module).open("a") as file:
        file.write(sabotage)
    env = os.environ | {"PYTHONHASHSEED": "1", "PYTHONPATH": f"{source}:{kit.ROOT}"}
    command = [sys.executable, "-c", RECORD, str(tmp_path / "journal")]
    subprocess.run(command, env=env, check=True, timeout=120, cwd=tmp_path)
    seeds = [
        kit.moonpool_command("journal", "replay", str(tmp_path / "journal"), hash_seed=s, source=source) for s in "234"
    ]
    if not sabotage:
        assert [done.returncode for done in seeds] == [0, 0, 0], seeds
        return
    # A hash may break ties as the recording did by chance, but not under every seed.
    told = [done for done in seeds if done.returncode == 1]
    assert told, [done.stdout for done in seeds]
    assert "DIFFERENT at record" in told[0].stdout
    assert "recorded" in told[0].stdout
