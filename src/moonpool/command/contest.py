"""Contenders for goodput: each one's 90 % point, and runs of all of them at given rates, on several cores."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from moonpool.command.elsewhere import Said, Task
from moonpool.command.processes import Runners
from moonpool.command.workload import Workload
from moonpool.report.goodput import WANTED_SHARE, Search
from moonpool.report.run import Run
from moonpool.sim.cluster import Setup
from moonpool.sim.trial import Goal

COARSE, FINE = 0.05, 0.003
"""Tolerances of the first look, with one seed, and of the second, with all of them."""
FINE_STRIDE = 1.03
"""The second look begins at what the first one found."""

Told = Callable[[str, float], None]
"""What is done now, and the share of all of it that is over."""


class Contender(msgspec.Struct, frozen=True):
    name: str
    setup: Setup


class Point(msgspec.Struct, frozen=True):
    """Where 90 % of what is offered attain."""

    speed: float
    tolerance: float
    runs: tuple[Run, ...] = ()
    """There, one a seed."""


class Contest:
    """Keeps the runs that it has made."""

    def __init__(self, workload: Workload, seeds: Sequence[int], runners: Runners, told: Told) -> None:
        self._workload = workload
        self._seeds = tuple(seeds)
        self._runners = runners
        self._told = told
        self._known: dict[tuple[str, float], tuple[Run, ...]] = {}

    def coarse(self, contenders: Sequence[Contender], start: float) -> dict[str, Point]:
        """All of them with the first seed, side by side; a run ends when it is certain whether enough attain."""
        searches = {each.name: Search(start, tolerance=COARSE) for each in contenders}
        rounds = 0
        while any(not search.is_over for search in searches.values()):
            open_ = [each for each in contenders if not searches[each.name].is_over]
            rounds += 1
            what = f"90 % points, look {rounds}: {len(open_)} of {len(contenders)}"
            tasks = [self._trial(each, searches[each.name].speed) for each in open_]
            for each, said in zip(open_, self._run(what, tasks), strict=True):
                searches[each.name].tell(1.0 if said.trial is not None and said.trial.passes else 0.0)
        # Where not even the slowest did there is no point; the lowest looked at stands for it.
        return {name: Point(search.found or search.speed, COARSE) for name, search in searches.items()}

    def fine(self, contenders: Sequence[Contender], coarse: dict[str, Point]) -> dict[str, Point]:
        """Again by the mean over all seeds."""
        searches = {
            each.name: Search(coarse[each.name].speed, tolerance=FINE, stride=FINE_STRIDE) for each in contenders
        }
        rounds = 0
        while any(not search.is_over for search in searches.values()):
            open_ = [each for each in contenders if not searches[each.name].is_over]
            rounds += 1
            speeds = [searches[each.name].speed for each in open_]
            self._play(f"90 % points, closer look {rounds}: {len(open_)}", list(zip(open_, speeds, strict=True)))
            for each, speed in zip(open_, speeds, strict=True):
                searches[each.name].tell(_attained(self._known[each.name, speed]))
        points = {}
        for name, search in searches.items():
            speed = search.found or coarse[name].speed
            points[name] = Point(speed, FINE, self._known[name, speed])
        return points

    def at(self, contenders: Sequence[Contender], speeds: Sequence[float], what: str) -> list[tuple[Run, ...]]:
        """With every seed, each contender at its speed."""
        wanted = list(zip(contenders, speeds, strict=True))
        self._play(what, wanted)
        return [self._known[each.name, speed] for each, speed in wanted]

    def _play(self, what: str, wanted: Sequence[tuple[Contender, float]]) -> None:
        new = [(each, speed) for each, speed in wanted if (each.name, speed) not in self._known]
        tasks = [self._task(each, speed, seed) for each, speed in new for seed in self._seeds]
        runs = [said.run for said in self._run(what, tasks) if said.run is not None]
        size = len(self._seeds)
        for at, (each, speed) in enumerate(new):
            self._known[each.name, speed] = tuple(runs[at * size : (at + 1) * size])

    def _task(self, each: Contender, speed: float, seed: int) -> Task:
        return Task(each.name, self._workload, msgspec.structs.replace(each.setup, seed=seed), speed)

    def _trial(self, each: Contender, speed: float) -> Task:
        goal = Goal(each.setup.conductor.slo, WANTED_SHARE)
        return msgspec.structs.replace(self._task(each, speed, self._seeds[0]), goal=goal)

    def _run(self, what: str, tasks: Sequence[Task]) -> list[Said]:
        done = [0] * len(tasks)
        count = max(len(tasks), 1)

        def told(at: int, over: int) -> None:
            done[at] = over
            self._told(what, sum(done) / count)

        self._told(what, 0.0)
        return self._runners.run(tasks, told)


def _attained(runs: Sequence[Run]) -> float:
    return sum(run.summary.attained / run.summary.requests for run in runs) / len(runs)
