"""What `moonpool serve` shows: a line for each part that comes up or ends, and how to talk to the cluster."""

from __future__ import annotations

import contextlib
import shlex
import shutil
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from moonpool.config import Config
from moonpool.live.supervisor import Progress


def reachable(host: str) -> str:
    """An address for a client on this machine."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)


def command() -> str:
    """How this very program is called from here; can be pasted into a shell."""
    found = shutil.which("moonpool")
    beside = Path(sys.executable).with_name("moonpool")
    if found is not None and Path(found) == beside:
        return "moonpool"
    return shlex.join([str(beside)] if beside.exists() else [sys.executable, "-m", "moonpool"])


class Screen:
    """Progress lines. Nothing moves: the parts' log lines come to the same terminal."""

    def __init__(self, config: Config) -> None:
        self._console = Console(highlight=False)
        self._began = time.monotonic()
        self._config = config
        fleet = config.fleet
        workers = f"{fleet.coupled} coupled" if fleet.coupled else f"{fleet.prefill} prefill, {fleet.decode} decode"
        workers += f", {fleet.inline} coupled for short prompts" if fleet.inline else ""
        computed: str = config.model.engine
        if computed == "torch" and config.model.quantize != "none":
            computed += f", weights in {config.model.quantize}"
        self._say(
            f"[bold]moonpool[/] serves {escape(config.served_name)} ({computed}): "
            f"{workers}, {fleet.nodes} node{'s' if fleet.nodes > 1 else ''}"
        )
        if config.model.engine == "timed":
            self._say(
                "  the timed engine computes nothing: it sleeps as long as a model would, and its answers are made up"
            )

    def show(self, progress: Progress) -> None:
        since = f"{time.monotonic() - self._began:6.1f} s"
        match progress.state:
            case "starting":
                self._say(f"  [dim]starts[/] {progress.part:12} {since}  {escape(progress.detail)}".rstrip())
            case "up":
                self._say(f"  [green]up[/]     {progress.part:12} {since}")
            case _:
                self._say(f"  [red]ended[/]  {progress.part:12} {since}  {escape(progress.detail)}; starting it again")

    def ready(self) -> None:
        host, port = self._config.front.host, self._config.front.port
        shown = f"[{host}]" if ":" in host else reachable(host)
        url = f"http://{shown}:{port}"
        body = f'{{"model": "{self._config.served_name}", "messages": [{{"role": "user", "content": "Hello!"}}]'
        body += ', "temperature": 0}'
        self._say(f"[bold green]ready[/] after {time.monotonic() - self._began:.1f} s: [bold]{url}[/]")
        key = '-H "authorization: Bearer $MOONPOOL_API_KEY" ' if self._config.front.keys else ""
        self._say(
            f"\n  curl {url}/v1/chat/completions {key}-H 'content-type: application/json' \\\n       -d '{body}'\n\n"
            f"Ctrl-C stops everything; {url}/dashboard and `{command()} status --url {url}` show the cluster.",
            markup=False,
        )

    def stopping(self) -> None:
        self._say("stopping")

    def _say(self, line: str, markup: bool = True) -> None:
        """A reader that has gone away (`| head`) does not end the cluster; rich would end the process."""
        with contextlib.suppress(OSError, SystemExit):
            self._console.print(line, soft_wrap=True, markup=markup)
