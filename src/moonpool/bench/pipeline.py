"""`make bench-pipeline`: the first token of long prompts, from one prefill worker and from two that divide the layers.

Live clusters of the real model stand side by side, and each prompt goes to one after another: a worker with one thread,
a pipeline of two workers with one thread each, and a worker with two threads, which has as many cores as the pipeline.
Two workers that compute a prompt each at once, and have nothing to do with each other, show how much two busy cores of
this machine are worth: no pipeline is faster. How busy each stage was in the seconds of a prompt is told by the stages'
own counters. Then the simulator says what pipelines of machines with 8 GPUs would make of prompts of 8k to 128k tokens.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from rich.console import Console
from rich.table import Table

import moonpool
from moonpool.bench.cluster import RunningCluster, running_cluster
from moonpool.bench.result import Bar, bar, print_result
from moonpool.errors import MoonpoolError
from moonpool.interrupts import heed_interrupts

ONE, PIPELINE, THREADS = "1 worker x 1 thread", "pipeline of 2 x 1 thread", "1 worker x 2 threads"
TWIN, LIMIT = "another worker x 1 thread", "limit: 2 such workers at once"
OPTIONS = {
    ONE: ("--prefill", "1", "--threads", "1"),
    PIPELINE: ("--prefill", "2", "--pipeline", "2", "--threads", "1"),
    THREADS: ("--prefill", "1", "--threads", "2"),
    TWIN: ("--prefill", "1", "--threads", "1"),
}
SHOWN = (ONE, PIPELINE, THREADS, LIMIT)
COMMON = ("--dram-per-node", "512MiB", "--journal", "off", "--log-level", "warning")
LENGTHS = (1024, 2048, 4096)
TIMES = {2048: 1.6, 4096: 1.75}
REPETITIONS = 5
ANSWER_SECONDS = 600.0
TOLD_SECONDS = 2.5
"""Counters are told once a second."""
PROFILE = "a800-llama2-70b"
STAGES = (1, 2, 4, 8)
SIMULATED = (8192, 16_384, 32_768, 65_536, 131_000)


@dataclass(slots=True)
class Measured:
    """Of one cluster and prompt length, by repetition."""

    seconds: list[float] = field(default_factory=list)
    """To the first token."""
    busy: dict[str, list[float]] = field(default_factory=dict)
    """Of each prefill worker, in these seconds."""


Results = dict[tuple[str, int], Measured]


def measure(clusters: dict[str, RunningCluster], lengths: Sequence[int], repetitions: int) -> Results:
    """Every cluster in turn, on prompts that none has seen. The first round is for warming up."""
    results: Results = {}
    rng = random.Random(4)
    for repetition in range(repetitions + 1):
        for length in lengths if repetition else lengths[:1]:
            prompt, first, second = ([rng.randrange(100, 40_000) for _ in range(length)] for _ in range(3))
            at_once = two_at_once((clusters[ONE], first), (clusters[TWIN], second))
            if repetition:
                results.setdefault((LIMIT, length), Measured()).seconds.append(at_once / 2)
            for name in (ONE, PIPELINE, THREADS):
                cluster = clusters[name]
                before = step_seconds(cluster)
                seconds = first_token_seconds(cluster, prompt)
                time.sleep(TOLD_SECONDS)
                after = step_seconds(cluster)
                if not repetition:
                    continue
                measured = results.setdefault((name, length), Measured())
                measured.seconds.append(seconds)
                for part in after:
                    measured.busy.setdefault(part, []).append(after[part] - before[part])
    return results


def first_token_seconds(cluster: RunningCluster, prompt: Sequence[int]) -> float:
    body = {"model": "smollm2", "prompt": list(prompt), "max_tokens": 1, "temperature": 0}
    began = time.perf_counter()
    response = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=ANSWER_SECONDS)
    seconds = time.perf_counter() - began
    if response.status_code != 200:
        raise MoonpoolError(f"a prompt of {len(prompt)} tokens: {response.status_code} {response.text}")
    return seconds


def two_at_once(*prompts: tuple[RunningCluster, Sequence[int]]) -> float:
    """Seconds until both have their first token."""
    began = time.perf_counter()
    with ThreadPoolExecutor(len(prompts)) as pool:
        list(pool.map(first_token_seconds, *zip(*prompts, strict=True)))
    return time.perf_counter() - began


def step_seconds(cluster: RunningCluster) -> dict[str, float]:
    """That each prefill worker has computed so far."""
    counters: dict[str, dict[str, float]] = json.loads(cluster.get("/cluster"))["counters"]
    return {part: values["step_seconds"] for part, values in sorted(counters.items()) if part.startswith("prefill")}


def table(results: Results, lengths: Sequence[int]) -> Table:
    shown = Table(
        "tokens", "cluster", "first token (s)", "min - max", "times", "idle", title="seconds a prompt, nothing cached"
    )
    for length in lengths:
        base = results[ONE, length].seconds
        for name in SHOWN:
            measured = results[name, length]
            seconds = measured.seconds
            idle = [
                f"{part} {1 - statistics.median(b / s for b, s in zip(busy, seconds, strict=True)):.0%}"
                for part, busy in measured.busy.items()
            ]
            middle = f"{statistics.median(seconds):.2f}"
            spread = f"{min(seconds):.2f} - {max(seconds):.2f}"
            shown.add_row(str(length), name, middle, spread, f"{times(base, seconds):.2f}", ", ".join(idle))
    return shown


def times(base: Sequence[float], seconds: Sequence[float]) -> float:
    """How much faster, the median of pairs measured one after the other."""
    return statistics.median(b / s for b, s in zip(base, seconds, strict=True))


def bars(results: Results) -> list[Bar]:
    found = []
    for length, target in TIMES.items():
        both = (results.get((name, length)) for name in (ONE, PIPELINE))
        one, pipeline = ([] if measured is None else measured.seconds for measured in both)
        value = times(one, pipeline) if one else None
        found.append(bar(f"{length} tokens: first token from {PIPELINE}, times {ONE}", value, target))
    return found


# ---- the simulator's prediction


def predicted(tokens: int, stages: int, hardware: Path) -> float:
    """Seconds to the first token of a prompt alone, on a pipeline of so many machines."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "one.jsonl"
        request = {"timestamp": 0, "input_length": tokens, "output_length": 2, "hash_ids": []}
        trace.write_text(json.dumps(request) + "\n")
        options = ("--prefill", str(stages), "--pipeline", str(stages), "--decode", "1", "--hardware", str(hardware))
        command = [sys.executable, "-m", "moonpool", "simulate", str(trace), *options, "--json", "--jobs", "1"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_SECONDS)
    if done.returncode:
        raise MoonpoolError(f"moonpool simulate failed: {done.stderr.strip()}")
    seconds: float = json.loads(done.stdout)["runs"][0]["summary"]["ttft"]["mean"]
    return seconds


