"""A page of the documentation as a reader follows it: all that it shows, typed in order into one shell.

The shell stands in a folder that looks like a checkout after `make venv`. What it starts is the real thing, made small
(`served.py`); ports and paths are the stand's own.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil

from moonpool.bench.cluster import free_port
from moonpool.trace.kinds import parse_kind
from moonpool.trace.synthesize import synthesize
from moonpool.trace.write import write_trace
from tests.docs.fates import is_left_out
from tests.docs.pages import ROOT, Block, blocks_of
from tests.keys import make_key

SECONDS = 300.0
"""A hang guard."""
END_SECONDS = 20.0
TRACE = "poisson?n=40&rate=40&input=400&output=5&shared=.4&turns=2"
CHECKOUT = ("Makefile", "pyproject.toml", "constraints.txt", "examples")
KEY_ID = "3f9a0c12de"
GATEWAY = "127.0.0.1:8000"
SERVING = ("moonpool serve", "make serve", "moonpool gateway")
PROGRAMS = {
    "moonpool": 'exec {python} -P {root}/tests/docs/served.py "$@"',
    "python": '[ "$1 $2 $3" = "-P -m moonpool" ] && shift 3 && exec moonpool "$@"\nexec {python} -P "$@"',
}


class Stand:
    def __init__(self, folder: Path, model: Path) -> None:
        """`folder`: with a short path, for sockets. `model`: SmolLM2's directory."""
        self._folder = folder
        self._port = str(free_port())
        self._own = {
            GATEWAY: f"127.0.0.1:{self._port}",
            "9000": str(free_port()),
            "9100": str(free_port()),
            "/run/user/1000": str(folder),
            "/tmp/pool": str(folder / "pool"),
        }
        self._prepare(model)

    def _prepare(self, model: Path) -> None:
        """A checkout, and what pages take for granted: traces, a key with the id of their example, and this machine as
        `moonpool calibrate` leaves it."""
        for name in CHECKOUT:
            (self._folder / name).symlink_to(ROOT / name)
        programs = self._folder / ".venv" / "bin"
        programs.mkdir(parents=True)
        for name, text in PROGRAMS.items():
            (programs / name).write_text("#!/bin/sh\n" + text.format(python=sys.executable, root=ROOT) + "\n")
            (programs / name).chmod(0o755)
        (programs.parent / "installed").touch()
        for name in ("trace.jsonl", "conversation_trace.jsonl"):
            write_trace(self._folder / name, synthesize(parse_kind(TRACE)))
        make_key(self._folder / "keys.json", id_=KEY_ID)
        profiles = self._folder / "home" / "profiles"
        profiles.mkdir(parents=True)
        for name in ("models", "kernels"):
            (profiles.parent / name).symlink_to(model.parents[1] / name)
        shutil.copy(ROOT / "src/moonpool/sim/profiles/a800-llama2-70b.yaml", profiles / "local.yaml")
        (self._folder / ".curlrc").write_text("fail-with-body\nsilent\nshow-error\nmax-time = 60\n")

    def follow(self, page: str) -> str:
        """What it prints. Raises AssertionError with the end of that where a command fails."""
        log = self._folder / "page.log"
        with log.open("wb") as out:
            shell = subprocess.Popen(
                ["bash", "-euxc", self.script(page)],
                cwd=self._folder,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        try:
            status = shell.wait(SECONDS)
        finally:
            _end(shell.pid)
            shell.wait()
        said = log.read_text(errors="replace")
        assert status == 0, f"{page}: status {status}\n{said[-4000:]}"
        return said

    def script(self, page: str) -> str:
        blocks = blocks_of(page)
        lines = [self._rewritten(line) for block in blocks for line in self._lines(block)]
        first = next((block.text for block in blocks if any(each in block.text for each in (GATEWAY, *SERVING))), "")
        if not any(each in first for each in SERVING) and first:
            lines.insert(0, "moonpool serve --nodes 1")
        return "\n".join(("PS4='+ $SECONDS s: '", *lines))

    def _lines(self, block: Block) -> list[str]:
        """Files are written at once."""
        if block.language in ("python", "yaml"):
            (self._folder / block.file).write_text(self._rewritten(block.text))
        return [command.text for command in block.commands if not is_left_out(command.text)]

    def _rewritten(self, text: str) -> str:
        for theirs, ours in self._own.items():
            text = text.replace(theirs, ours)
        return text

    def _environment(self) -> dict[str, str]:
        known = {name: value for name, value in os.environ.items() if not name.startswith("MOONPOOL_")}
        return known | {
            "PATH": f"{self._folder / '.venv' / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]),
            "CURL_HOME": str(self._folder),
            "MOONPOOL_HOME": str(self._folder / "home"),
            "STAND_PORT": self._port,
            "XDG_RUNTIME_DIR": str(self._folder),
        }


def _end(group: int) -> None:
    """All that a shell has started."""
    left = [process for process in psutil.process_iter() if _group_of(process) == group]
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    until = time.monotonic() + END_SECONDS
    while any(_lives(process) for process in left) and time.monotonic() < until:
        time.sleep(0.05)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _group_of(process: psutil.Process) -> int:
    try:
        return os.getpgid(process.pid)
    except ProcessLookupError:
        return -1


def _lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
