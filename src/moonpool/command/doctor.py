"""`moonpool doctor`: what this machine lacks to run a cluster."""

from __future__ import annotations

import contextlib
import http.client
import os
import platform
import resource
import sys
from collections.abc import Callable

import msgspec
from rich.console import Console
from rich.markup import escape

from moonpool.command import machine
from moonpool.command.screen import reachable
from moonpool.command.serve import free_port
from moonpool.config import Config
from moonpool.errors import ConfigError

FEW_FILES = 1024
MODEL_DISK_BYTES = 1 << 30
"""A download, its conversion and a copy in the making."""
ASK_SECONDS = 2.0
MOST_ANSWER_BYTES = 1 << 12
LAST_PORT = 65535
RUNNING = "running cluster"


class Finding(msgspec.Struct, frozen=True):
    """`state` is ok, `poor` (it will work, but badly or not all of it) or `lacks` (it will not work)."""

    state: str
    what: str
    found: str
    remedy: str = ""


def doctor(host: str, port: int) -> int:
    """Print the findings; 1 if something essential is missing."""
    console = Console(highlight=False)
    colours = {"ok": "green", "poor": "yellow", "lacks": "red"}
    findings = examine(host, port)
    for finding in findings:
        console.print(
            f"[{colours[finding.state]}]{finding.state:6}[/]{finding.what:20} {escape(finding.found)}"
            + (f": {escape(finding.remedy)}" if finding.remedy else ""),
            soft_wrap=True,
        )
    lacking = [finding.what for finding in findings if finding.state == "lacks"]
    verdict = "this machine can run `moonpool serve`"
    if any(finding.what == RUNNING for finding in findings):
        verdict = "a cluster runs here already"
    console.print(f"missing: {', '.join(lacking)}" if lacking else verdict, soft_wrap=True)
    return 1 if lacking else 0


def examine(host: str, port: int) -> list[Finding]:
    """All findings for the default cluster; where one runs at this port, for another one beside it."""
    checks: list[Callable[[], Finding]] = [
        _python,
        _cores,
        _shared_memory,
        _disk,
        _curve,
        _files,
        _torch,
        _model,
    ]
    at_port, memory = _port(host, port), _memory()
    if at_port.what == RUNNING and memory.state == "lacks":
        memory = Finding("poor", "memory", memory.found, "too little for another cluster beside the one that runs")
    return [*(check() for check in checks), memory, at_port]


def _python() -> Finding:
    found = (
        f"{platform.python_implementation()} {platform.python_version()} on {platform.system()} {platform.machine()}"
    )
    if sys.platform != "linux":
        return Finding("lacks", "Python", found, "Moonpool needs Linux (memfd, flock, SO_PEERCRED)")
    return Finding("ok", "Python", found)


def _cores() -> Finding:
    count = machine.cores()
    vectors = "" if machine.has_avx2() else ", no AVX2: --quantize int8 will be refused"
    if count < 2:
        return Finding("poor", "CPU", f"{count} core{vectors}", "prefill and decode will share it")
    return Finding("ok", "CPU", f"{count} cores{vectors}")


def _memory() -> Finding:
    available = machine.available_memory()
    if available is None:
        return Finding("poor", "memory", "unknown", "cannot read /proc/meminfo")
    found = f"{machine.gib(available)} available"
    if available < machine.needed_memory(Config(), None):
        return Finding("lacks", "memory", found, "the default cluster takes up to 3.5 GiB; lower --dram-per-node")
    if available < 7 << 29:
        return Finding("poor", "memory", found, "the default cluster takes up to 3.5 GiB; lower --dram-per-node")
    return Finding("ok", "memory", found)


def _shared_memory() -> Finding:
    try:
        fd = os.memfd_create("moonpool-doctor")
    except (AttributeError, OSError) as e:
        return Finding("lacks", "shared memory", "no memfd", f"the arena needs memfd_create ({e})")
    try:
        os.posix_fallocate(fd, 0, 1 << 20)
    except OSError as e:
        return Finding("lacks", "shared memory", "memfd", f"cannot allocate in it: {e.strerror}")
    finally:
        os.close(fd)
    return Finding("ok", "shared memory", "memfd")


def _disk() -> Finding:
    from moonpool.engine.model import home

    where = home()
    free = machine.free_disk(where)
    found = f"{machine.gib(free)} free in {where}"
    parent = where
    while not parent.exists():
        parent = parent.parent
    if not os.access(parent, os.W_OK):
        return Finding("poor", "disk", found, "not writable: set MOONPOOL_HOME to pull a model")
    if free < MODEL_DISK_BYTES:
        return Finding("poor", "disk", found, f"pulling smollm2 needs {machine.gib(MODEL_DISK_BYTES)}")
    return Finding("ok", "disk", found)


def _curve() -> Finding:
    import zmq

    found = f"libzmq {zmq.zmq_version()}"
    if not zmq.has("curve"):
        return Finding("lacks", "CURVE encryption", found, "built without it; install the pyzmq wheel from PyPI")
    return Finding("ok", "CURVE encryption", found)


def _files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < FEW_FILES:
        return Finding("poor", "open files", f"{soft} (hard limit {hard})", f"raise it: ulimit -n {min(hard, 65536)}")
    return Finding("ok", "open files", f"{soft}")


def _torch() -> Finding:
    if missing := machine.lacking_packages():
        return Finding("lacks", "torch engine", f"no {', '.join(missing)}", machine.ENGINE_REMEDY)
    from importlib.metadata import version

    threads = os.environ.get("OMP_NUM_THREADS", "")
    found = f"torch {version('torch')}, transformers {version('transformers')}"
    return Finding("ok", "torch engine", found + (f", OMP_NUM_THREADS={threads}" if threads else ""))


def _model() -> Finding:
    from moonpool.engine.model import PULLABLE, home

    there = [name for name in PULLABLE if (home() / "models" / name).is_dir()]
    if not there:
        return Finding(
            "poor", "model", "smollm2 is not here", "the first start downloads it, or: moonpool pull smollm2"
        )
    return Finding("ok", "model", ", ".join(there))


def _port(host: str, port: int) -> Finding:
    try:
        free_port(host, port)
    except ConfigError as e:
        return _cluster_at(host, port) or Finding("lacks", "port", str(e))
    return Finding("ok", "port", f"{port} on {host} is free")


def _cluster_at(host: str, port: int) -> Finding | None:
    """None: what listens there is no gateway of ours."""
    with contextlib.suppress(OSError, http.client.HTTPException, msgspec.MsgspecError):
        version = msgspec.json.decode(_get(host, port, "/version")[1], type=_Version).version
        is_ready = _get(host, port, "/ready")[0] == http.HTTPStatus.OK
        found = f"version {version} at {host}:{port}, {'ready' if is_ready else 'not ready yet: see its log'}"
        look = f"moonpool status --url http://{reachable(host)}:{port} shows it"
        another = f"; another beside it: moonpool serve --port {port + 1}" if port < LAST_PORT else ""
        return Finding("ok" if is_ready else "poor", RUNNING, found, look + another)
    return None


class _Version(msgspec.Struct, forbid_unknown_fields=True):
    version: str


def _get(host: str, port: int, path: str) -> tuple[int, bytes]:
    """Raises OSError, HTTPException."""
    connection = http.client.HTTPConnection(reachable(host).strip("[]"), port, timeout=ASK_SECONDS)
    with contextlib.closing(connection):
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read(MOST_ANSWER_BYTES)
