"""Looks for the 90 % points of live systems, one after the other, with the simulator's beside each."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence

from msgspec import Struct
from rich.console import Console

from moonpool.bench.cluster import running_cluster
from moonpool.bench.foreseen import Foresight
from moonpool.bench.goodput_figures import Measured
from moonpool.bench.goodput_live import Costs, Probe, probe_cluster
from moonpool.bench.goodput_load import Load
from moonpool.bench.goodput_systems import QUIET, System
from moonpool.bench.ninety import Search
from moonpool.core.vocabulary import Slo
from moonpool.trace.request import TraceRequest

PROBE_LIMITS = 3.0
"""A probe lasts so many times the TTFT limit: in one limit queues take in what would not last."""
SEED_STRIDE = 1000

Ask = Callable[[Sequence[TraceRequest], int], Probe]
"""Sends these, with prompts of this seed."""


class Rules(Struct, frozen=True):
    """How hard each system is looked at."""

    slo: Slo
    """As the live cluster has it."""
    least: int
    """Requests of a probe."""
    probes: int
    """For one seed, at most."""
    step: float
    slow_down: float = 1.0
    """Rates are shown so many times higher: those of the hardware."""
    patience: float = math.inf
    """Seconds of a search after which no third probe begins."""
    longest: float = math.inf
    """Seconds in which a probe's requests come, at most, where they are more than `least`."""
    warming: int = 0
    """Requests that each system has before it is measured."""

    @property
    def span(self) -> tuple[float, int]:
        """Seconds of a probe, and requests at least."""
        assert self.slo.ttft is not None
        return min(PROBE_LIMITS * self.slo.ttft, self.longest), self.least


class Bench:
    """Of one kind of engine: `flags` of `moonpool serve` name it, `foresight` knows what it takes."""

    def __init__(
        self, flags: Sequence[str], rules: Rules, foresight: Foresight, loads: Sequence[Load], console: Console
    ) -> None:
        self._flags = flags
        self._rules = rules
        self._foresight = foresight
        self._loads = loads
        self._console = console

    def cluster(self, system: System, start: float) -> Measured:
        """Live and simulated; the simulator's search begins at `start`. Raises MoonpoolError."""
        measured, rules, profile = Measured(system), self._rules, self._foresight.profile
        for load in self._loads:
            measured.simulated.append(self._foresight.point(system, load, start))
        costs = Costs(profile.prefill, profile.decode)
        with running_cluster(*self._flags, *system.flags(rules.slo), *QUIET) as cluster:

            def ask(requests: Sequence[TraceRequest], seed: int) -> Probe:
                block_tokens = self._loads[0].block_tokens
                where = system.name, cluster, requests, rules.slo, seed, block_tokens, costs
                return asyncio.run(probe_cluster(*where))

            self.look(measured, [found.rate or found.high for found in measured.simulated], ask)
        for load, found, probes in zip(self._loads, measured.live, measured.probes, strict=True):
            requests = load.at(found.low or min(probes), *rules.span)
            measured.foreseen.append(self._foresight.run(system, requests, load.seed))
        return measured

    def look(self, measured: Measured, starts: Sequence[float], ask: Ask) -> None:
        """For each seed's point, from its start on."""
        rules = self._rules
        if rules.warming:
            ask(self._loads[0].at(starts[0], 0.0, rules.warming), SEED_STRIDE - 1)
        for load, start in zip(self._loads, starts, strict=True):
            search, probes = Search(start, rules.step, rules.probes), dict[float, Probe]()
            began = time.monotonic()
            while not search.is_over and not (len(probes) > 1 and time.monotonic() - began > rules.patience):
                requests = load.at(search.rate, *rules.span)
                probes[search.rate] = found = ask(requests, load.seed * SEED_STRIDE + len(probes))
                self._tell(measured.system.name, load, search.rate, found)
                search.tell(found.share)
            measured.live.append(search.found)
            measured.probes.append(probes)

    def _tell(self, name: str, load: Load, rate: float, found: Probe) -> None:
        s = found.run.summary
        self.say(
            f"{name}, seed {load.seed}, {rate * self._rules.slow_down:.2f}/s: {s.attained} of "
            f"{s.requests} attain ({found.share:.1%}); TTFT {s.ttft.p50:.1f}, {s.ttft.p90:.1f} s, slowest tenth "
            f"{s.slowest_tenth.p50 * 1e3:.0f}, {s.slowest_tenth.p90 * 1e3:.0f} ms; machine {found.idle:.0%} idle, "
            + ("" if found.steps is None else f"steps {found.steps:.2f} of the profile's, ")
            + f"sent {found.lag * 1e3:.0f} ms late; of a core: {shares(found)}"
            + (f"; lacking: {found.lacks}" if found.lacks else "")
            + (f"; failed: {found.run.live.errors}" if found.run.live and found.run.live.errors else "")
        )

    def say(self, line: str) -> None:
        self._console.print(line, soft_wrap=True, highlight=False, markup=False)


def shares(found: Probe, least: float = 0.03) -> str:
    """Of the processes that take more than next to nothing."""
    return ", ".join(f"{name} {share:.0%}" for name, share in found.used.shares.items() if share >= least) or "nothing"