def prediction(lengths: Sequence[int] = SIMULATED) -> Table:
    hardware = Path(moonpool.__file__).parent / "sim" / "profiles" / f"{PROFILE}.yaml"
    columns = ("tokens", *(f"{n} machine{'s' if n > 1 else ''}" for n in STAGES))
    shown = Table(*columns, title=f"simulated: first token (s) on machines of {PROFILE}")
    for tokens in lengths:
        seconds = [predicted(tokens, stages, hardware) for stages in STAGES]
        shown.add_row(str(tokens), *(f"{s:.2f} ({seconds[0] / s:.2f}x)" for s in seconds))
    return shown


def main() -> None:
    heed_interrupts()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS), help="tokens of the prompts")
    parser.add_argument("--repetitions", type=int, default=REPETITIONS)
    parser.add_argument("--chunk", type=int, help="most tokens of a step in the pipeline (default: the product's)")
    parser.add_argument("--predict-only", action="store_true", help="only what the simulator says")
    wanted = parser.parse_args()
    console = Console(width=140)
    results: Results = {}
    if not wanted.predict_only:
        chunk = () if wanted.chunk is None else ("--pipeline-chunk", str(wanted.chunk))
        with contextlib.ExitStack() as stack:
            clusters = {
                name: stack.enter_context(running_cluster(*options, *COMMON, *chunk))
                for name, options in OPTIONS.items()
            }
            results = measure(clusters, wanted.lengths, wanted.repetitions)
        console.print(table(results, wanted.lengths))
    console.print(prediction())
    print_result(bars(results), repetitions=wanted.repetitions)


if __name__ == "__main__":
    main()
