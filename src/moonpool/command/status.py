"""`moonpool status`: the cluster as a table, from the gateway's /cluster. A field that is not there is left blank."""

from __future__ import annotations

import contextlib
import time
import urllib.error
import urllib.request

import msgspec
from rich.box import SIMPLE
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table

from moonpool.command.flags import admin_key
from moonpool.errors import MoonpoolError

EVERY_SECONDS = 1.0
CALL_SECONDS = 5.0
FILE_COLUMNS = 120
"""Where the output is no terminal."""
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
    """Show the table, again every second unless `once`. Raises MoonpoolError where nothing answers at first."""
    state = fetch(url)
    console = Console()
    if not console.is_terminal:
        console = Console(width=FILE_COLUMNS)
    if once:
        console.print(render(state))
        return 0
    with contextlib.suppress(KeyboardInterrupt), Live(render(state), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(EVERY_SECONDS)
            try:
                live.update(render(fetch(url)), refresh=True)
            except MoonpoolError as e:
                live.update(f"{e}; trying again", refresh=True)
    return 0


def fetch(url: str) -> State:
    """The state that the gateway at `url` tells. Raises MoonpoolError."""
    key = admin_key()
    try:
        request = urllib.request.Request(url.rstrip("/") + "/cluster")
        if key:
            request.add_header("Authorization", f"Bearer {key}")
        with urllib.request.urlopen(request, timeout=CALL_SECONDS) as answer:
            return msgspec.json.decode(answer.read(MAX_ANSWER_BYTES), type=State)
    except urllib.error.HTTPError as e:
        hint = ": set MOONPOOL_ADMIN_KEY" if e.code in (401, 403) else ""
        raise MoonpoolError(f"{url} answered {e.code} to /cluster{hint}") from None
    except (OSError, ValueError) as e:
        reason = getattr(e, "reason", e)
        raise MoonpoolError(
            f"no cluster answers at {url} ({getattr(reason, 'strerror', None) or reason}): "
            "start one with `moonpool serve`, or say where it is with --url"
        ) from None


def render(state: State) -> RenderableType:
    """A table of the parts, and below it what they do."""
    table = Table(box=SIMPLE, padding=(0, 1), pad_edge=False)
    for column in ("part", "health", "node"):
        table.add_column(column, no_wrap=column == "part")
    for column in ("runs", "waits", "pages", "DRAM", "blocks", "rooms", "moved"):
        table.add_column(column, justify="right", no_wrap=True)
    for part in state.parts:
        table.add_row(*_row(part, state.counters.get(part.id, {})))
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


def _row(part: Part, counters: dict[str, float]) -> list[str]:
    pages = part.capacity.pages
    used = f"{pages - part.pages_free}/{pages}" if pages and part.pages_free is not None else ""
    dram = part.capacity.dram_bytes
    moved = counters.get("messenger_bytes_sent", 0.0) + counters.get("tcp_bytes_in", 0.0)
    return [
        part.id,
        part.health,
        part.node,
        _number(part.running) if part.kind != "node" else "",
        _number(part.queued) if part.kind != "node" else "",
        used,
        f"{(part.used_bytes or 0) >> 20}/{dram >> 20} MiB" if dram else "",
        _number(sum(part.blocks.values()) if part.blocks is not None else None),
        _number(part.rooms),
        f"{moved / 2**20:.1f} MiB" if moved else "",
    ]


def _number(value: int | None) -> str:
    return "" if value is None else str(value)
