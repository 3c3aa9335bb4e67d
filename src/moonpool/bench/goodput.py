"""`make bench-goodput`: requests within their limits, live: separate pools around one KVCache beside coupled workers.

Clusters of the same number of machines, one after the other on the same cores: `moonpool serve` on the timed engine,
whose steps take what a GPU profile says, so many times slower that a few cores can carry all processes; KV shrinks
alike and moves as real bytes. The load is a slice of the conversation trace, open loop. Limits are fixed beforehand,
the same for all. Beside each 90 % point stands what the simulator says for the same requests.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct
from rich.console import Console

from moonpool.bench.cluster import running_cluster
from moonpool.bench.foreseen import Foresight, planned
from moonpool.bench.goodput_figures import (
    Measured,
    Results,
    bars,
    errors_table,
    points_table,
    write_reports,
)
from moonpool.bench.goodput_live import Costs, Probe, probe
from moonpool.bench.goodput_load import Load, loads
from moonpool.bench.goodput_systems import Pools, Scale, System, serve_flags, systems
from moonpool.bench.ninety import Search
from moonpool.bench.result import Bar, print_result
from moonpool.core.vocabulary import Slo
from moonpool.errors import MoonpoolError
from moonpool.interrupts import heed_interrupts

TRACE = Path("../shared/traces/conversation_trace.jsonl")
"""Beside the checkout."""
PLANNED_REQUESTS = 2000
"""The beginning of the trace, from which `moonpool plan` finds the split."""
PROBE_LIMITS = 3.0
"""A probe lasts so many times the TTFT limit: in one limit queues take in what would not last."""
STEP = 1.12
SEED_STRIDE = 1000


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
    def live_slo(self) -> Slo:
        return self.scale.slower(self.slo)

    @property
    def span(self) -> tuple[float, int]:
        """Seconds of a probe, and requests at least."""
        assert self.live_slo.ttft is not None
        return PROBE_LIMITS * self.live_slo.ttft, self.least

    @property
    def shape(self) -> list[str]:
        """As flags of `moonpool plan`, of the trace's beginning."""
        flags = ["--first", str(PLANNED_REQUESTS), "--jitter", "3"]
        return [*flags, "--scale-input", f"{self.scale_input:g}", "--scale-output", f"{self.scale_output:g}"]


FULL = Plan(8, Scale("a800-llama2-70b", 3.0, 2560.0), Slo(10.0, 0.1), 1.0, 0.25, 400, 60, 3)
QUICK = Plan(2, Scale("a800-llama2-70b", 1.0, 2560.0), Slo(2.0, 0.1), 0.25, 0.25, 40, 8, 1)


