"""`moonpool status`: the cluster as a table, from the gateway's /cluster. A field that is not there is left blank."""

from __future__ import annotations

import contextlib
import time
import urllib.error
import urllib.request
from collections.abc import Sequence

import msgspec
from rich.box import SIMPLE
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table

from moonpool.command.flags import api_key, key_hint
from moonpool.errors import MoonpoolError

EVERY_SECONDS = 1.0
CALL_SECONDS = 5.0
FILE_COLUMNS = 120
"""Where the output is no terminal."""
ANY_WIDTH = 10_000
DROPPED = ("rooms", "moved", "blocks", "waits", "runs", "pages", "SSD", "DRAM")
"""The columns that a narrow terminal does without, in this order; the others are never cut."""
MAX_ANSWER_BYTES = 16 << 20


class Capacity(msgspec.Struct, frozen=True):
    pages: int = 0
    slots: int = 0
    dram_bytes: int = 0


class Part(msgspec.Struct, frozen=True):
    """What a row shows of a part."""

    id: str = "?"
    kind: str = ""
    health: str = ""
    node: str = ""
    capacity: Capacity = Capacity()
    queued: int | None = None
    running: int | None = None
    pages_free: int | None = None
    used_bytes: int | None = None
    rooms: int | None = None
    blocks: dict[str, int] | None = None


class State(msgspec.Struct, frozen=True):
    """What the table shows of /cluster."""

    placement: str = ""
    admission: str = ""
    context_tokens: int = 0
    parts: list[Part] = []
    requests: dict[str, int] = {}
    decisions: dict[str, object] = {}
    counters: dict[str, dict[str, float]] = {}


def status(url: str, once: bool) -> int:
    """Show the table, again every second on a terminal unless `once`. Raises MoonpoolError where nothing answers."""
    state = fetch(url)
    console = Console()
    if not console.is_terminal:
        console, once = Console(width=FILE_COLUMNS), True
    if once:
        console.print(render(state, console))
        return 0
    first = render(state, console)
    with contextlib.suppress(KeyboardInterrupt), Live(first, console=console, auto_refresh=False) as live:
        while True:
            time.sleep(EVERY_SECONDS)
            try:
                live.update(render(fetch(url), console), refresh=True)
            except MoonpoolError as e:
                live.update(f"{e}; trying again", refresh=True)
    return 0


def fetch(url: str) -> State:
    """The state that the gateway at `url` tells. Raises MoonpoolError."""
    key = api_key()
    try:
        request = urllib.request.Request(url.rstrip("/") + "/cluster")
        if key:
            request.add_header("Authorization", f"Bearer {key}")
        with urllib.request.urlopen(request, timeout=CALL_SECONDS) as answer:
            return msgspec.json.decode(answer.read(MAX_ANSWER_BYTES), type=State)
    except urllib.error.HTTPError as e:
        raise MoonpoolError(f"{url} answered {e.code} to /cluster{key_hint(e.code)}") from None
    except (OSError, ValueError) as e:
        reason = getattr(e, "reason", e)
        raise MoonpoolError(
            f"no cluster answers at {url} ({getattr(reason, 'strerror', None) or reason}): "
            "start one with `moonpool serve`, or say where it is with --url"
        ) from None


def render(state: State, console: Console) -> RenderableType:
    """A table of the parts, as wide as `console` allows, and below it what they do."""
    rows = [_row(part, state.counters.get(part.id, {})) for part in state.parts]
    table = _table(rows, ())
    for count in range(1, len(DROPPED) + 1):
        if _width(table, console) <= console.width:
            break
        table = _table(rows, DROPPED[:count])
    phases = ", ".join(f"{count} {phase}" for phase, count in state.requests.items() if count) or "none"
    decided = ("arrived", "placed", "finished", "cancelled")
    numbers = ", ".join(f"{state.decisions.get(name, 0)} {name}" for name in decided)
    rejected = state.decisions.get("rejected")
    refused = ", ".join(f"{count} {reason}" for reason, count in rejected.items()) if isinstance(rejected, dict) else ""
    return Group(
        f"placement {state.placement}, admission {state.admission}, context {state.context_tokens} tokens",
        table,
        f"requests now: {phases}",
        f"since start: {numbers}" + (f"; refused: {refused}" if refused else ""),
    )


def _table(rows: list[dict[str, str]], dropped: Sequence[str]) -> Table:
    """Of `rows` without the columns `dropped`, nor one for an SSD tier that no node has."""
    table = Table(box=SIMPLE, padding=(0, 1), collapse_padding=True, pad_edge=False)
    columns = [*_row(Part(), {})]
    shown = [name for name in columns if name not in dropped and (name != "SSD" or any(row[name] for row in rows))]
    for name in shown:
        table.add_column(name, justify="left" if name in ("part", "health", "node") else "right", no_wrap=True)
    for row in rows:
        table.add_row(*[row[name] for name in shown])
    return table


def _width(table: Table, console: Console) -> int:
    """Of all of it, with nothing cut."""
    return console.measure(table, options=console.options.update(max_width=ANY_WIDTH)).maximum


def _row(part: Part, counters: dict[str, float]) -> dict[str, str]:
    """By column, in the table's order."""
    pages = part.capacity.pages
    used = f"{pages - part.pages_free}/{pages}" if pages and part.pages_free is not None else ""
    dram = part.capacity.dram_bytes
    moved = counters.get("messenger_bytes_sent", 0.0) + counters.get("tcp_bytes_in", 0.0)
    return {
        "part": part.id,
        "health": part.health,
        "node": part.node,
        "runs": _number(part.running) if part.kind != "node" else "",
        "waits": _number(part.queued) if part.kind != "node" else "",
        "pages": used,
        "DRAM": _filled(part.used_bytes or 0, dram) if dram else "",
        "SSD": _ssd(counters),
        "blocks": _number(sum(part.blocks.values()) if part.blocks is not None else None),
        "rooms": _number(part.rooms),
        "moved": f"{moved / 2**20:.1f} MiB" if moved else "",
    }


def _ssd(counters: dict[str, float]) -> str:
    """Bytes used and in all, blocks that were wanted and came back from there, directories given up."""
    size, lost = counters.get("ssd_capacity_bytes", 0.0), counters.get("ssd_lost_volumes", 0.0)
    said = []
    if size:
        said.append(_filled(int(counters.get("ssd_used_bytes", 0.0)), int(size)))
        said.append(f"{counters.get('ssd_promotions', 0.0):.0f} hits")
    if lost:
        said.append(f"{lost:.0f} lost")
    return ", ".join(said)


def _filled(used: int, size: int) -> str:
    bits, unit = next(((b, u) for b, u in ((40, "TiB"), (30, "GiB")) if size >= 10 << b), (20, "MiB"))
    return f"{used / 2**bits:.1f}/{size / 2**bits:.1f} {unit}" if bits > 20 else f"{used >> 20}/{size >> 20} MiB"


def _number(value: int | None) -> str:
    return "" if value is None else str(value)
