"""A scene whose Conductor keeps a journal, and `moonpool journal replay` in other processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import moonpool
from moonpool.core.actions import Action
from moonpool.core.conductor import Conductor, ConductorConfig
from moonpool.core.events import Event
from moonpool.core.vocabulary import PartId, PartKind
from moonpool.wire.recorder import JournalConfig, Recorder
from moonpool.wire.story import Stories, Story
from tests.core.conductor_scene import Odds, Scene, arrival, gateway, node, worker

ROUGH = Odds(0.15, 0.03, 0.05, 0.05, 0.2, 0.1, 0.1)
SOURCE = Path(moonpool.__file__).parents[1]
ROOT = Path(__file__).parents[2]


class Recorded:
    """A Conductor as a scene drives it, with a recorder beside it."""

    def __init__(self, core: Conductor, recorder: Recorder) -> None:
        self.core = core
        self.recorder = recorder
        self.stories = Stories()

    def handle(self, event: Event, now: float) -> tuple[Action, ...]:
        actions = self.core.handle(event, now)
        self.recorder.record(now, event, actions)
        self.stories.note(now, event, actions)
        return actions

    def check_integrity(self) -> None:
        self.core.check_integrity()


def recorded_scene(config: ConductorConfig, directory: Path, most_bytes: int = 1 << 28, seed: int = 5) -> Scene:
    scene = Scene(seed, config, ROUGH)
    recorder = Recorder(JournalConfig(directory, most_bytes), config, scene.conductor, "abcdef0123456789")
    scene.conductor = Recorded(scene.conductor, recorder)  # type: ignore[assignment]
    return scene


def recorder_of(scene: Scene) -> Recorder:
    recorded: Recorded = scene.conductor  # type: ignore[assignment]
    return recorded.recorder


def stories_of(scene: Scene, name: str) -> list[Story]:
    """As the live cluster would tell them."""
    recorded: Recorded = scene.conductor  # type: ignore[assignment]
    return recorded.stories.find(name, recorded.core)


def start(scene: Scene) -> None:
    scene.start(gateway())
    for i in range(3):
        scene.start(node(i))
        for kind in (PartKind.PREFILL, PartKind.DECODE):
            scene.start(worker(kind, i, on=i, pages=24, slots=4))


def rough_minute(scene: Scene, requests: int = 100) -> None:
    """Failures, deaths, restarts, cancelled requests."""
    start(scene)
    for i in range(requests):
        scene.request(arrival(f"r{i}", 20 + 7 * i % 200, 1 + i % 40, family=f"f{i % 7}", label=f"label-{i}"))
        scene.run(0.15)
        if i % 40 == 10:
            scene.kill(PartId(f"decode-{i % 3}"))
        if i % 40 == 20:
            scene.start(worker(PartKind.DECODE, (i - 10) % 3, on=(i - 10) % 3, life=i, pages=24, slots=4))
        if i == 55:
            scene.kill(PartId("node-1"))
        if i == 65:
            scene.start(node(1, life=2))
        if i % 9 == 0:
            scene.cancel(arrival(f"r{i // 2}").request)
    scene.run(10.0)


def record(config: ConductorConfig, directory: Path, most_bytes: int = 1 << 28, requests: int = 100) -> Scene:
    scene = recorded_scene(config, directory, most_bytes)
    rough_minute(scene, requests)
    recorder_of(scene).close()
    return scene


def moonpool_command(*arguments: str, hash_seed: str = "0", source: Path = SOURCE) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "moonpool", *arguments],
        env=os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
        timeout=120,
    )
