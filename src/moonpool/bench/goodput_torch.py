"""The part of `make bench-goodput` on the torch engine: two workers that compute SmolLM2, a thread each.

First `moonpool calibrate` measures what this machine's engine takes; from that follow the limits, ten times an idle
worker's time to first token at the mean prompt and five times its time between tokens, for all systems alike, and what
the simulator foresees. Then a prefill and a decode worker around the pool, two coupled workers behind two routers, and
two vLLM servers behind round-robin, where vLLM is installed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct
from rich.console import Console

from moonpool.bench import vllm_cpu
from moonpool.bench.foreseen import Foresight, prefill_rate
from moonpool.bench.goodput_bench import Bench, Rules
from moonpool.bench.goodput_figures import Measured, Results, limiting_table, show, torch_bars, torch_ratios
from moonpool.bench.goodput_live import Probe, probe
from moonpool.bench.goodput_load import Load, loads, shorter
from moonpool.bench.goodput_systems import Coupled, Pools, Servers
from moonpool.bench.peer import Peer, PeerMissingError
from moonpool.bench.result import Bar
from moonpool.bench.vllm_front import front
from moonpool.bench.vllm_server import start_server
from moonpool.core.cost import DecodeCost, PrefillCost
from moonpool.core.vocabulary import Slo
from moonpool.engine.model import resolve
from moonpool.errors import MoonpoolError
from moonpool.sim.profile import Profile, load_profile
from moonpool.trace.request import TraceRequest

WORKERS = 2
PROMPTS_SHORTER = 64
ANSWERS_SHORTER = 16
"""Decoding takes a CPU a larger part of its time than it takes a GPU, and prompts are what the trace is about."""
TTFT_TIMES = 10.0
TBT_TIMES = 5.0
STEP = 1.2
CHUNKS = (16, 32, 64, 128, 256, 512)
KV_TOKENS = 8704
"""In a worker's pages, as by default."""
CALIBRATE_SECONDS = 400.0
"""A hang guard."""
VLLM_BLOCK_TOKENS = 32
VLLM_CONTEXT = 4096


class Plan(Struct, frozen=True):
    requests: int
    """Of a slice, at most."""
    least: int
    """Of a probe."""
    probes: int


FULL = Plan(80, 30, 3)
QUICK = Plan(6, 4, 1)
PATIENCE, LONGEST = 80.0, 40.0
"""Seconds: on a machine that is busy or slow it is to end all the same."""


