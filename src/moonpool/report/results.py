"""Runs of earlier reports, from their JSON files: of `moonpool replay` and of `moonpool simulate`, in one form."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from moonpool.errors import ConfigError
from moonpool.report.rows import Column
from moonpool.report.run import Run


class _Report(msgspec.Struct):
    runs: tuple[Run, ...]


def read_columns(files: Sequence[Path]) -> tuple[Column, ...]:
    """A column for each configuration of each file, in their order; where names meet, the file's stands before them.

    Raises ConfigError for a file that is no such report.
    """
    found = [(file, column) for file in files for column in _of_file(file)]
    names = [column.name for _, column in found]
    return tuple(
        Column(f"{file.stem}: {column.name}", column.runs) if names.count(column.name) > 1 else column
        for file, column in found
    )


def _of_file(file: Path) -> list[Column]:
    try:
        runs = msgspec.json.decode(file.read_bytes(), type=_Report).runs
    except OSError as e:
        raise ConfigError(f"--compare {file}: {e.strerror}") from None
    except msgspec.MsgspecError as e:
        raise ConfigError(
            f"--compare {file}: is no report of `moonpool replay --out` or `moonpool simulate --json`: {e}"
        ) from None
    if not runs:
        raise ConfigError(f"--compare {file}: has no runs")
    names = dict.fromkeys(run.name for run in runs)
    return [Column(name, tuple(run for run in runs if run.name == name)) for name in names]
