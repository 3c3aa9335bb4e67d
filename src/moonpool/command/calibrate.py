"""`moonpool calibrate`: this machine as a hardware profile, `local`, that the simulator takes."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from moonpool.bench.calibrate import (
    Bandwidths,
    Fitted,
    Point,
    fit,
    measure_engine,
    measure_machine,
    pages_needed,
)
from moonpool.bench.neighbours import busy_neighbours
from moonpool.command.hardware import LOCAL, local_file
from moonpool.config import Config
from moonpool.core.cost import DecodeCoefficients, PrefillCoefficients
from moonpool.engine.engine import Engine
from moonpool.errors import ConfigError
from moonpool.sim.profile import Profile

ENGINE_SECONDS = 45.0


def calibrate(
    config: Config, open_engine: Callable[[int], Engine], seconds: float = ENGINE_SECONDS, out: Path | None = None
) -> int:
    """Measure, print how well the cost models fit, write the profile. `open_engine(pages)`. Raises MoonpoolError."""
    file = out or local_file()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise ConfigError(f"cannot write {file.parent}: {e.strerror}; MOONPOOL_HOME moves it") from None
    console = Console(highlight=False)
    pages = pages_needed(config.pool.block_size)
    with Console(stderr=True).status("opening the engine", spinner="dots") as status:
        engine = open_engine(pages)
        with busy_neighbours(neighbours(config), partial(open_engine, pages)):
            status.update("measuring prefill and decode steps")
            prefill_points, decode_points = measure_engine(engine, seconds)
        status.update("measuring memory, sockets and disk")
        machine = measure_machine(file.parent)
    prefill, decode = fit(prefill_points), fit(decode_points)
    profile = _profile(config, engine, prefill, decode, machine)
    console.print(_table("prefill", prefill_points, prefill))
    console.print(_table("decode", decode_points, decode))
    console.print(
        f"memory {machine.memory / 1e9:.1f} GB/s, loopback {machine.loopback / 1e9:.1f} GB/s, disk "
        f"{machine.disk_read / 1e9:.2f} GB/s reading, {machine.disk_write / 1e9:.2f} GB/s writing"
    )
    _write(file, profile)
    named = LOCAL if out is None else escape(str(file))
    console.print(f"{escape(str(file))}: `moonpool simulate --hardware {named}` takes it", soft_wrap=True)
    return 0


def neighbours(config: Config) -> int:
    """Workers that `serve` would start here beside the one that is measured; those of the timed engine only sleep."""
    fleet = config.fleet
    workers = (fleet.coupled or fleet.prefill + fleet.decode) + fleet.inline
    return workers - 1 if config.model.engine == "torch" else 0


def _profile(config: Config, engine: Engine, prefill: Fitted, decode: Fitted, machine: Bandwidths) -> Profile:
    space = engine.space
    token_bytes = space.runs * space.run_bytes // space.block_tokens
    quantized = "" if config.model.quantize == "none" else f"weights in {config.model.quantize}, "
    ways = "past the page cache" if machine.is_direct else "through the page cache"
    return Profile(
        name=LOCAL,
        sources=(
            f"Measured by `moonpool calibrate`: {config.served_name} on the {config.model.engine} engine, "
            f"{config.model.dtype}, {quantized}{config.model.threads} threads of {os.cpu_count()} cores "
            f"({platform.machine()}), beside {neighbours(config)} others that computed. "
            f"Prefill fits within {prefill.largest_error:.1%}, decode within {decode.largest_error:.1%}. Link: two "
            f"connections over loopback. Host: one thread copying memory. SSD: the disk of the model cache, {ways}. "
            "Sizes are those of `moonpool serve` with the same options."
        ),
        block_tokens=space.block_tokens,
        kv_bytes_per_token=token_bytes,
        prefill=PrefillCoefficients(*prefill.coefficients),
        decode=DecodeCoefficients(*decode.coefficients),
        chunk_tokens=config.batch.prefill_chunk,
        context_tokens=engine.context_tokens,
        vram_tokens=config.pool.decode_pages * space.block_tokens,
        slots=config.batch.max_batch,
        dram_tokens=config.pool.dram_per_node // token_bytes,
        link_bytes_per_second=machine.loopback,
        link_latency=machine.loopback_latency,
        host_bytes_per_second=machine.memory,
        ssd_bytes=config.pool.ssd_per_node,
        ssd_read_bytes_per_second=machine.disk_read,
        ssd_write_bytes_per_second=machine.disk_write,
        layers=space.runs,
    )


def _write(file: Path, profile: Profile) -> None:
    unfinished = file.with_name(f"{file.name}.part")
    try:
        unfinished.write_bytes(msgspec.yaml.encode(profile))
        unfinished.replace(file)
    except OSError as e:
        raise ConfigError(f"cannot write {file}: {e.strerror}; MOONPOOL_HOME moves it") from None


def _table(name: str, points: Sequence[Point], fitted: Fitted) -> Table:
    table = Table(box=SIMPLE, padding=(0, 1), pad_edge=False)
    for column in (name, "measured (ms)", "model (ms)", "off"):
        table.add_column(column, justify="right", no_wrap=True)
    for point, error in zip(points, fitted.errors, strict=True):
        milliseconds = point.seconds * 1e3
        table.add_row(point.what, f"{milliseconds:.1f}", f"{milliseconds * (1 + error):.1f}", f"{error:+.1%}")
    return table