def measure(options: argparse.Namespace, console: Console) -> tuple[list[Bar], dict[str, float]]:
    """What must hold, and how many times the others' 90 % points separate workers have. Raises MoonpoolError."""
    plan = QUICK if options.quick else FULL
    slices = [
        shorter(load, PROMPTS_SHORTER, ANSWERS_SHORTER)
        for load in loads(None if options.quick else options.trace, options.seeds, plan.requests, 1.0, 1.0)
    ]
    flags = engine_flags(slices[0].block_tokens)
    profile = _calibrated(flags, options.profile, console)
    slo = limits(profile, slices)
    rules = Rules(
        slo, plan.least, plan.probes, STEP, patience=PATIENCE, longest=LONGEST, warming=max(plan.least // 4, 1)
    )
    foresight = Foresight(profile, slo, *rules.span)
    bench = Bench(flags, rules, foresight, slices, console)
    facts = _facts(profile, rules, slices, options)
    for fact in facts:
        bench.say(fact)
    results = Results()
    with contextlib.suppress(KeyboardInterrupt):
        start = prefill_rate(profile, slices[0], WORKERS)
        best, points = foresight.tuned(WORKERS, slices[0], start, CHUNKS)
        told = ", ".join(f"{chunk}: {rate:.2f}" for chunk, rate in points.items())
        bench.say(f"chunks of coupled workers, prefix-affine, simulated 90 % points (requests/s): {told}")
        plain = Coupled(WORKERS, "chunked", best.chunk, "round-robin")
        for system in (Pools(1, WORKERS - 1), plain, best):
            results.measured.append(bench.cluster(system, start))
        if options.peer:
            _vllm(bench, rules, slices, results, best.chunk, console)
    show(results, 1.0, options.out / "torch", facts, console)
    console.print(limiting_table(results))
    return torch_bars(results), torch_ratios(results)


def engine_flags(block_tokens: int) -> list[str]:
    """Of `moonpool serve` and `moonpool calibrate`."""
    pages = str(KV_TOKENS // block_tokens)
    sizes = ["--block-size", str(block_tokens), "--prefill-pages", pages, "--decode-pages", pages]
    return ["--engine", "torch", "--threads", "1", *sizes]


def limits(profile: Profile, slices: Sequence[Load]) -> Slo:
    """Rounded, so that they can be given again."""
    means = [load.mean_tokens for load in slices]
    prompt, answer = (sum(each[at] for each in means) / len(means) for at in (0, 1))
    first = PrefillCost(profile.prefill).seconds(round(prompt), 0)
    interval = DecodeCost(profile.decode).seconds(1, round(prompt + answer))
    return Slo(round(TTFT_TIMES * first, 1), round(TBT_TIMES * interval, 2))


def _calibrated(flags: Sequence[str], given: Path | None, console: Console) -> Profile:
    if given is not None:
        return load_profile(str(given))
    with tempfile.TemporaryDirectory(prefix="mp-") as folder, console.status("moonpool calibrate"):
        file = Path(folder) / "local.yaml"
        command = [sys.executable, "-P", "-m", "moonpool", "calibrate", *flags, "--out", str(file)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=CALIBRATE_SECONDS)
        if done.returncode:
            raise MoonpoolError(f"moonpool calibrate ended with {done.returncode}: {done.stderr.strip()[-500:]}")
        return load_profile(str(file))


def _vllm(bench: Bench, rules: Rules, slices: Sequence[Load], results: Results, chunk: int, console: Console) -> None:
    """Beside what was measured before, where vLLM is installed; else it says that it is not."""
    try:
        peer = vllm_cpu.installed()
    except PeerMissingError as e:
        bench.say(f"left out: {e}")
        return
    rate = results.measured[-1].most
    measured = Measured(Servers(WORKERS, chunk))
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mp-")))
        with console.status("two vLLM servers start"):
            url, pids = _serve(peer, folder, chunk, stack)

        def ask(requests: Sequence[TraceRequest], seed: int) -> Probe:
            where = measured.system.name, url, requests, rules.slo, seed, slices[0].block_tokens, pids
            return asyncio.run(probe(*where))

        bench.look(measured, [rate] * len(slices), ask)
    results.measured.append(measured)


def _serve(peer: Peer, folder: Path, chunk: int, stack: contextlib.ExitStack) -> tuple[str, dict[str, int]]:
    """A front's URL, and the servers' processes."""
    slots = ("--max-num-seqs", "16", "--max-num-batched-tokens", str(chunk))
    options = ("--block-size", str(VLLM_BLOCK_TOKENS), *slots)
    model = resolve("smollm2")
    logs = [folder / f"vllm-{at}.log" for at in range(WORKERS)]
    servers = [start_server(log, peer, model, stack, options, context_tokens=VLLM_CONTEXT) for log in logs]
    for server in servers:
        server.wait_well()
    url = stack.enter_context(front("round-robin", [server.url for server in servers], folder))
    return url, {server.log.stem: server.process.pid for server in servers}


def _facts(profile: Profile, rules: Rules, slices: Sequence[Load], options: argparse.Namespace) -> list[str]:
    source = "synthetic sessions" if options.quick else options.trace.name
    tokens = "; ".join(f"{prompt:.0f} and {answer:.0f}" for prompt, answer in (load.mean_tokens for load in slices))
    cost, step = PrefillCost(profile.prefill), DecodeCost(profile.decode)
    return [
        f"{WORKERS} workers of the torch engine, SmolLM2-135M in float32, a thread each; by the profile "
        f"{profile.name} 256 tokens of a prompt take {cost.seconds(256, 0):.2f} s, a step of one request "
        f"{step.seconds(1, 256):.3f} s, of eight {step.seconds(8, 2048):.3f} s",
        f"slices of {source}, prompts 1/{PROMPTS_SHORTER} and answers 1/{ANSWERS_SHORTER} as long, blocks of "
        f"{slices[0].block_tokens} tokens, seeds {', '.join(map(str, options.seeds))} (tokens on average: {tokens}); "
        f"a probe lasts {rules.span[0]:.0f} s and has {rules.least} requests at least, "
        f"{len(slices[0].requests)} at most",
        f"limits, the same for all: TTFT {rules.slo.ttft:g} s, TBT {rules.slo.tbt:g} s ({TTFT_TIMES:g} and "
        f"{TBT_TIMES:g} times those of an idle worker)",
    ]
