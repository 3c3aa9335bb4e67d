"""`moonpool simulate`: a trace on simulated clusters, side by side: in the terminal, as JSON, as one HTML file."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from moonpool.command.choices import numbers, some_of
from moonpool.command.classes import read_classes, read_mix
from moonpool.command.columns import compared, figures
from moonpool.command.elsewhere import Said, Task
from moonpool.command.hardware import hardware_profile
from moonpool.command.machine import cores
from moonpool.command.processes import run_all
from moonpool.command.settings import duration
from moonpool.command.workload import Traffic, Workload
from moonpool.core.admission import ADMISSION_POLICIES
from moonpool.core.conductor import ConductorConfig
from moonpool.core.coupled import COUPLED_MODES
from moonpool.core.placement import PLACEMENT_POLICIES
from moonpool.core.vocabulary import Slo
from moonpool.errors import ConfigError
from moonpool.report.html import Page, page
from moonpool.report.rows import Column, Difference, differences
from moonpool.report.run import Run
from moonpool.sim.cluster import Setup
from moonpool.sim.configuration import Configuration, Given, check_pipeline, read_configuration
from moonpool.sim.coupled_cluster import ROUTINGS, CoupledSetup
from moonpool.sim.profile import Profile

QUEUE_BOUND = 1 << 20
"""The paper's cluster refuses by limits alone."""
FILE_COLUMNS = 160
"""Where the output is no terminal."""
MOST_SEEDS = 1000


class Wanted(msgspec.Struct, frozen=True):
    """The command line."""

    workload: Workload
    files: tuple[Path, ...]
    compare: bool
    hardware: str
    prefill: int
    decode: int
    placement: str
    admission: str
    threshold: float
    ttft: float | None
    tbt: float | None
    seeds: str
    html: Path | None
    as_json: bool
    jobs: int
    classes: str | None = None
    """A YAML file."""
    mix: str | None = None
    """`high=0.3,low=0.7`."""
    pipeline: int = 1
    coupled: int = 0
    coupled_mode: str = "chunked"
    chunk: str = "512"
    routing: str = "prefix-affine"
    slow_down: float = 1.0
    shrink_kv: float = 1.0

    def profile(self, name: str) -> Profile:
        """Of hardware by name, scaled. Raises ConfigError."""
        return hardware_profile(name, self.slow_down, self.shrink_kv)


class SimulationReport(msgspec.Struct, frozen=True):
    """What `--json` prints: all of it follows from the inputs."""

    workload: Workload
    skipped: int
    seeds: tuple[int, ...]
    configurations: tuple[Configuration, ...]
    runs: tuple[Run, ...]
    """Of the first configuration with each seed, then of the next."""
    differences: tuple[Difference, ...]
    """Of each configuration from the first."""


def simulate(wanted: Wanted) -> int:
    """Print what came of it. Raises ConfigError or TraceError."""
    wanted = _sorted_out(wanted)
    seeds, configurations = read_seeds(wanted.seeds), (*_configurations(wanted), *_coupled(wanted))
    # Read here too: mistakes are told before anything runs.
    traffic = Traffic(wanted.workload, configurations[0].setup.profile.block_tokens)
    count = len(traffic.requests(seed=seeds[0]))
    began = time.perf_counter()
    columns = _run(wanted, configurations, seeds, traffic)
    seconds = time.perf_counter() - began
    if wanted.html is not None:
        _write(wanted.html, page(Page("Moonpool: a simulated cluster", tuple(_facts(wanted, count, seeds)), columns)))
    if wanted.as_json:
        return _print_json(wanted, traffic.skipped, seeds, configurations, columns)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else FILE_COLUMNS)
    for fact in _facts(wanted, count, seeds):
        console.print(escape(fact))
    console.print(figures(columns))
    if len(columns) > 1:
        console.print(
            f"more than {escape(columns[0].name)}"
            + (", seed by seed; in brackets what may be chance:" if len(seeds) > 1 else ":")
        )
        console.print(compared(columns))
    runs = len(seeds) * len(columns)
    console.print(f"{runs * count} requests simulated in {seconds:.1f} s, {runs * count / seconds:.0f} a second")
    if wanted.html is not None:
        console.print(f"written: {escape(str(wanted.html))}")
    if traffic.failed:
        console.print(
            f"{traffic.failed} requests without an answer were left out: they failed when the trace was taken"
        )
    if traffic.skipped:
        console.print(
            f"[bold]{traffic.skipped} malformed lines[/] were left out, the first: {escape(traffic.first_skipped)}"
        )
    return 0


