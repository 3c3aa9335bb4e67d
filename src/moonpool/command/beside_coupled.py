"""The chapters of `moonpool paper --coupled`: separate pools beside coupled workers (PAPER §6, figures 11 to 13).

Each configuration is asked for its highest rate three times: within the TTFT limit alone, and within both limits with
either definition of TBT. All searches go on side by side; a run ends when it is certain whether enough attain.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.status import Status

from moonpool.command.elsewhere import Task
from moonpool.command.processes import Runners
from moonpool.command.workload import Traffic, Workload
from moonpool.core.conductor import ConductorConfig
from moonpool.core.coupled import CoupledMode
from moonpool.core.vocabulary import Slo
from moonpool.report.coupled import CRITERIA, Borne, coupled_findings
from moonpool.report.paper import Chapter, PaperFigures
from moonpool.sim.bracket import Bracket
from moonpool.sim.cluster import Setup
from moonpool.sim.coupled_cluster import ROUTINGS, CoupledSetup
from moonpool.sim.estimate import Split, Work, decode_rate, prefill_rate, splits, work_of
from moonpool.sim.planner import Ask, plan
from moonpool.sim.profile import Profile
from moonpool.sim.trial import Goal, Trial
from moonpool.sim.unservable import idle_step, idle_ttft, with_cached

REAL = Slo(30.0, 0.1)
"""The paper's limits for its real workload."""
REAL_MACHINES = 20
TTFT_TIMES, TBT_TIMES = 10.0, 5.0
"""The paper's limits elsewhere: so many times what an idle cluster takes, at the P90."""
LENGTHS = (16, 32, 64, 128)
"""Thousand tokens of the paper's simulated prompts."""
CHUNKS = (256, 512, 2048)
QUEUE_BOUND = 1 << 20
SIMULATED_REQUESTS = 800
"""Fewer overstate what coupled workers bear (PAPER §9)."""
LEAST_BEGINNING = 1500
"""Requests on which the planner corrects its arithmetic: at what so many machines bear, several TTFT limits."""


class Contender(msgspec.Struct, frozen=True):
    name: str
    setup: Setup | CoupledSetup


def coupled_chapters(
    trace: Path, profile: Profile, figures: PaperFigures, first: int | None, jobs: int
) -> list[Chapter]:
    """`first`: only so many requests of the trace, and of the simulated data. Raises ConfigError or TraceError."""
    with Runners(jobs) as runners, Console(stderr=True).status("") as status:
        arena = _Arena(runners, profile, status)
        return [
            arena.real(Workload(str(trace), first=first), figures),
            *(
                arena.simulated(length, min(first or SIMULATED_REQUESTS, SIMULATED_REQUESTS), figures)
                for length in LENGTHS
            ),
        ]


