"""The experiments of `moonpool paper` that need a cluster: placement (figure 8), overload (§5, table 3, figure 9)."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from moonpool.command.laboratory import Asked, Laboratory, Quest
from moonpool.command.simulate import QUEUE_BOUND
from moonpool.command.workload import Workload
from moonpool.core.admission import ADMISSION_POLICIES, AdmissionPolicy
from moonpool.core.conductor import ConductorConfig
from moonpool.core.placement import PLACEMENT_POLICIES, PlacementPolicy
from moonpool.core.vocabulary import Slo
from moonpool.report.overload import overload_findings, refused
from moonpool.report.paper import Chapter, PaperFigures, placement_findings
from moonpool.report.run import Run
from moonpool.sim.cluster import Setup
from moonpool.sim.estimate import Split, decode_rate, prefill_rate, work_of
from moonpool.sim.profile import Profile
from moonpool.trace.request import TraceRequest

LIMITS = Slo(30.0, 0.1)
"""Of the paper's real workload."""
PLACEMENTS: tuple[PlacementPolicy, ...] = ("random", "load-balance", "cache-aware", "algorithm-1", "kvcache-centric")
"""Those of figure 8, and the default."""
DECODE_SHARE = 8
"""One of so many machines decodes in overload: with as many as prefill, this hardware never lacks any."""
SATURATED_WITHIN, REFUSED_WITHIN = 0.15, 0.08
"""How far from the figure that chooses the load an experiment may be, relative; the figures beside it are measured
there, and say how far off it is."""
MISSED = 0.8
"""Of what could be cached, about what a placement that does not look for it misses: where its search begins."""


class Machines(Struct, frozen=True):
    """What the experiments are done on."""

    profile: Profile
    prefill: int
    decode: int

    @property
    def short_of_decode(self) -> tuple[int, int]:
        """The same machines, but few of them decode."""
        decode = max(min((self.prefill + self.decode) // DECODE_SHARE, self.decode), 1)
        return self.prefill + self.decode - decode, decode

    def setup(self, placement: PlacementPolicy, admission: AdmissionPolicy, scarce: bool = False) -> Setup:
        """`scarce`: with few decode machines."""
        prefill, decode = self.short_of_decode if scarce else (self.prefill, self.decode)
        config = ConductorConfig(placement=placement, admission=admission, slo=LIMITS, queue_bound=QUEUE_BOUND)
        return Setup(self.profile, prefill, decode, config)


class Slices(Struct, frozen=True):
    """What each experiment replays, one workload for each seed; and how to say it."""

    workloads: tuple[Workload, ...]
    requests: Sequence[TraceRequest]
    """Of the first seed's."""
    where: str


def experiments(
    laboratory: Laboratory,
    machines: Machines,
    placement: Slices,
    overload: Slices,
    figures: PaperFigures,
    everything: bool,
) -> list[Chapter]:
    """Both, in one batch, so that each core has something to do. `everything`: also the placements that the paper does
    not know."""
    admissions: list[AdmissionPolicy] = [policy for policy in ADMISSION_POLICIES if policy != "none"]
    first = admissions[0]
    saturated, loaded = laboratory.find_speeds(
        [_saturation(machines, placement, figures), _refusals(machines, overload, first, figures)]
    )
    placements: Sequence[PlacementPolicy] = PLACEMENT_POLICIES if everything else PLACEMENTS
    asked = [
        Asked(_scarce(each), machines.setup("algorithm-1", each, scarce=True), loaded, overload.workloads)
        for each in admissions
    ]
    asked += [Asked(each, machines.setup(each, "none"), saturated, placement.workloads) for each in placements]
    asked.append(Asked("even", machines.setup("algorithm-1", first), loaded, placement.workloads[:1]))
    *found, (even,) = laboratory.runs("placements and admissions", asked)
    admitted = dict(zip(admissions, found, strict=False))
    placed = dict(zip(placements, found[len(admissions) :], strict=True))
    return [
        Chapter(
            "Figure 8: placement",
            f"{placement.where}, {machines.prefill}P+{machines.decode}D, admission none, at {saturated:.2f} times the "
            "speed: there load-balance has about the paper's mean TTFT with the first seed, and that one figure says "
            "nothing",
            placement_findings({str(name): runs for name, runs in placed.items()}, figures),
        ),
        Chapter(
            "§5, table 3 and figure 9: overload",
            _overload_note(machines, overload.where, loaded, even),
            overload_findings({str(name): runs for name, runs in admitted.items()}, figures),
        ),
    ]


def _saturation(machines: Machines, slices: Slices, figures: PaperFigures) -> Quest:
    """It begins where arithmetic sees prefill full without what others have in their caches."""
    profile, split = machines.profile, Split(machines.prefill, machines.decode)
    work = work_of(slices.requests, profile, MISSED)
    return Quest(
        "load-balance",
        machines.setup("load-balance", "none"),
        slices.workloads[0],
        lambda run: run.summary.ttft.mean,
        figures.mean_ttft["load-balance"],
        SATURATED_WITHIN,
        prefill_rate(work, profile, split) * work.seconds / work.requests,
    )


def _refusals(machines: Machines, slices: Slices, admission: AdmissionPolicy, figures: PaperFigures) -> Quest:
    """It begins where arithmetic sees so many too many."""
    profile, split = machines.profile, Split(*machines.short_of_decode)
    work, share = work_of(slices.requests, profile), figures.refused["baseline"] / figures.refused["requests"]
    bound = min(prefill_rate(work, profile, split), decode_rate(work, profile, LIMITS, split))
    return Quest(
        _scarce(admission),
        machines.setup("algorithm-1", admission, scarce=True),
        slices.workloads[0],
        refused,
        share,
        REFUSED_WITHIN,
        bound / (1.0 - share) * work.seconds / work.requests,
    )


def _overload_note(machines: Machines, where: str, speed: float, even: Run) -> str:
    prefill, decode = machines.short_of_decode
    return (
        f"{where}, {prefill}P+{decode}D, placement algorithm-1, limits {LIMITS.ttft:g} s and {LIMITS.tbt:g} s, at "
        f"{speed:.2f} times the speed, where baseline refuses about as many as the paper's, and that one figure says "
        f"nothing. On {machines.prefill}P+{machines.decode}D decode refuses {even.late_refusals} of "
        f"{even.summary.requests} requests at this speed ({refused(even):.1%} are refused in all): policies that look "
        "at decode differ there by chance alone"
    )


def _scarce(admission: AdmissionPolicy) -> str:
    return f"{admission}, few decode"
