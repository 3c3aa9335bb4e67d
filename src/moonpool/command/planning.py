"""The searches behind `moonpool plan`: trials of splits of so many machines, and of sizes of their DRAM."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from moonpool.command.choices import numbers, some_of
from moonpool.command.elsewhere import Task
from moonpool.command.processes import Runners
from moonpool.command.workload import Workload
from moonpool.core.admission import ADMISSION_POLICIES
from moonpool.core.conductor import ConductorConfig
from moonpool.core.placement import PLACEMENT_POLICIES
from moonpool.core.vocabulary import Slo
from moonpool.errors import ConfigError
from moonpool.report.frontier import NEARLY, Capacity, Compared, How, Point, tokens
from moonpool.report.run import Run
from moonpool.sim.cluster import Setup
from moonpool.sim.estimate import Split, decode_rate, prefill_rate, splits, work_of
from moonpool.sim.planner import Ask, Measured, Planned, exhaustive
from moonpool.sim.profile import Profile
from moonpool.sim.trial import Goal, Trial
from moonpool.sim.unservable import idle_step, idle_ttft, with_cached
from moonpool.trace.hits import hit_ratios, load
from moonpool.trace.request import TraceRequest

QUEUE_BOUND = 1 << 20
"""Limits alone refuse, as in `moonpool simulate`."""
BEGINNING = 8
"""The trace's beginning is so much shorter than the trace."""
LEAST_BEGINNING = 500
"""Requests; fewer would tell too little."""
LEAST_LIMITS = 4
"""The beginning lasts for so many times the TTFT limit at the rate that arithmetic expects: what comes within one limit
waits in the queues, and attains, however much it is."""
DRAM_SIZES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 2)
"""Of the hardware's own."""


class Wanted(msgspec.Struct, frozen=True):
    """The command line."""

    workload: Workload
    slo: str
    nodes: int
    hardware: str
    pipelines: str
    dram: str | None
    placement: str
    admission: str
    seed: int
    exhaustive: bool
    out: Path | None
    html: Path | None
    as_json: bool
    jobs: int


