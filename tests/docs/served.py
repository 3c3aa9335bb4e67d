"""The stand's `moonpool`: the real one, made small and quick, on a port that is free.

`serve` goes on in the background. It returns when the cluster is ready; what served before has ended then, as by the
reader's Ctrl-C. Without options it is what a newcomer starts: the real model.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from moonpool.bench.cluster import RunningCluster

END_SECONDS = 20.0
LOG, PROCESS = Path("served.log"), Path("served.pid")


def main(words: list[str], port: str) -> None:
    name, *given = words
    url = f"http://127.0.0.1:{port}"
    quick = ("--engine", "timed", "--hardware", "h200-llama2-70b", "--shrink-kv", "2560")
    sizes = {
        "serve": ("--dram-per-node", "64MiB", "--host", "127.0.0.1", "--port", port),
        "gateway": ("--port", port),
        "node": ("--dram-per-node", "64MiB"),
        "explain": ("--url", url),
    }
    # Of a flag that is given twice the last counts.
    before = quick if name in ("gateway", "prefill", "decode") or (name == "serve" and given) else ()
    command = [sys.executable, "-P", "-m", "moonpool", name, *before, *given, *sizes.get(name, ())]
    if name != "serve":
        os.execv(command[0], command)
    end_former(url)
    with LOG.open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    PROCESS.write_text(str(process.pid))
    RunningCluster(process, url, LOG).wait_ready()


def end_former(url: str) -> None:
    if not PROCESS.exists():
        return
    os.kill(int(PROCESS.read_text()), signal.SIGTERM)
    former, until = RunningCluster(None, url, LOG), time.monotonic() + END_SECONDS  # type: ignore[arg-type]
    while time.monotonic() < until:
        try:
            former.get("/health")
        except OSError:
            return
        time.sleep(0.05)
    sys.exit("what served before does not end")


if __name__ == "__main__":
    main(sys.argv[1:], os.environ["STAND_PORT"])
