"""What `moonpool replay` shows of a run under way, and says of one that is over."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from moonpool.report.run import Run

if TYPE_CHECKING:
    from moonpool.bench.replay import Replay
    from moonpool.bench.tally import Tally

LATE_SECONDS = 0.05
"""Sent so late (P99), the figures are not the endpoint's alone."""


class Shown:
    """A line that says how far it is, where stderr is a terminal."""

    def __init__(self, requests: int) -> None:
        console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            auto_refresh=False,
            disable=not console.is_terminal,
        )
        self._bar = self._progress.add_task("sending", total=requests)

    def __enter__(self) -> Shown:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def update(self, tally: Tally) -> None:
        done = tally.completed + tally.refused + tally.failed
        told = (
            f"{tally.sent} sent, {tally.streams} under way, {tally.completed} complete, {tally.refused} refused, "
            f"{tally.failed} failed, {tally.tokens} tokens"
        )
        self._progress.update(self._bar, completed=done, description=told, refresh=True)


@contextlib.contextmanager
def stopped_by_ctrl_c(run: Replay) -> Iterator[None]:
    """The first one ends the run, and its figures are shown; a second ends the program."""
    loop = asyncio.get_running_loop()

    def stop() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        run.stop()

    loop.add_signal_handler(signal.SIGINT, stop)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


def facts_of(run: Run, tally: Tally, warm_up: float) -> list[str]:
    """Where it was sent, and what a reader should know of the figures."""
    live = run.live
    assert live is not None, "it was no simulation"
    facts = [
        f"sent to {live.endpoint}, model {live.model}; latencies count from when a request was due, with connecting",
        f"measured: {run.summary.requests} requests in {live.seconds:.1f} s, "
        f"{live.prompt_tokens} prompt tokens in, {live.output_tokens} tokens out, "
        f"{live.output_tokens / max(live.seconds, 1e-9):.0f} tokens/s",
    ]
    if live.warm_up:
        facts.append(f"{live.warm_up} requests of the first {warm_up:g} s are not measured")
    if live.cut_off:
        facts.append(f"interrupted: {live.cut_off} requests were under way and are left out, the rest was not sent")
    if tally.first_error:
        facts.append(f"{tally.failed} requests failed, the first: {tally.first_error}")
    client = live.client
    facts.append(
        f"replay itself: sent {client.lag.p99 * 1e3:.1f} ms late (P99), {client.lag.most * 1e3:.1f} ms at most; "
        f"its event loop {client.stall.p99 * 1e3:.1f} ms late (P99); {client.cpu_share:.0%} of a core, "
        f"{client.cpu_per_token * 1e6:.0f} µs a token"
    )
    if client.full:
        facts.append(f"{client.full} requests waited because {client.most_streams} were under way: see --most-streams")
    if max(client.lag.p99, client.stall.p99) > LATE_SECONDS:
        facts.append("replay was late: its machine is busy, and the figures are not the endpoint's alone")
    return [*facts, *live.notes]
