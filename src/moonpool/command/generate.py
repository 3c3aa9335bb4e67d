"""`moonpool trace generate`: synthetic requests as a trace file; `moonpool trace kinds`: which there are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from msgspec.structs import replace
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from moonpool.command.trace import trace_console
from moonpool.trace.kinds import COMMON, KINDS, OF_ONE_FAMILY, PREFIX, parse_kind
from moonpool.trace.synthesize import synthesize
from moonpool.trace.write import write_trace


def generate(kind: str, out: Path, flags: Mapping[str, float | None], block_size: int) -> int:
    """Flags stand before what `kind` says. Raises ConfigError or TraceError."""
    given = "&".join(f"{name}={value}" for name, value in flags.items() if value is not None)
    text = kind.removeprefix(PREFIX)
    if given:
        text += ("&" if "?" in text else "?") + given
    wanted = replace(parse_kind(text), block_tokens=block_size)
    with Console(stderr=True).status(f"drawing {wanted.requests} requests", spinner="dots"):
        count = write_trace(out, synthesize(wanted))
    trace_console().print(f"{escape(str(out))}: {count} requests ({escape(text)})")
    return 0


def kinds() -> int:
    table = Table(box=SIMPLE, padding=(0, 1), pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column()
    for name, kind in KINDS.items():
        table.add_row(name, kind.about)
    console = trace_console()
    console.print(table)
    for what, parameters in (("all kinds", COMMON), ("kinds with one family of prompts", OF_ONE_FAMILY)):
        table = Table(box=SIMPLE, padding=(0, 1), pad_edge=False, show_header=False)
        table.add_column(no_wrap=True)
        table.add_column()
        for name, parameter in parameters.items():
            table.add_row(name, parameter.about)
        console.print(f"parameters of {what}:")
        console.print(table)
    console.print(f"moonpool simulate '{PREFIX}poisson?rate=2&n=1000&shared=.5'", markup=False)
    return 0
