"""Writes trace files, a request at a time."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from moonpool.errors import TraceError
from moonpool.trace import azure, mooncake
from moonpool.trace.request import TraceFormat, TraceRequest

Written = Literal[TraceFormat.MOONCAKE, TraceFormat.AZURE]


def write_trace(path: Path, requests: Iterable[TraceRequest], form: Written = TraceFormat.MOONCAKE) -> int:
    """The number of requests written. The file appears, or is replaced, only when it is complete.

    Azure's form has no place for block ids: they are left out. Raises TraceError where the file cannot be written.
    """
    format_line = mooncake.format_line if form is TraceFormat.MOONCAKE else azure.format_line
    unfinished = path.with_name(f"{path.name}.part")
    count = 0
    try:
        with unfinished.open("wb") as file:
            if form is TraceFormat.AZURE:
                file.write(",".join(azure.HEADER).encode() + b"\n")
            for request in requests:
                file.write(format_line(request))
                count += 1
        unfinished.replace(path)
    except OSError as e:
        raise TraceError(f"cannot write {path}: {e.strerror}") from None
    finally:
        unfinished.unlink(missing_ok=True)
    return count
