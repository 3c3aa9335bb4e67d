"""The supervisor, over real processes whose work is nothing (`fake_part.py`)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from moonpool.core.vocabulary import PartId
from moonpool.errors import ConfigError, MoonpoolError
from moonpool.live.supervisor import STARTS, PartPlan, Progress, Supervisor

FAKE = Path(__file__).with_name("fake_part.py")
TOKEN = "a token of this very test"
GUARD_SECONDS = 30.0


class Fleet:
    """Plans of fake parts, their notes, and what the supervisor told the user."""

    def __init__(self, directory: Path, **behaviours: str) -> None:
        self.directory = directory
        self.shown: list[Progress] = []
        self.stop_seconds = 0.0
        front = PartId("front")
        plans = [self._plan("front", behaviours.pop("front", "conductor"), conducts=True)]
        for name, behaviour in behaviours.items():
            node = PartId("node") if name != "node" and "node" in behaviours else None
            plans.append(self._plan(name, behaviour, after=(front, node) if node else (front,), ends_with=node))
        self.supervisor = Supervisor(plans, TOKEN, [], self.shown.append, (sys.executable, str(FAKE)))

    def _plan(self, name: str, behaviour: str, **more: object) -> PartPlan:
        return PartPlan(PartId(name), (behaviour, str(self.directory / name)), **more)  # type: ignore[arg-type]

    def lives(self, name: str) -> list[dict[str, object]]:
        file = self.directory / name
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def pid(self, name: str) -> int:
        return int(str(self.lives(name)[-1]["pid"]))

    def pids(self) -> list[int]:
        return [
            int(str(life["pid"]))
            for file in self.directory.iterdir()
            for life in self.lives(file.name)
            if "pid" in life
        ]

    def states(self, name: str) -> list[str]:
        return [progress.state for progress in self.shown if progress.part == name]


@contextlib.asynccontextmanager
async def running(fleet: Fleet) -> AsyncIterator[asyncio.Task[None]]:
    """All parts up; everything ended when the block is left."""
    task = asyncio.create_task(fleet.supervisor.run())
    try:
        async with asyncio.timeout(GUARD_SECONDS):
            await fleet.supervisor.all_up()
            yield task
    finally:
        began = time.monotonic()
        fleet.supervisor.stop()
        with contextlib.suppress(MoonpoolError):
            await asyncio.wait_for(task, GUARD_SECONDS)
        fleet.stop_seconds = time.monotonic() - began


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(GUARD_SECONDS):
        while True:
            if holds():
                return
            await asyncio.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_parts_start_in_order_and_stop_promptly(tmp_path: Path) -> None:
    async def scenario() -> None:
        fleet = Fleet(tmp_path, node="good", worker="good")
        async with running(fleet):
            up = [progress.part for progress in fleet.shown if progress.state == "up"]
            assert up == ["front", "node", "worker"]
            address = next(p.detail for p in fleet.shown if p.part == "front" and p.state == "up")
            assert fleet.lives("worker")[0]["arguments"] == ["--conductor", address]
            assert fleet.lives("worker")[0]["token"] == TOKEN
            pids = fleet.pids()
        assert fleet.stop_seconds < 3
        assert not [pid for pid in pids if is_running(pid)]

    asyncio.run(scenario())


def test_parts_end_before_what_they_stand_on(tmp_path: Path) -> None:
    async def scenario() -> None:
        fleet = Fleet(tmp_path, node="good", worker="slow")
        async with running(fleet):
            pass
        assert json.loads((tmp_path / "worker.left").read_text()) == {"node_runs": True}
        assert not is_running(fleet.pid("node"))

    asyncio.run(scenario())


def test_a_killed_part_comes_back_and_the_conductor_hears_of_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        fleet = Fleet(tmp_path, worker="good")
        async with running(fleet):
            os.kill(fleet.pid("worker"), signal.SIGKILL)
            await until(lambda: fleet.states("worker").count("up") == 2)
            await until(lambda: bool(fleet.lives("front.lost")))
        lost = fleet.lives("front.lost")[0]
        assert (lost["id"], lost["reason"]) == ("worker", "signal SIGKILL")
        assert lost["incarnation"]
        assert [life["restart"] for life in fleet.lives("worker")] == ["", "1"], "it is told that it was up before"

    asyncio.run(scenario())


def test_a_nodes_death_takes_its_workers_along_and_all_come_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        fleet = Fleet(tmp_path, node="good", worker="good")
        async with running(fleet):
            worker = fleet.pid("worker")
            os.kill(fleet.pid("node"), signal.SIGKILL)
            await until(lambda: fleet.states("worker").count("up") == 2)
            assert not is_running(worker)
            order = [(p.part, p.state) for p in fleet.shown if p.state == "up"]
            assert order[-2:] == [("node", "up"), ("worker", "up")]
            assert len(fleet.lives("front")) == 1

    asyncio.run(scenario())


@pytest.mark.parametrize("behaviour", ["coming", "clinging"])
def test_a_worker_that_ends_with_its_node_has_not_failed(tmp_path: Path, behaviour: str) -> None:
    async def scenario() -> None:
        fleet = Fleet(tmp_path, node="good", worker=behaviour)
        run = asyncio.create_task(fleet.supervisor.run())

        async def began(times: int) -> None:
            await until(lambda: len(fleet.lives("worker")) == times or run.done())
            assert not run.done()

        for times in range(1, STARTS + 1):
            await began(times)
            os.kill(fleet.pid("node"), signal.SIGKILL)
        await began(STARTS + 1)
        reasons = {
            progress.detail for progress in fleet.shown if (progress.part, progress.state) == ("worker", "ended")
        }
        assert reasons == {"it ends with node"}
        fleet.supervisor.stop()
        async with asyncio.timeout(GUARD_SECONDS):
            await run

    asyncio.run(scenario())


def test_what_a_part_does_before_it_is_up_is_shown(tmp_path: Path) -> None:
    async def scenario() -> None:
        fleet = Fleet(tmp_path, worker="telling")
        async with running(fleet):
            shown = [(p.state, p.detail) for p in fleet.shown if p.part == "worker"]
        assert [state for state, _ in shown] == ["starting", "starting", "up"]
        assert shown[1] == ("starting", "reading a long index")

    asyncio.run(scenario())


def test_a_conductor_comes_back_at_its_old_address(tmp_path: Path) -> None:
    async def scenario() -> None:
        fleet = Fleet(tmp_path, worker="good")
        async with running(fleet):
            os.kill(fleet.pid("front"), signal.SIGKILL)
            await until(lambda: fleet.states("front").count("up") == 2)
            addresses = {p.detail for p in fleet.shown if p.part == "front" and p.state == "up"}
            assert len(addresses) == 1
            assert len(fleet.lives("worker")) == 1

    asyncio.run(scenario())


def test_a_users_mistake_in_a_part_ends_everything_with_its_line(tmp_path: Path) -> None:
    async def scenario() -> None:
        fleet = Fleet(tmp_path, node="good", worker="mistake")
        with pytest.raises(ConfigError, match="the key `colour` is unknown"):
            await asyncio.wait_for(fleet.supervisor.run(), GUARD_SECONDS)
        assert len(fleet.lives("worker")) == 1
        assert not [pid for pid in fleet.pids() if is_running(pid)]

    asyncio.run(scenario())


def test_a_part_that_never_comes_up_is_given_up(tmp_path: Path) -> None:
    async def scenario() -> None:
        fleet = Fleet(tmp_path, worker="crash")
        with pytest.raises(MoonpoolError, match="worker did not come up in 3 attempts: RuntimeError: boom"):
            await asyncio.wait_for(fleet.supervisor.run(), GUARD_SECONDS)
        assert len(fleet.lives("worker")) == 3
        assert not [pid for pid in fleet.pids() if is_running(pid)]

    asyncio.run(scenario())


def test_a_part_that_exits_after_coming_up_is_started_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        fleet = Fleet(tmp_path, worker="once")
        async with running(fleet):
            await until(lambda: fleet.states("worker") == ["starting", "up", "ended", "starting", "up"])

    asyncio.run(scenario())


@pytest.mark.parametrize("behaviour", ["deaf", "stuck"])
def test_a_part_that_does_not_obey_is_killed_in_time(tmp_path: Path, behaviour: str) -> None:
    async def scenario() -> None:
        fleet = Fleet(tmp_path, worker=behaviour)
        async with running(fleet):
            await asyncio.sleep(0.5)
            pids = fleet.pids()
        assert 1 < fleet.stop_seconds < 5
        assert not [pid for pid in pids if is_running(pid)]

    asyncio.run(scenario())


@pytest.mark.parametrize("behaviour", ["good", "deaf", "stuck"])
def test_children_end_by_themselves_when_the_supervisor_is_killed(tmp_path: Path, behaviour: str) -> None:
    script = (
        "import asyncio, sys; from pathlib import Path; sys.path.insert(0, sys.argv[1]); import test_supervisor as t\n"
        "asyncio.run(t.Fleet(Path(sys.argv[2]), worker=sys.argv[3]).supervisor.run())"
    )
    notes = tmp_path / "notes"
    notes.mkdir()
    command = [sys.executable, "-c", script, str(FAKE.parent), str(notes), behaviour]
    with (tmp_path / "log").open("wb") as log:
        supervisor = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        fleet = Fleet(notes)
        asyncio.run(until(lambda: bool(fleet.lives("worker"))))
        time.sleep(0.5)
        pids = fleet.pids()
        assert len(pids) == 2
        assert all(is_running(pid) for pid in pids)
    finally:
        supervisor.kill()
        supervisor.wait(GUARD_SECONDS)
    began = time.monotonic()
    asyncio.run(until(lambda: not [pid for pid in pids if is_running(pid)]))
    assert time.monotonic() - began < 5