class Planner:
    """One trace on so many machines of one kind."""

    def __init__(
        self, wanted: Wanted, profile: Profile, slo: Slo, requests: Sequence[TraceRequest], runners: Runners
    ) -> None:
        """Raises ConfigError where not even idle machines could do."""
        self.goal = Goal(slo)
        self._wanted = wanted
        self._profile = profile
        self._requests = requests
        self._runners = runners
        self._seen: dict[tuple[Split, float, int | None], Trial] = {}
        if requests[-1].arrival <= requests[0].arrival:
            raise ConfigError(f"{wanted.workload.source}: all requests come at one time, so there is no rate to find")
        sizes = numbers("--pipelines", wanted.pipelines, 1)
        self.among = splits(wanted.nodes, _able(sizes, requests, profile, self.goal, wanted.nodes))
        self._work = {True: work_of(requests, profile)}
        expected = max(self._rate(min(self.bounds(split, True))) for split in self.among)
        least = max(len(requests) // BEGINNING, LEAST_BEGINNING, int(LEAST_LIMITS * expected * (slo.ttft or 0.0)))
        self._first = min(least, len(requests))
        self._work[False] = work_of(requests[: self._first], profile)
        (placement,) = some_of("--placement", wanted.placement, PLACEMENT_POLICIES)[:1]
        (admission,) = some_of("--admission", wanted.admission, ADMISSION_POLICIES)[:1]
        self._config = ConductorConfig(placement=placement, admission=admission, slo=slo, queue_bound=QUEUE_BOUND)

    def bounds(self, split: Split, whole: bool) -> tuple[float, float]:
        work, slo = self._work[whole], self.goal.slo
        rate = work.requests / work.seconds
        return prefill_rate(work, self._profile, split) / rate, decode_rate(work, self._profile, slo, split) / rate

    def look(self, asks: Sequence[Ask]) -> list[Trial]:
        """What was looked at before costs nothing: the beginning of a short trace is all of it."""
        whole = asks[0].whole
        first = None if whole or self._first == len(self._requests) else self._first
        new = [ask for ask in asks if (ask.split, ask.speed, first) not in self._seen]
        tasks = [self._task(ask.split, ask.speed, self._profile, first) for ask in new]
        trials = self._try(tasks, "on the whole trace" if whole else "on its beginning") if new else []
        found = {(ask.split, ask.speed, first): trial for ask, trial in zip(new, trials, strict=True)}
        for key, trial in found.items():
            self._seen[key] = msgspec.structs.replace(trial, simulated=0)
        keys = [(ask.split, ask.speed, first) for ask in asks]
        return [found.get(key) or self._seen[key] for key in keys]

    def _task(self, split: Split, speed: float, profile: Profile, first: int | None = None) -> Task:
        setup = Setup(
            profile, split.prefill, split.decode, self._config, seed=self._wanted.seed, pipeline=split.pipeline
        )
        return Task(split.name, self._wanted.workload, setup, self._wanted.workload.speed * speed, first, self.goal)

    def _try(self, tasks: Sequence[Task], where: str) -> list[Trial]:
        shown = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        total = sum(task.first or len(self._requests) for task in tasks)
        names = ", ".join(f"{task.name} at {task.speed:.2f}" for task in tasks[:3])
        more = f" and {len(tasks) - 3} more" if len(tasks) > 3 else ""
        console = Console(stderr=True)
        with Progress(*shown, console=console, transient=True, disable=not console.is_terminal) as progress:
            bar = progress.add_task(escape(f"{where}: {names}{more}"), total=total)
            over = [0] * len(tasks)

            def told(at: int, done: int) -> None:
                progress.advance(bar, done - over[at])
                over[at] = done

            said = self._runners.run(tasks, told)
        return [each.trial for each in said if each.trial is not None]

    def run(self, best: Measured) -> Run:
        task = msgspec.structs.replace(self._task(best.split, best.speed, self._profile), goal=None)
        (said,) = self._runners.run([task])
        assert said.run is not None
        return said.run

    def compare(self) -> Compared:
        """Every split on the whole trace."""
        began, simulated = time.perf_counter(), 0

        def look(asks: Sequence[Ask]) -> list[Trial]:
            nonlocal simulated
            trials = self.look(asks)
            simulated += sum(trial.simulated for trial in trials)
            return trials

        self._seen.clear()
        best = max(exhaustive(self.among, self.bounds, look), key=lambda each: each.speed)
        return Compared(best.split.name, self._rate(best.speed), simulated, time.perf_counter() - began)

    def _rate(self, speed: float) -> float:
        work = self._work[True]
        return speed * work.requests / work.seconds

    # The frontier

    def point(self, split: Split, planned: Planned) -> Point:
        """What is known of a split, best first: measured, bounded, seen on the beginning, by arithmetic."""
        prefill, decode = planned.bounds[split]
        measured = {each.split: each for each in planned.measured}.get(split)
        how: How = "beginning" if any(each.split == split for each in planned.beginnings) else "arithmetic"
        speed, limit = min(prefill, decode), "decode" if decode < prefill else "prefill"
        loads = speed / prefill, speed / decode
        goodput = self._rate(speed) * self.goal.share
        if measured is not None:
            limit = measured.limit
            trial = measured.best or measured.beyond
            assert trial is not None
            loads = trial.prefill_busy, trial.decode_load
            if measured.best is not None:
                how, speed, goodput = "whole trace", measured.speed, trial.goodput
            else:
                how, speed = "no more", min(measured.beyond_speed, speed)
                goodput = self._rate(speed) * self.goal.share
        return Point(
            split.name,
            split.prefill,
            split.decode,
            split.pipeline,
            how,
            speed,
            self._rate(speed),
            goodput,
            *loads,
            limit,
        )

    # DRAM

    def capacities(self, best: Measured) -> tuple[tuple[Capacity, ...], int | None]:
        """Each size with what is cached, and the least that bears nearly as much, found by halving; and whether more
        than the hardware's own would bear more."""
        profile = self._profile
        sizes = self._sizes()
        if not any(request.blocks for request in self._requests):
            return (), None
        blocks = [size * self._wanted.nodes // profile.block_tokens for size in sizes]
        ratios = hit_ratios(load(self._requests, profile.block_tokens), [("lru", count) for count in blocks])
        tried: dict[int, tuple[float, bool]] = {profile.dram_tokens: (best.speed, True)}
        less = [size for size in sizes if size < profile.dram_tokens]
        low, high = -1, len(less)
        while high - low > 1:
            middle = (low + high) // 2
            attains = self._with_dram(best, NEARLY * best.speed, less[middle])
            tried[less[middle]] = NEARLY * best.speed, attains
            low, high = (low, middle) if attains else (middle, high)
        for size in sizes[-1:]:
            if size > profile.dram_tokens:
                tried[size] = best.speed / NEARLY, self._with_dram(best, best.speed / NEARLY, size)
        enough = less[high] if high < len(less) else profile.dram_tokens
        found = []
        for size, ratio in zip(sizes, ratios, strict=True):
            speed, attains = tried.get(size, (None, False))
            found.append(Capacity(size, ratio.by_token, None if speed is None else self._rate(speed), attains))
        return tuple(found), enough

    def _sizes(self) -> list[int]:
        profile = self._profile
        if self._wanted.dram is None:
            sizes = {int(profile.dram_tokens * share) for share in DRAM_SIZES}
        else:
            sizes = {*_token_counts(self._wanted.dram), profile.dram_tokens}
        return sorted(size for size in sizes if size >= profile.block_tokens)

    def _with_dram(self, best: Measured, speed: float, dram_tokens: int) -> bool:
        profile = msgspec.structs.replace(self._profile, dram_tokens=dram_tokens)
        (trial,) = self._try([self._task(best.split, speed, profile)], f"with DRAM for {tokens(dram_tokens)} tokens")
        return trial.passes


def _able(
    pipelines: Sequence[int], requests: Sequence[TraceRequest], profile: Profile, goal: Goal, nodes: int
) -> list[int]:
    """The sizes with which an idle cluster could do. Raises ConfigError where none could."""
    slo, missing = goal.slo, 1.0 - goal.share
    fitting = [size for size in pipelines if size < nodes and size <= profile.layers]
    if not fitting:
        raise ConfigError(
            f"--pipelines {', '.join(map(str, pipelines))}: none leaves a machine of {nodes} to decode and divides "
            f"{profile.layers} layers"
        )
    if slo.tbt is not None:
        steps = np.asarray([idle_step(request, profile) for request in requests])
        if (late := float((steps > slo.tbt).mean())) > missing:
            least = float(np.quantile(steps, goal.share, method="higher"))
            raise ConfigError(
                f"--slo: {late:.0%} of the requests have steps of more than {slo.tbt:g} s even alone on an idle "
                f"machine, and {missing:.0%} may miss; the least limit on tbt that can be kept is {least:.3g} s"
            )
    if slo.ttft is None:
        return fitting
    cached = list(with_cached(requests, profile.block_tokens))
    able, least = [], float("inf")
    for size in fitting:
        times = np.asarray([idle_ttft(request.input_tokens, found, profile, size) for request, found in cached])
        least = min(least, float(np.quantile(times, goal.share, method="higher")))
        if float((times > slo.ttft).mean()) <= missing:
            able.append(size)
    if not able:
        raise ConfigError(
            f"--slo: more than {missing:.0%} of the requests take longer than {slo.ttft:g} s to their first token "
            f"even on an idle cluster; the least limit on ttft that can be kept is {least:.3g} s, with pipelines of "
            f"{', '.join(map(str, fitting))}"
        )
    return able


def _token_counts(text: str) -> list[int]:
    """`500k,3M`. Raises ConfigError."""
    found = []
    for word in text.split(","):
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([kM]?)", word.strip())
        if match is None or float(match[1]) == 0:
            raise ConfigError(f"--dram {word!r}: must be tokens a machine, as in 500k,1M,3M")
        found.append(int(float(match[1]) * {"": 1, "k": 1000, "M": 1_000_000}[match[2]]))
    return found
