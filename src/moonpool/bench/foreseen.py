"""What the simulator says of the clusters that `make bench-goodput` measures, for the same requests.

The one place where a benchmark runs the simulator: its prediction stands beside what was measured.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from moonpool.bench.goodput_load import Load
from moonpool.bench.goodput_systems import Coupled, Pools, Scale, System
from moonpool.bench.ninety import Found, Search
from moonpool.core.conductor import ConductorConfig
from moonpool.core.vocabulary import Slo
from moonpool.errors import MoonpoolError
from moonpool.report.run import Run
from moonpool.sim.cluster import Setup
from moonpool.sim.coupled_cluster import CoupledSetup, run_coupled
from moonpool.sim.profile import Profile, load_profile, scaled
from moonpool.sim.run import run
from moonpool.trace.request import TraceRequest

STEP = 1.04
MOST = 40
PLAN_SECONDS = 900.0


class Foresight:
    """Of one kind of hardware under one pair of limits, both as the live cluster has them."""

    def __init__(self, profile: Profile, slo: Slo, probe_seconds: float, least: int) -> None:
        self.profile = profile
        self._slo = slo
        self._span = probe_seconds, least

    def run(self, system: System, requests: Sequence[TraceRequest], seed: int) -> Run:
        name = f"{system.name}, simulated"
        if isinstance(system, Pools):
            rules = ConductorConfig(slo=self._slo, queue_bound=1 << 20)
            return run(name, Setup(self.profile, system.prefill, system.decode, rules, seed=seed), requests)
        setup = CoupledSetup(
            self.profile, system.workers, system.mode, system.chunk, system.routing, slo=self._slo, seed=seed
        )
        return run_coupled(name, setup, requests)

    def point(self, system: System, load: Load, start: float) -> Found:
        """Its 90 % point, looked for from `start` on."""
        search = Search(start, STEP, MOST)
        while not search.is_over:
            summary = self.run(system, load.at(search.rate, *self._span), load.seed).summary
            search.tell(summary.attained / summary.requests)
        return search.found

    def tuned(self, workers: int, load: Load, start: float, chunks: Sequence[int]) -> tuple[Coupled, dict[int, float]]:
        """The best of these chunks behind a router that knows prefixes, and the 90 % point of each."""
        among = [Coupled(workers, "chunked", chunk, "prefix-affine") for chunk in chunks]
        points = {each.chunk: self.point(each, load, start).rate for each in among}
        return max(among, key=lambda each: points[each.chunk]), points


def timed_profile(scale: Scale) -> Profile:
    """What the timed engine is. Raises ConfigError for an unknown profile."""
    return scaled(load_profile(scale.hardware), scale.slow_down, scale.shrink_kv)


def prefill_rate(profile: Profile, load: Load, machines: int) -> float:
    """Requests a second that half of the machines bear which do nothing but prefill, hits left out."""
    cost, tokens = profile.prefill, [request.input_tokens for request in load.requests]
    seconds = sum(cost.fixed + cost.per_token * n + cost.per_token_squared * n * n for n in tokens) / len(tokens)
    return machines / 2 / seconds


def planned(trace: Path, shape: Sequence[str], hardware: str, slo: Slo, machines: int) -> Pools:
    """The split that `moonpool plan` finds. `shape`: flags of what is sent; `slo`: of the hardware itself.

    Raises MoonpoolError where it finds none.
    """
    limits = f"ttft={slo.ttft:g}s,tbt={slo.tbt:g}s"
    command = [sys.executable, "-P", "-m", "moonpool", "plan", "--trace", str(trace), *shape, "--slo", limits]
    command += ["--nodes", str(machines), "--hardware", hardware, "--pipelines", "1", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PLAN_SECONDS)
    if done.returncode:
        raise MoonpoolError(f"{' '.join(command[3:])} ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    best = json.loads(done.stdout)["best"]
    return Pools(best["prefill"], best["decode"])