class Bench:
    def __init__(self, plan: Plan, loads: Sequence[Load], console: Console) -> None:
        self._plan = plan
        self._loads = loads
        self._console = console
        self._foresight = Foresight(plan.scale, plan.live_slo, *plan.span)
        self.results = Results(half=Pools(plan.machines // 2, plan.machines - plan.machines // 2))

    def run(self, split: Pools) -> None:
        """`split`, half and half, and coupled workers. Raises MoonpoolError."""
        results, plan = self.results, self._plan
        results.planned = split
        start = self._foresight.point(split, self._loads[0], self._guess()).rate
        results.tuned, points = self._foresight.tuned(plan.machines, self._loads[0], start)
        told = ", ".join(f"{chunk}: {rate * plan.scale.slow_down:.2f}" for chunk, rate in points.items())
        self._say(
            f"chunks of coupled workers, prefix-affine, simulated 90 % points (requests/s of the hardware): {told}"
        )
        for system in systems(plan.machines, split, results.tuned):
            results.measured.append(self._measure(system, start))

    def _guess(self) -> float:
        """Requests a second that machines bear which do nothing but prefill, hits left out."""
        requests = self._loads[0].requests
        cost = self._foresight.profile.prefill
        tokens = [request.input_tokens for request in requests]
        seconds = sum(cost.per_token * n + cost.per_token_squared * n * n for n in tokens) / len(tokens)
        return self._plan.machines / 2 / seconds

    def _measure(self, system: System, start: float) -> Measured:
        measured, plan = Measured(system), self._plan
        for load in self._loads:
            measured.simulated.append(self._foresight.point(system, load, start))
        with running_cluster(*serve_flags(system, plan.scale, plan.live_slo)) as cluster:
            for load, foreseen in zip(self._loads, measured.simulated, strict=True):
                search, probes = Search(foreseen.rate or foreseen.high, STEP, plan.probes), dict[float, Probe]()
                while not search.is_over:
                    seed = load.seed * SEED_STRIDE + len(probes)
                    requests = load.at(search.rate, *plan.span)
                    costs = Costs(self._foresight.profile.prefill, self._foresight.profile.decode)
                    found = asyncio.run(probe(system.name, cluster, requests, plan.live_slo, seed, costs))
                    probes[search.rate] = found
                    self._tell(system, load, search.rate, found)
                    search.tell(found.share)
                measured.live.append(search.found)
                measured.probes.append(probes)
                at = search.found.low or min(probes)
                measured.foreseen.append(self._foresight.run(system, load.at(at, *plan.span), load.seed))
        return measured

    def _tell(self, system: System, load: Load, rate: float, found: Probe) -> None:
        s = found.run.summary
        self._say(
            f"{system.name}, seed {load.seed}, {rate * self._plan.scale.slow_down:.2f}/s: {s.attained} of "
            f"{s.requests} attain ({found.share:.1%}); TTFT {s.ttft.p50:.1f}, {s.ttft.p90:.1f} s, slowest tenth "
            f"{s.slowest_tenth.p50 * 1e3:.0f}, {s.slowest_tenth.p90 * 1e3:.0f} ms; machine {found.idle:.0%} idle, "
            f"steps {found.steps:.2f} of the profile's, sent {found.lag * 1e3:.0f} ms late"
            + (f"; lacking: {found.lacks}" if found.lacks else "")
            + (f"; failed: {found.run.live.errors}" if found.run.live and found.run.live.errors else "")
        )

    def _say(self, line: str) -> None:
        self._console.print(line, soft_wrap=True, highlight=False, markup=False)


def main() -> int:
    """The exit status."""
    began = time.monotonic()
    heed_interrupts()
    options, console = _options(), Console(width=170)
    if not options.quick and not options.trace.is_file():
        lack = f"there is no trace {options.trace}: give --trace conversation_trace.jsonl, or --quick"
        console.print(f"left out: {lack}", soft_wrap=True)
        print_result(bars(Results(), lack))
        return 0
    try:
        found = _measured(options, console)
    except KeyboardInterrupt:
        return 130
    except MoonpoolError as e:
        console.print(f"moonpool: {e}", soft_wrap=True, markup=False)
        return 1
    print_result(found, seeds=options.seeds, minutes=round((time.monotonic() - began) / 60, 1))
    return 0


def _measured(options: argparse.Namespace, console: Console) -> list[Bar]:
    plan = QUICK if options.quick else FULL
    trace = None if options.quick else options.trace
    slices = loads(trace, options.seeds, plan.requests, plan.scale_input, plan.scale_output)
    bench = Bench(plan, slices, console)
    split = Pools(*options.split) if options.split else _planned(trace, plan, console)
    chosen = "given" if options.split else "found by `moonpool plan`" if trace is not None else "half and half"
    facts = [*_facts(plan, options), f"split {chosen}: {split.name}"]
    for fact in facts:
        console.print(fact, soft_wrap=True)
    with contextlib.suppress(KeyboardInterrupt):
        bench.run(split)
    _report(bench.results, plan, options.out, facts, console)
    return bars(bench.results)


def _report(results: Results, plan: Plan, folder: Path, facts: Sequence[str], console: Console) -> None:
    if not results.measured:
        return
    console.print(points_table(results, plan.scale.slow_down))
    console.print(errors_table(results))
    for file in write_reports(results, folder, facts):
        console.print(f"written: {file}")


def _planned(trace: Path | None, plan: Plan, console: Console) -> Pools:
    if trace is None:
        return Pools(plan.machines // 2, plan.machines - plan.machines // 2)
    with console.status("moonpool plan"):
        return planned(trace, plan.shape, plan.scale.hardware, plan.slo, plan.machines)


def _facts(plan: Plan, options: argparse.Namespace) -> list[str]:
    source = "synthetic sessions" if options.quick else options.trace.name
    live = plan.live_slo
    return [
        f"{plan.machines} machines of {plan.scale.hardware}, {plan.scale.slow_down:g} times slower, KV 1/"
        f"{plan.scale.shrink_kv:g}; limits TTFT {plan.slo.ttft:g} s, TBT {plan.slo.tbt:g} s of the hardware: "
        f"{live.ttft:g} s and {live.tbt:g} s live",
        f"slices of {source}, prompts x {plan.scale_input:g}, answers x {plan.scale_output:g}, "
        f"seeds {', '.join(map(str, options.seeds))}; a probe lasts {plan.span[0]:.0f} s and has {plan.least} requests "
        f"at least, {plan.requests} at most",
        "links of the live cluster are this machine's: they have no limit of their own",
    ]


def _split(text: str) -> tuple[int, int]:
    prefill, decode = (int(word) for word in text.split(","))
    if min(prefill, decode) < 1:
        raise ValueError
    return prefill, decode


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="make bench-goodput", description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("--trace", type=Path, default=TRACE, help="Mooncake's conversation_trace.jsonl (%(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2], help="a slice of the trace each (1 2)")
    parser.add_argument("--split", type=_split, help="P,D: prefill and decode machines (what `moonpool plan` finds)")
    parser.add_argument("--out", type=Path, default=Path("build/bench-goodput"), help="folder of reports (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="a smoke test of a minute; no figure means anything")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
