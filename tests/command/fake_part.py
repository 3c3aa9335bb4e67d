"""A part that only lives and dies, for tests of the supervisor: `fake_part.py BEHAVIOUR NOTES [--conductor …]`.

It appends a JSON line to the file NOTES for each life. Behaviours: `good`, `conductor` (notes the losses it hears of),
`mistake` (exit 2), `crash` (exit 1 before it is up), `once` (exits 3 after its first start, then lives), `deaf`
(ignores SIGTERM), `stuck` (its event loop never runs again), `slow` (takes a while to end, then notes whether the part
`node` still runs), `telling` (says what it does before it is up), `coming` (is never up), `clinging` (is never up, and
fails as soon as the part `node` has ended).
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import sys
import time
from pathlib import Path

from moonpool.core.events import Lost
from moonpool.core.vocabulary import PartId
from moonpool.errors import ConfigError
from moonpool.live.process import RESTART, Work, announce, fail, leave, run_part, tell
from moonpool.wire.link import Link

TOKEN = "MOONPOOL_CLUSTER_TOKEN"


def note(file: Path, **facts: object) -> None:
    with file.open("a") as notes:
        notes.write(json.dumps(facts) + "\n")


def block() -> None:
    while True:
        time.sleep(60)


def look_for_node(notes: Path) -> None:
    time.sleep(0.3)
    node = json.loads(notes.with_name("node").read_text().splitlines()[-1])["pid"]
    note(notes.with_suffix(".left"), node_runs=Path(f"/proc/{node}/cwd").exists())


def wait_for_end(notes: Path) -> None:
    """Of the process that wrote last there."""
    fd = os.pidfd_open(json.loads(notes.read_text().splitlines()[-1])["pid"])
    select.select([fd], [], [])


def prepare(behaviour: str, notes: Path, rest: list[str]) -> Work:
    lives = len(notes.read_text().splitlines()) if notes.exists() else 0
    note(notes, pid=os.getpid(), arguments=rest, token=os.environ[TOKEN], restart=os.environ[RESTART])
    if behaviour == "mistake":
        raise ConfigError("the key `colour` is unknown")
    if behaviour == "crash":
        raise RuntimeError("boom")

    async def work() -> None:
        if behaviour == "coming":
            await asyncio.Event().wait()
        if behaviour == "clinging":
            await asyncio.to_thread(wait_for_end, notes.with_name("node"))
            leave(1)
        if behaviour == "telling":
            tell("reading a long index")
        port = int(rest[rest.index("--control-port") + 1]) if "--control-port" in rest else 0
        link = Link(PartId(notes.name), "127.0.0.1", port, os.environ[TOKEN])
        announce(link.me, conductor=link.me.address if behaviour == "conductor" else "")
        if behaviour == "once" and not lives:
            leave(3)
        if behaviour == "deaf":
            asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if behaviour == "stuck":
            block()
        try:
            while True:
                match (await link.receive()).body:
                    case Lost(id=id, incarnation=incarnation, reason=reason):
                        note(notes.with_suffix(".lost"), id=id, incarnation=incarnation, reason=reason)
                    case _:
                        pass
        finally:
            if behaviour == "slow":
                look_for_node(notes)

    return work


if __name__ == "__main__":
    kind, file, *others = sys.argv[1:]
    try:
        leave(run_part(PartId(Path(file).name), "warning", False, lambda: prepare(kind, Path(file), others)))
    except Exception as e:
        leave(fail(e))