def read_seeds(text: str) -> tuple[int, ...]:
    """`1,2,3`. Raises ConfigError."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdecimal() and int(word) < 1 << 32 for word in words):
        raise ConfigError(f"--seeds {text!r}: must be numbers from 0 to 2^32 - 1, with commas between")
    if len(words) > MOST_SEEDS:
        raise ConfigError(f"--seeds: {len(words)} are too many, give at most {MOST_SEEDS}")
    return tuple(dict.fromkeys(int(word) for word in words))


def _sorted_out(wanted: Wanted) -> Wanted:
    """The trace and the configurations may come in any order: a configuration ends in .yaml."""
    given = [wanted.workload.source, *map(str, wanted.files)]
    configurations = [name for name in given if name.endswith((".yaml", ".yml"))]
    traces = [name for name in given if name not in configurations]
    if len(traces) != 1:
        told = f"{', '.join(traces)} are {len(traces)} of them" if traces else "there is none"
        raise ConfigError(f"give one trace, {told}; configurations end in .yaml")
    if configurations and not wanted.compare:
        raise ConfigError(f"{configurations[0]} is a configuration: give --compare to run it")
    if wanted.compare and not configurations:
        raise ConfigError("--compare: give one or more configurations, files ending in .yaml")
    return msgspec.structs.replace(
        wanted,
        workload=msgspec.structs.replace(wanted.workload, source=traces[0]),
        files=tuple(Path(name) for name in configurations),
    )


def _configurations(wanted: Wanted) -> tuple[Configuration, ...]:
    """Of the files, which the flags complete; else every placement with every admission."""
    profile = wanted.profile(wanted.hardware)
    found: dict[str, Setup] = {}
    classes = read_classes(wanted.classes, "--classes", duration) if wanted.classes else ()
    mix = read_mix(wanted.mix, classes)
    for placement in some_of("--placement", wanted.placement, PLACEMENT_POLICIES):
        for admission in some_of("--admission", wanted.admission, ADMISSION_POLICIES):
            config = ConductorConfig(
                placement=placement,
                admission=admission,
                threshold=wanted.threshold,
                slo=Slo(wanted.ttft, wanted.tbt),
                queue_bound=QUEUE_BOUND,
                classes=classes,
            )
            setup = Setup(profile, wanted.prefill, wanted.decode, config, mix=mix, pipeline=wanted.pipeline)
            found[f"{placement} {admission}"] = setup
    base = next(iter(found.values()))
    if not wanted.files:
        check_pipeline(base, "--pipeline")
        return tuple(Configuration(name, setup) for name, setup in found.items())
    read = tuple(read_configuration(file, base, wanted.profile, _priorities) for file in wanted.files)
    names = [each.name for each in read]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"--compare: two configurations are called {name!r}; give each a `name` of its own")
    if len({each.setup.profile.block_tokens for each in read}) > 1:
        raise ConfigError(
            "--compare: the configurations' hardware has blocks of different sizes; compare them one by one"
        )
    return read


def _priorities(given: Given, base: Setup, where: str) -> Setup:
    """`classes` and `mix` as their flags have them, or the classes themselves; those of the flags without them."""
    classes, mix = given.pop("classes", None), given.pop("mix", None)
    rules = base.conductor
    if classes is not None:
        rules = msgspec.structs.replace(rules, classes=read_classes(classes, f"{where}: classes", duration))
    if mix is not None and not isinstance(mix, str):
        raise ConfigError(f"{where}: `mix` is {mix!r}; give CLASS=SHARE with commas between")
    if classes is None and mix is None:
        return base
    return msgspec.structs.replace(base, conductor=rules, mix=read_mix(mix, rules.classes, f"{where}: mix"))


def _coupled(wanted: Wanted) -> tuple[Configuration, ...]:
    """Every mode, `chunked` with every chunk, with every routing; none without `--coupled`."""
    found = []
    for mode in some_of("--coupled-mode", wanted.coupled_mode, COUPLED_MODES) if wanted.coupled else ():
        for chunk in numbers("--chunk", wanted.chunk, 1) if mode == "chunked" else (0,):
            for routing in some_of("--routing", wanted.routing, ROUTINGS):
                name = f"coupled {mode} {chunk or ''} {routing}".replace("  ", " ")
                profile, slo = wanted.profile(wanted.hardware), Slo(wanted.ttft, wanted.tbt)
                setup = CoupledSetup(profile, wanted.coupled, mode, chunk, routing, slo=slo)
                found.append(Configuration(name, setup))
    return tuple(found)


def _run(
    wanted: Wanted, configurations: Sequence[Configuration], seeds: Sequence[int], traffic: Traffic
) -> tuple[Column, ...]:
    tasks = [
        Task(each.name, wanted.workload, msgspec.structs.replace(each.setup, seed=seed))
        for each in configurations
        for seed in seeds
    ]
    count = len(traffic.requests(seed=seeds[0]))
    said = run_with_progress(tasks, wanted.jobs or cores(), count, traffic)
    runs = [each.run for each in said if each.run is not None]
    size = len(seeds)
    return tuple(Column(each.name, tuple(runs[at * size : (at + 1) * size])) for at, each in enumerate(configurations))


def run_with_progress(tasks: Sequence[Task], jobs: int, count: int, traffic: Traffic | None = None) -> list[Said]:
    """`count`: requests of each; `traffic`: what was read already. Raises ConfigError, TraceError or MoonpoolError."""
    shown = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    console = Console(stderr=True)
    with Progress(*shown, console=console, transient=True, disable=not console.is_terminal) as progress:
        bars = {
            at: progress.add_task(f"{task.name}, seed {task.setup.seed}", total=count, visible=len(tasks) <= 12)
            for at, task in enumerate(tasks)
        }
        everything = progress.add_task("all", total=count * len(tasks), visible=len(tasks) > 1)
        over = dict.fromkeys(bars, 0)

        def told(at: int, done: int) -> None:
            progress.update(bars[at], completed=done)
            progress.advance(everything, done - over[at])
            over[at] = done

        return run_all(tasks, jobs, told, traffic)


def _facts(wanted: Wanted, count: int, seeds: Sequence[int]) -> list[str]:
    workload = wanted.workload
    shaped = [f"speed {workload.speed:g}"] if workload.speed != 1 else []
    shaped += [f"jitter {workload.jitter:g} s"] if workload.jitter else []
    facts = [
        f"{workload.source}: {count} requests"
        + "".join(f", {each}" for each in shaped)
        + (f", seeds {', '.join(map(str, seeds))}" if len(seeds) > 1 else f", seed {seeds[0]}")
    ]
    if not wanted.compare:
        coupled = f", or {wanted.coupled} coupled ones" if wanted.coupled else ""
        scaled = f", {wanted.slow_down:g} times slower" if wanted.slow_down != 1.0 else ""
        scaled += f", KV 1/{wanted.shrink_kv:g}" if wanted.shrink_kv != 1.0 else ""
        groups = f" in pipelines of {wanted.pipeline}" if wanted.pipeline > 1 else ""
        facts.append(
            f"{wanted.prefill} prefill{groups} and {wanted.decode} decode instances{coupled}, {wanted.hardware}{scaled}"
        )
    if len(seeds) > 1 and not workload.jitter:
        facts.append("all seeds have the same arrivals: --jitter SECONDS draws them")
    return facts


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text)
    except OSError as e:
        raise ConfigError(f"--html {file}: {e.strerror}") from None


def _print_json(
    wanted: Wanted,
    skipped: int,
    seeds: tuple[int, ...],
    configurations: tuple[Configuration, ...],
    columns: Sequence[Column],
) -> int:
    report = SimulationReport(
        workload=wanted.workload,
        skipped=skipped,
        seeds=seeds,
        configurations=configurations,
        runs=tuple(run for column in columns for run in column.runs),
        differences=tuple(differences(columns)),
    )
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(report)).decode() + "\n")
    return 0
