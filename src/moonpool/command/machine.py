"""What this machine has, and whether a configuration fits."""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
from pathlib import Path

from moonpool.config import Config
from moonpool.engine.model import home
from moonpool.errors import ConfigError
from moonpool.store.places import check_places

log = logging.getLogger(__name__)

PROCESS_BYTES = 64 << 20
"""Of a Python process with the libraries of a part that does not compute, roughly."""
TORCH_BYTES = 300 << 20
"""Of one with torch and transformers loaded, roughly."""

QUANTIZED = 4
"""Times that weights in int8 are smaller; embeddings stay as they are, but few of their pages are read."""

SMALLEST_SLAB = 1 << 20
ENGINE_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors")
ENGINE_REMEDY = "pip install 'moonpool[engine]', or in a checkout pip install -c constraints.txt -e '.[engine]'"


def lacking_packages() -> list[str]:
    """Of those that serving a model takes; the pool alone takes none of them."""
    return [name for name in ENGINE_PACKAGES if not importlib.util.find_spec(name)]


def check_packages() -> None:
    """Raises ConfigError where no model can be served."""
    if missing := lacking_packages():
        raise ConfigError(f"no {', '.join(missing)}, which serving a model takes: {ENGINE_REMEDY}")


def available_memory(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that new processes can use, by the kernel's estimate and the control group's limit; None if unknown."""
    found = [int(line.split()[1]) << 10 for line in _lines(proc / "meminfo") if line.startswith("MemAvailable:")]
    limit, used = _lines(cgroup / "memory.max"), _lines(cgroup / "memory.current")
    if limit and used and limit[0].isdigit():
        cache = [int(line.split()[1]) for line in _lines(cgroup / "memory.stat") if line.startswith("inactive_file ")]
        found.append(int(limit[0]) - int(used[0]) + sum(cache))
    return min(found, default=None)


def needed_memory(config: Config, weights: Path | None) -> int:
    """A lower bound of what the cluster will use when the arenas are full."""
    fleet = config.fleet
    workers = (fleet.coupled or fleet.prefill + fleet.decode) + fleet.inline
    total = fleet.nodes * (config.pool.dram_per_node + PROCESS_BYTES) + 2 * PROCESS_BYTES
    if weights is None:
        return total + workers * PROCESS_BYTES
    files = sum(file.stat().st_size for file in weights.glob("*.safetensors"))
    if config.model.quantize == "int8":
        files //= QUANTIZED
    whole = workers if fleet.coupled else workers - fleet.prefill + fleet.prefill / config.batch.pipeline
    return total + workers * TORCH_BYTES + int(whole * files)


def check_memory(config: Config, weights: Path | None) -> None:
    """Raises ConfigError where the cluster cannot fit."""
    needed, available = needed_memory(config, weights), available_memory()
    if available is not None and needed > available:
        raise ConfigError(
            f"not enough memory: {config.fleet.nodes} x {gib(config.pool.dram_per_node)} of KVCache and the parts need "
            f"about {gib(needed)}, {gib(available)} is available: lower --dram-per-node, --nodes, --prefill or --decode"
        )


def ssd_directories(config: Config) -> tuple[Path, ...]:
    """Where the nodes make their directories of the SSD tier: none without one. Raises ConfigError."""
    if not config.pool.ssd_per_node:
        if config.pool.ssd_dir:
            log.warning("--ssd-dir %s is not used: without --ssd-per-node there is no SSD tier", config.pool.ssd_dir)
        return ()
    given = [name.strip() for name in (config.pool.ssd_dir or "").split(",") if name.strip()]
    directories = tuple(Path(name) for name in given) or (home() / "ssd",)
    for index, directory in enumerate(directories):
        if "\0" in str(directory):
            raise ConfigError(f"--ssd-dir {str(directory)!r}: no path has a NUL in it")
        if os.path.realpath(directory) in map(os.path.realpath, directories[:index]):
            raise ConfigError(f"--ssd-dir names {directory} twice")
    if config.pool.ssd_per_node < len(directories) * SMALLEST_SLAB:
        raise ConfigError(
            f"--ssd-per-node {config.pool.ssd_per_node} bytes is too little for {len(directories)} --ssd-dir: "
            f"at least {SMALLEST_SLAB >> 20} MiB each"
        )
    return directories


def check_ssd(config: Config) -> None:
    """Raises ConfigError where a directory of the SSD tier cannot be had, or there is not room for all slabs."""
    directories = ssd_directories(config)
    nodes = [directory / f"node-{number}" for number in range(config.fleet.nodes) for directory in directories]
    check_places(nodes, config.pool.ssd_per_node // max(1, len(directories)))


def check_disk(directory: Path, needed: int, purpose: str) -> None:
    """Raises ConfigError where `directory` (or its nearest parent that exists) has less than `needed` bytes free."""
    free = free_disk(directory)
    if free < needed:
        raise ConfigError(
            f"not enough disk for {purpose}: {gib(needed)} needed, {gib(free)} free in {directory}: "
            "free some, or set MOONPOOL_HOME to a directory on another disk"
        )


def free_disk(directory: Path) -> int:
    """Bytes free where `directory` is or would be."""
    while not directory.exists():
        directory = directory.parent
    return shutil.disk_usage(directory).free


def cores() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0))


def has_avx2(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the CPUs have it; int8 weights need it."""
    return any(line.startswith("flags") and "avx2" in line.split() for line in _lines(cpuinfo))


def gib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB"


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