class _Arena:
    def __init__(self, runners: Runners, profile: Profile, status: Status) -> None:
        self._runners = runners
        self._profile = profile
        self._status = status

    def real(self, workload: Workload, figures: PaperFigures) -> Chapter:
        requests = list(Traffic(workload, self._profile.block_tokens).requests())
        work = work_of(requests, self._profile)
        best = self._planned(workload, work, REAL)
        half = Split(REAL_MACHINES // 2, REAL_MACHINES // 2)
        separate = [Contender(split.name, self._separate(split, REAL)) for split in dict.fromkeys((half, best))]
        coupled = self._coupled(REAL_MACHINES, REAL)
        theirs = {each.name: f"{figures.coupled.real_gain:+.0%}" for each in coupled if "prefill-first" in each.name}
        found = self._borne([*separate, *coupled], workload, work, REAL)
        return Chapter(
            f"Figure 13: {REAL_MACHINES} machines, separate or coupled",
            f"{Path(workload.source).name}, {len(requests)} requests, at several speeds; TTFT 30 s, TBT 0.1 s; "
            f"{best.name} is what `moonpool plan` finds for {REAL_MACHINES} machines; rates in requests a second "
            f"({' · '.join(CRITERIA)}); the paper's vLLM is prefill-first",
            coupled_findings(found[: len(separate)], found[len(separate) :], theirs),
        )

    def simulated(self, thousands: int, count: int, figures: PaperFigures) -> Chapter:
        workload = Workload(f"synthetic:paper-{thousands}k?n={count}&rate=1")
        requests = list(Traffic(workload, self._profile.block_tokens).requests())
        pairs = list(with_cached(requests, self._profile.block_tokens))
        ttft = np.quantile([idle_ttft(each.input_tokens, cached, self._profile) for each, cached in pairs], 0.9)
        step = np.quantile([idle_step(each, self._profile) for each in requests], 0.9)
        slo = Slo(round(TTFT_TIMES * float(ttft), 3), round(TBT_TIMES * float(step), 4))
        separate = [Contender(s.name, self._separate(s, slo)) for s in (Split(3, 1), Split(2, 2))]
        alone = CoupledSetup(self._profile, 4, "one-at-a-time", 0, "round-robin", slo=slo)
        coupled = [Contender("coupled one-at-a-time round-robin", alone), *self._coupled(4, slo)]
        mine, other = figures.coupled.simulated[str(thousands)]
        theirs = {separate[0].name: f"{mine:g}", coupled[0].name: f"{other:g} ({mine / other - 1:+.0%})"}
        found = self._borne([*separate, *coupled], workload, work_of(requests, self._profile), slo)
        return Chapter(
            f"Figure 12: simulated data, {thousands}k tokens, 4 machines",
            f"{count} requests, Poisson, half of each prompt cached; TTFT {slo.ttft:g} s, TBT {slo.tbt:g} s "
            f"({TTFT_TIMES:g} and {TBT_TIMES:g} times the idle cluster's); rates in requests a second "
            f"({' · '.join(CRITERIA)}); the paper's are of a coarse grid, on TTFT alone",
            coupled_findings(found[: len(separate)], found[len(separate) :], theirs),
        )

    def _separate(self, split: Split, slo: Slo) -> Setup:
        config = ConductorConfig(slo=slo, queue_bound=QUEUE_BOUND)
        return Setup(self._profile, split.prefill, split.decode, config, pipeline=split.pipeline)

    def _coupled(self, machines: int, slo: Slo) -> list[Contender]:
        ways: list[tuple[CoupledMode, int]] = [("prefill-first", 0), *(("chunked", chunk) for chunk in CHUNKS)]
        return [
            Contender(
                f"coupled {mode} {chunk or ''} {routing}".replace("  ", " "),
                CoupledSetup(self._profile, machines, mode, chunk, routing, slo=slo),
            )
            for mode, chunk in ways
            for routing in ROUTINGS
        ]

    def _planned(self, workload: Workload, work: Work, slo: Slo) -> Split:
        """On all of these requests: they are few enough."""

        def bounds(split: Split, whole: bool) -> tuple[float, float]:
            rate = work.requests / work.seconds
            return prefill_rate(work, self._profile, split) / rate, decode_rate(work, self._profile, slo, split) / rate

        def look(asks: Sequence[Ask]) -> list[Trial]:
            self._status.update(escape(", ".join(f"{ask.split.name} at {ask.speed:.2f}" for ask in asks)))
            first = max(work.requests // 8, LEAST_BEGINNING)
            return self._try(
                [
                    Task(
                        "", workload, self._separate(ask.split, slo), ask.speed, None if ask.whole else first, Goal(slo)
                    )
                    for ask in asks
                ]
            )

        return plan(splits(REAL_MACHINES, (1,)), bounds, look).best.split

    def _borne(self, contenders: Sequence[Contender], workload: Workload, work: Work, slo: Slo) -> list[Borne]:
        goals = [Goal(Slo(slo.ttft)), Goal(slo), Goal(slo, interval="p90")]
        start = self._start(contenders[0], work, slo)
        brackets = {(at, goal): Bracket(start) for at in range(len(contenders)) for goal in range(len(goals))}
        while open_ := [key for key, bracket in brackets.items() if not bracket.is_over]:
            self._status.update(f"{Path(workload.source).name}: {len(open_)} searches go on")
            tasks = []
            for at, goal in open_:
                setup = _within(contenders[at].setup, goals[goal].slo)
                tasks.append(Task("", workload, setup, brackets[at, goal].speed, None, goals[goal]))
            for key, trial in zip(open_, self._try(tasks), strict=True):
                brackets[key].tell(trial)
        own = work.requests / work.seconds
        return [
            Borne(each.name, tuple(own * brackets[at, goal].best_speed for goal in range(len(goals))))
            for at, each in enumerate(contenders)
        ]

    def _start(self, first: Contender, work: Work, slo: Slo) -> float:
        setup = first.setup
        assert isinstance(setup, Setup)
        split = Split(setup.prefill, setup.decode, setup.pipeline)
        rates = prefill_rate(work, self._profile, split), decode_rate(work, self._profile, slo, split)
        return min(rates) * work.seconds / work.requests

    def _try(self, tasks: Sequence[Task]) -> list[Trial]:
        return [said.trial for said in self._runners.run(tasks) if said.trial is not None]


def _within(setup: Setup | CoupledSetup, slo: Slo) -> Setup | CoupledSetup:
    """What admits looks at the limits that are asked for, and no others."""
    if isinstance(setup, CoupledSetup):
        return setup
    return msgspec.structs.replace(setup, conductor=msgspec.structs.replace(setup.conductor, slo=slo))
