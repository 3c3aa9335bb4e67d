"""The part of `make bench-goodput` on the timed engine: eight machines, whose steps take what a GPU profile says.

So many times slower that a few cores can carry all processes; KV shrinks alike and moves as real bytes.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct
from rich.console import Console

from moonpool.bench.foreseen import Foresight, planned, prefill_rate, timed_profile
from moonpool.bench.goodput_bench import Bench, Rules
from moonpool.bench.goodput_figures import Results, bars, show
from moonpool.bench.goodput_load import loads
from moonpool.bench.goodput_systems import Pools, Scale, systems
from moonpool.bench.result import Bar
from moonpool.core.vocabulary import Slo

PLANNED_REQUESTS = 2000
"""The beginning of the trace, from which `moonpool plan` finds the split."""
STEP = 1.12
CHUNKS = (256, 512, 1024, 2048)


class Plan(Struct, frozen=True):
    """What is measured, and how hard."""

    machines: int
    scale: Scale
    slo: Slo
    """Of the hardware itself."""
    scale_input: float
    scale_output: float
    requests: int
    """Of a slice, at most."""
    least: int
    """Of a probe."""
    probes: int
    """Of one seed of a system, at most."""

    @property
    def rules(self) -> Rules:
        return Rules(self.scale.slower(self.slo), self.least, self.probes, STEP, self.scale.slow_down)

    @property
    def shape(self) -> list[str]:
        """As flags of `moonpool plan`, of the trace's beginning."""
        flags = ["--first", str(PLANNED_REQUESTS), "--jitter", "3"]
        return [*flags, "--scale-input", f"{self.scale_input:g}", "--scale-output", f"{self.scale_output:g}"]


FULL = Plan(8, Scale("a800-llama2-70b", 3.0, 2560.0), Slo(10.0, 0.1), 1.0, 0.25, 400, 60, 3)
QUICK = Plan(2, Scale("a800-llama2-70b", 1.0, 2560.0), Slo(2.0, 0.1), 0.25, 0.25, 40, 8, 1)


def measure(options: argparse.Namespace, console: Console) -> list[Bar]:
    """Raises MoonpoolError."""
    plan = QUICK if options.quick else FULL
    trace = None if options.quick else options.trace
    rules = plan.rules
    foresight = Foresight(timed_profile(plan.scale), rules.slo, *rules.span)
    slices = loads(trace, options.seeds, plan.requests, plan.scale_input, plan.scale_output)
    bench = Bench(plan.scale.flags, rules, foresight, slices, console)
    split = Pools(*options.split) if options.split else _planned(trace, plan, console)
    chosen = "given" if options.split else "found by `moonpool plan`" if trace is not None else "half and half"
    facts = [*_facts(plan, options), f"split {chosen}: {split.name}"]
    for fact in facts:
        bench.say(fact)
    half = Pools(plan.machines // 2, plan.machines - plan.machines // 2)
    results = Results(half=half, planned=split)
    with contextlib.suppress(KeyboardInterrupt):
        start = foresight.point(split, slices[0], prefill_rate(foresight.profile, slices[0], plan.machines)).rate
        results.tuned, points = foresight.tuned(plan.machines, slices[0], start, CHUNKS)
        told = ", ".join(f"{chunk}: {rate * rules.slow_down:.2f}" for chunk, rate in points.items())
        bench.say(
            f"chunks of coupled workers, prefix-affine, simulated 90 % points (requests/s of the hardware): {told}"
        )
        for system in systems(plan.machines, split, results.tuned):
            results.measured.append(bench.cluster(system, start))
    show(results, rules.slow_down, options.out, facts, console)
    return bars(results)


def _planned(trace: Path | None, plan: Plan, console: Console) -> Pools:
    if trace is None:
        return Pools(plan.machines // 2, plan.machines - plan.machines // 2)
    with console.status("moonpool plan"):
        return planned(trace, plan.shape, plan.scale.hardware, plan.slo, plan.machines)


def _facts(plan: Plan, options: argparse.Namespace) -> Sequence[str]:
    source = "synthetic sessions" if options.quick else options.trace.name
    live, span = plan.rules.slo, plan.rules.span
    return [
        f"{plan.machines} machines of {plan.scale.hardware}, {plan.scale.slow_down:g} times slower, KV 1/"
        f"{plan.scale.shrink_kv:g}; limits TTFT {plan.slo.ttft:g} s, TBT {plan.slo.tbt:g} s of the hardware: "
        f"{live.ttft:g} s and {live.tbt:g} s live",
        f"slices of {source}, prompts x {plan.scale_input:g}, answers x {plan.scale_output:g}, "
        f"seeds {', '.join(map(str, options.seeds))}; a probe lasts {span[0]:.0f} s and has {plan.least} requests "
        f"at least, {plan.requests} at most",
        "links of the live cluster are this machine's: they have no limit of their own",
    ]
