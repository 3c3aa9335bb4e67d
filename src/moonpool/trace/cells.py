"""Rows of CSV traces: which columns there are, and numbers out of cells. No format needs quotes."""

from __future__ import annotations

from collections.abc import Sequence

MAX_TOKENS = 1 << 40
LATEST = 1e12
"""Seconds."""


def names_in(header: bytes) -> list[str]:
    return [name.strip().lower() for name in header.decode(errors="replace").split(",")]


def cells_of(line: bytes, columns: int) -> Sequence[str]:
    cells = line.decode().strip().split(",")
    if len(cells) != columns:
        raise ValueError(f"{len(cells)} columns, not {columns} as in the header")
    return cells


def tokens_in(cell: str) -> int:
    tokens = int(cell)
    if not 0 <= tokens < MAX_TOKENS:
        raise ValueError(f"{cell!r} is not a number of tokens")
    return tokens


def check_seconds(seconds: float, cell: str) -> float:
    if not 0 <= seconds < LATEST:
        raise ValueError(f"{cell!r} is not a time at or after the trace's begin")
    return seconds
