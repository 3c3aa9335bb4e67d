"""`make bench-aiperf`: NVIDIA's AIPerf and `moonpool replay` measure the same cluster with the same trace.

The timed engine, few requests a second: what differs is the two clients and the gateway, not the load. AIPerf makes
prompts of text from the trace's block ids by the model's tokenizer, which it finds in a cache of that one model; replay
sends token ids. Both keep the trace's times, lengths and prefixes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct
from rich.console import Console
from rich.table import Table

from moonpool.bench.cluster import RunningCluster, running_cluster
from moonpool.bench.peer import Peer, PeerMissingError, made_once, new_environment, run_or_explain
from moonpool.bench.process import tail
from moonpool.bench.result import Bar, bar, print_result
from moonpool.engine.model import resolve
from moonpool.errors import MoonpoolError
from moonpool.interrupts import heed_interrupts
from moonpool.trace.kinds import parse_kind
from moonpool.trace.read import TraceFile
from moonpool.trace.request import TraceRequest
from moonpool.trace.synthesize import synthesize
from moonpool.trace.write import write_trace

VERSION = "0.13.0"
PACKAGE = f"aiperf=={VERSION}"
SYNTHETIC = "poisson?n=40&rate=0.5&input=300&input-spread=.5&output=32&output-spread=.3"
SERVED = "smollm2"
TOKENIZER = "moonpool/smollm2"
REVISION = "0" * 40
RUN_SECONDS = 900.0
"""A hang guard, for each client."""
SHARE, LEAST_SECONDS = 0.1, 0.005
"""The medians may differ by this share of replay's, or by so much."""


class Medians(Struct, frozen=True):
    """Seconds, and the mean lengths that the client has counted."""

    first: float
    interval: float
    prompt_tokens: float
    answer_tokens: float
    requests: int


def set_up(console: Console) -> Peer:
    """AIPerf in a virtual environment of its own, made once. Raises PeerMissingError."""

    def install(peer: Peer) -> None:
        with console.status(f"AIPerf {VERSION}: a virtual environment of its own (once, 0.9 GB)"):
            pip = new_environment(peer)
            run_or_explain([*pip, "install", "--no-compile", PACKAGE], peer, f"pip cannot install {PACKAGE}")

    return made_once(f"aiperf-{VERSION}", install)


def tokenizer_cache(model: Path, home: Path) -> Path:
    """A Hugging Face cache that has `model`'s tokenizer under the name TOKENIZER; `home`, for HF_HOME.

    AIPerf's processes that decode prompts take no directory: they look up a model's name in the cache, offline.
    """
    cache = home / "hub" / f"models--{TOKENIZER.replace('/', '--')}"
    snapshot = cache / "snapshots" / REVISION
    snapshot.mkdir(parents=True)
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (snapshot / file).symlink_to(model / file)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(REVISION)
    return home


def profile_flags(trace: Path, url: str, out: Path) -> list[str]:
    """Of `aiperf profile`: the trace at its own times, answers as long as it says, nothing asked of a model hub."""
    return [
        *("--model", SERVED, "--url", url, "--endpoint-type", "completions", "--streaming"),
        *("--input-file", str(trace), "--custom-dataset-type", "mooncake_trace", "--fixed-schedule"),
        *("--tokenizer", TOKENIZER, "--use-server-token-count", "--extra-inputs", "ignore_eos:true"),
        *("--ui-type", "none", "--no-gpu-telemetry", "--no-server-metrics", "--artifact-dir", str(out)),
    ]


def by_aiperf(peer: Peer, trace: Path, url: str, folder: Path) -> Medians:
    """Raises MoonpoolError."""
    home = tokenizer_cache(resolve(SERVED), folder / "huggingface")
    command = [str(peer.python.with_name("aiperf")), "profile", *profile_flags(trace, url, folder / "aiperf")]
    _run("aiperf", command, {**peer.environment, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}, folder)
    found = next((folder / "aiperf").rglob("profile_export_aiperf.json"), None)
    if found is None:
        raise MoonpoolError("aiperf has written no profile_export_aiperf.json")
    return of_export(json.loads(found.read_bytes()))


def of_export(export: Mapping[str, Any]) -> Medians:
    """AIPerf's; times are in milliseconds. Raises MoonpoolError where requests failed or figures lack."""
    try:
        return Medians(
            first=export["time_to_first_token"]["p50"] / 1e3,
            interval=export["inter_token_latency"]["p50"] / 1e3,
            prompt_tokens=export["input_sequence_length"]["avg"],
            answer_tokens=export["output_sequence_length"]["avg"],
            requests=round(export["request_count"]["avg"]),
        )
    except KeyError as e:
        raise MoonpoolError(f"aiperf's report has no {e}: did every request fail?") from None


