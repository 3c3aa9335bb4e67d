"""Experiments of `moonpool paper`: one trace on one hardware, a slice of it for each seed; no run is made twice."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from moonpool.command.elsewhere import Task
from moonpool.command.processes import Runners
from moonpool.command.workload import Workload
from moonpool.report.aim import Aim
from moonpool.report.run import Run
from moonpool.sim.cluster import Setup
from moonpool.trace.request import TraceRequest


class Asked(msgspec.Struct, frozen=True):
    """Runs of one setup at one speed, one for each seed."""

    name: str
    """Of its own: runs of equal names and speeds are one."""
    setup: Setup
    speed: float
    workloads: tuple[Workload, ...]
    """Of the first so many seeds."""


class Quest(msgspec.Struct, frozen=True):
    """For the speed at which a figure of a setup's run has a wanted value."""

    name: str
    setup: Setup
    workload: Workload
    """Of the first seed."""
    figure: Callable[[Run], float]
    wanted: float
    tolerance: float
    start: float


def slices(
    source: str, requests: Sequence[TraceRequest], count: int, size: int | None, jitter: float
) -> tuple[Workload, ...]:
    """`count` slices of `size` requests, evenly spread over the trace from its first request to its last one.

    `requests`: of the trace, in order of arrival. `size`: None: all of it each time.
    """
    if size is None or size >= len(requests):
        return (Workload(source, first=len(requests), jitter=jitter),) * count
    last = len(requests) - size
    begins = [requests[last * at // max(count - 1, 1)].arrival - requests[0].arrival for at in range(count)]
    return tuple([Workload(source, first=size, begin=begin, jitter=jitter) for begin in begins])


class Watch:
    """What is being done: bars on a terminal, a line for each step where there is none."""

    def __init__(self, console: Console) -> None:
        shown = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        self._console = console
        self._progress = Progress(*shown, console=console, transient=True, disable=not console.is_terminal)
        self._bar = self._progress.add_task("", total=None)
        self._began = time.monotonic()

    def __enter__(self) -> Watch:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def step(self, what: str, total: int | None = None) -> None:
        """`total`: requests to be simulated."""
        self._progress.reset(self._bar, description=what, total=total)
        if not self._console.is_terminal:
            self._console.print(f"{time.monotonic() - self._began:6.1f} s  {what}", markup=False, soft_wrap=True)

    def over(self, requests: int) -> None:
        self._progress.update(self._bar, completed=requests)


class Laboratory:
    def __init__(self, seeds: Sequence[int], runners: Runners, watch: Watch) -> None:
        self.seeds = tuple(seeds)
        self._runners = runners
        self._watch = watch
        self._known: dict[tuple[str, float, int], Run] = {}

    def find_speeds(self, quests: Sequence[Quest]) -> list[float]:
        """By the first seed, all searched side by side."""
        aims = [Aim(quest.wanted, quest.tolerance, quest.start) for quest in quests]
        looks = 0
        while open_ := [(quest, aim) for quest, aim in zip(quests, aims, strict=True) if not aim.is_over]:
            looks += 1
            asked = [Asked(quest.name, quest.setup, aim.speed, (quest.workload,)) for quest, aim in open_]
            at = ", ".join(f"{each.name} at {each.speed:.2f}" for each in asked)
            for (quest, aim), (run,) in zip(open_, self.runs(f"loads, look {looks}: {at}", asked), strict=True):
                aim.tell(quest.figure(run))
        return [aim.found for aim in aims]

    def runs(self, what: str, asked: Sequence[Asked]) -> list[list[Run]]:
        """Of each in order of the seeds. `what`: is shown meanwhile."""
        new = [
            (each, seed)
            for each in asked
            for seed in range(len(each.workloads))
            if (each.name, each.speed, seed) not in self._known
        ]
        tasks = [
            Task(
                each.name,
                each.workloads[seed],
                msgspec.structs.replace(each.setup, seed=self.seeds[seed]),
                each.speed,
            )
            for each, seed in new
        ]
        self._watch.step(what, sum(each.workloads[seed].first or 0 for each, seed in new))
        done = [0] * len(tasks)

        def told(at: int, over: int) -> None:
            done[at] = over
            self._watch.over(sum(done))

        for (each, seed), said in zip(new, self._runners.run(tasks, told), strict=True):
            if said.run is not None:
                self._known[each.name, each.speed, seed] = said.run
        return [[self._known[each.name, each.speed, seed] for seed in range(len(each.workloads))] for each in asked]
