"""Processor time, from /proc: of the whole machine, and of a cluster's processes one by one."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from msgspec import Struct

OTHERS = "other processes"
"""Of the machine: those that nobody has named."""


class Used(Struct, frozen=True):
    """Between two readings."""

    idle: float
    """Share of the machine's processor time that nobody used."""
    shares: dict[str, float]
    """Of one core, by process, the busiest first."""


class Meter:
    """`roots`: processes by name. One below them has the name after `--id` in its command line, or that above it."""

    def __init__(self, roots: Mapping[str, int]) -> None:
        self._roots = roots
        self._began = time.monotonic()
        self._machine = machine_seconds()
        self._before = process_seconds(roots)

    def read(self) -> Used:
        """Since it was made. What has ended since then counts among `OTHERS`, whose share includes this process."""
        elapsed = max(time.monotonic() - self._began, 1e-9)
        whole, idle = (after - before for after, before in zip(machine_seconds(), self._machine, strict=True))
        after = process_seconds(self._roots)
        shares = {name: max(seconds - self._before.get(name, 0.0), 0.0) / elapsed for name, seconds in after.items()}
        shares[OTHERS] = max((whole - idle) / elapsed - sum(shares.values()), 0.0)
        return Used(idle / max(whole, 1e-9), dict(sorted(shares.items(), key=lambda item: -item[1])))


def machine_seconds(stat: Path = Path("/proc/stat")) -> tuple[float, float]:
    """Of all cores, and the idle part of it, since the machine was started."""
    fields = [float(field) / _TICKS for field in stat.read_text().splitlines()[0].split()[1:9]]
    return sum(fields), fields[3] + fields[4]


def process_seconds(roots: Mapping[str, int]) -> dict[str, float]:
    """Of each root and all below it that live, by name."""
    children: dict[int, list[int]] = {}
    seconds: dict[int, float] = {}
    for pid, parent, used in _processes():
        children.setdefault(parent, []).append(pid)
        seconds[pid] = used
    found: dict[str, float] = {}
    waiting = [(name, pid) for name, pid in roots.items() if pid in seconds]
    while waiting:
        above, pid = waiting.pop()
        name = _id_of(pid) or above
        found[name] = found.get(name, 0.0) + seconds[pid]
        waiting += [(name, child) for child in children.get(pid, ())]
    return found


_TICKS = os.sysconf("SC_CLK_TCK")


def _processes() -> Iterator[tuple[int, int, float]]:
    """Each one's id, its parent's, and its seconds."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError):  # it has ended
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                yield int(folder.name), int(fields[1]), (int(fields[11]) + int(fields[12])) / _TICKS


def _id_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if b"--id" in words[:-1]:
            return words[words.index(b"--id") + 1].decode(errors="replace")
    return ""