def by_replay(trace: Path, url: str, folder: Path) -> Medians:
    """Raises MoonpoolError."""
    out = folder / "replay.json"
    command = [sys.executable, "-P", "-m", "moonpool", "replay", str(trace), "--url", url, "--out", str(out)]
    _run("moonpool replay", command, os.environ, folder)
    run = json.loads(out.read_bytes())["runs"][0]
    summary, live = run["summary"], run["live"]
    begun = max(summary["requests"] - sum(summary["refused"].values()), 1)
    return Medians(
        summary["ttft"]["p50"],
        live["intervals"]["p50"],
        live["prompt_tokens"] / begun,
        live["output_tokens"] / begun,
        summary["completed"],
    )


def _run(what: str, command: Sequence[str], environment: Mapping[str, str], folder: Path) -> None:
    log = folder / f"{what.rpartition(' ')[2]}.log"
    try:
        with log.open("wb") as out:
            done = subprocess.run(
                command, env=dict(environment), cwd=folder, stdout=out, stderr=out, timeout=RUN_SECONDS
            )
    except subprocess.TimeoutExpired:
        raise MoonpoolError(f"{what} was not done within {RUN_SECONDS:g} s\n{tail(log)}") from None
    if done.returncode:
        raise MoonpoolError(f"{what} ended with {done.returncode}\n{tail(log)}")


def bars(aiperf: Medians | None, replay: Medians | None, requests: int, lack: str = "") -> list[Bar]:
    """`lack`: why nothing was measured."""
    first = interval = served = None
    if aiperf is not None and replay is not None:
        first, interval = _apart(aiperf.first, replay.first), _apart(aiperf.interval, replay.interval)
        served = min(aiperf.requests, replay.requests) / requests
    what = "aiperf and replay apart, of 10 % or 5 ms"
    return [
        bar(f"median TTFT: {what}", first, 1.0, at_most=True, reason=lack),
        bar(f"median ITL: {what}", interval, 1.0, at_most=True, reason=lack),
        bar("requests that both have completed", served, 1.0, reason=lack),
    ]


def _apart(one: float, ours: float) -> float:
    return abs(one - ours) / max(SHARE * ours, LEAST_SECONDS)


def main() -> int:
    """The exit status."""
    heed_interrupts()
    options, console = _options(), Console(width=140)
    try:
        peer = set_up(console)
    except PeerMissingError as e:
        console.print(f"left out: AIPerf cannot be installed here: {e}", soft_wrap=True, markup=False)
        print_result(bars(None, None, 1, str(e)))
        return 0
    try:
        with tempfile.TemporaryDirectory(prefix="mp-") as name:
            found = _measure(peer, options, Path(name), console)
    except KeyboardInterrupt:
        return 130
    except MoonpoolError as e:
        console.print(f"moonpool: {e}", soft_wrap=True, markup=False)
        return 1
    print_result(found, aiperf=VERSION, load=round(os.getloadavg()[0], 1))
    return 0


def _measure(peer: Peer, options: argparse.Namespace, folder: Path, console: Console) -> list[Bar]:
    requests = _requests(options)
    trace = folder / "trace.jsonl"
    write_trace(trace, requests)
    tokens = [statistics.mean(getattr(each, name) for each in requests) for name in ("input_tokens", "output_tokens")]
    seconds = requests[-1].arrival - requests[0].arrival
    console.print(
        f"{options.trace or SYNTHETIC}: {len(requests)} requests in {seconds:.0f} s, {tokens[0]:.0f} tokens in and "
        f"{tokens[1]:.0f} out on average; the timed engine, one prefill and one decode worker",
        soft_wrap=True,
        markup=False,
    )
    found: dict[str, Medians] = {}
    with running_cluster("--engine", "timed", "--journal", "off", "--log-level", "warning") as cluster:
        for name in ("aiperf", "replay"):
            with console.status(name):
                found[name] = _by(name, peer, trace, cluster, folder)
    shown = Table("client", "requests", "TTFT, median (ms)", "ITL, median (ms)", "tokens in", "tokens out")
    for name, m in found.items():
        figures = f"{m.first * 1e3:.1f}", f"{m.interval * 1e3:.2f}", f"{m.prompt_tokens:.1f}", f"{m.answer_tokens:.1f}"
        shown.add_row(name, str(m.requests), *figures)
    console.print(shown)
    return bars(found["aiperf"], found["replay"], len(requests))


def _by(name: str, peer: Peer, trace: Path, cluster: RunningCluster, folder: Path) -> Medians:
    if name == "aiperf":
        return by_aiperf(peer, trace, cluster.url, folder)
    return by_replay(trace, cluster.url, folder)


def _requests(options: argparse.Namespace) -> list[TraceRequest]:
    if options.trace is None:
        return list(synthesize(parse_kind(SYNTHETIC)))
    return list(TraceFile(options.trace))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make bench-aiperf", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--trace", type=Path, help="in Mooncake's form, blocks of 512 tokens (a synthetic one)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
