"""What a Conductor decided, another process decides again to the byte, under any PYTHONHASHSEED."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from msgspec import Struct

import moonpool
from moonpool.core.actions import Action
from moonpool.core.conductor import ConductorConfig
from moonpool.core.events import Event
from moonpool.core.vocabulary import PartId, PartKind, Slo
from tests.core.conductor_scene import Odds, Scene, arrival, gateway, node, worker

SEED = 5


class Entry(Struct, frozen=True):
    now: float
    event: Event
    actions: tuple[Action, ...]


REPLAY = """
import sys
from pathlib import Path
import msgspec
from msgspec import Struct
from moonpool.core.actions import Action
from moonpool.core.conductor import Conductor, ConductorConfig
from moonpool.core.events import Event

class Entry(Struct, frozen=True):
    now: float
    event: Event
    actions: tuple[Action, ...]

folder, seed = Path(sys.argv[1]), int(sys.argv[2])
config = msgspec.msgpack.decode((folder / "config").read_bytes(), type=ConductorConfig)
journal = msgspec.msgpack.decode((folder / "journal").read_bytes(), type=tuple[Entry, ...])
conductor = Conductor(config, seed)
for i, entry in enumerate(journal):
    actions = conductor.handle(entry.event, entry.now)
    if msgspec.msgpack.encode(actions) != msgspec.msgpack.encode(entry.actions):
        sys.exit(f"entry {i}: {entry.event!r} gave {actions!r}, recorded {entry.actions!r}")
sys.stdout.buffer.write(msgspec.json.encode(conductor.describe(journal[-1].now)))
"""


def record(config: ConductorConfig) -> Scene:
    """A rough minute in a small cluster: failures, deaths, restarts, cancelled requests."""
    scene = Scene(SEED, config, Odds(0.15, 0.03, 0.05, 0.05, 0.2, 0.1, 0.1))
    scene.start(gateway())
    for i in range(3):
        scene.start(node(i))
        for kind in (PartKind.PREFILL, PartKind.DECODE):
            scene.start(worker(kind, i, on=i, pages=24, slots=4))
    for i in range(150):
        scene.request(arrival(f"r{i}", 20 + 7 * i % 200, 1 + i % 40, family=f"f{i % 7}"))
        scene.run(0.15)
        if i % 40 == 10:
            scene.kill(PartId(f"decode-{i % 3}"))
        if i % 40 == 20:
            scene.start(worker(PartKind.DECODE, (i - 10) % 3, on=(i - 10) % 3, life=i, pages=24, slots=4))
        if i == 75:
            scene.kill(PartId("node-1"))
        if i == 85:
            scene.start(node(1, life=2))
            for kind in (PartKind.PREFILL, PartKind.DECODE):
                scene.start(worker(kind, 1, on=1, life=i, pages=24, slots=4))
        if i % 9 == 0:
            scene.cancel(arrival(f"r{i // 2}").request)
    scene.run(20.0)
    return scene


def replay(folder: Path, hash_seed: str, seed: int = SEED) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-c", REPLAY, str(folder), str(seed)],
        env={"PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(Path(moonpool.__file__).parents[1])},
        capture_output=True,
        timeout=120,
    )


@pytest.mark.parametrize("policy", ["random", "kvcache-centric"])
def test_what_was_decided_is_decided_again_in_other_processes(policy: str, tmp_path: Path) -> None:
    config = ConductorConfig(placement=policy, slo=Slo(ttft=2.0, tbt=0.5))  # type: ignore[arg-type]
    scene = record(config)
    kinds = {type(action).__name__ for _, _, actions in scene.journal for action in actions}
    assert kinds >= {"Place", "Reject", "Hold", "Resubmit", "Cancel", "ReserveRoom", "ReleaseRoom", "FleetChanged"}
    (tmp_path / "config").write_bytes(msgspec.msgpack.encode(config))
    journal = tuple(Entry(*entry) for entry in scene.journal)
    (tmp_path / "journal").write_bytes(msgspec.msgpack.encode(journal))
    results = [replay(tmp_path, hash_seed) for hash_seed in ("0", "4711")]
    for result in results:
        assert result.returncode == 0, result.stderr.decode()
    now = scene.journal[-1][0]
    assert {r.stdout for r in results} == {msgspec.json.encode(scene.conductor.describe(now))}


def test_another_seed_gives_other_decisions(tmp_path: Path) -> None:
    """The comparison above can fail."""
    config = ConductorConfig(placement="random")
    (tmp_path / "config").write_bytes(msgspec.msgpack.encode(config))
    journal = tuple(Entry(*entry) for entry in record(config).journal)
    (tmp_path / "journal").write_bytes(msgspec.msgpack.encode(journal))
    result = replay(tmp_path, "0", SEED + 1)
    assert result.returncode == 1
    assert b"recorded" in result.stderr
