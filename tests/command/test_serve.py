"""A whole cluster as a user runs it: it comes up, comes back, and goes away without a trace."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from moonpool.bench.cluster import RunningCluster, free_port

GUARD_SECONDS = 90.0
STOP_SECONDS = 25.0
"""Five times what it may take (`make bench` measures it): only a guard."""

pytestmark = pytest.mark.live
Start = Callable[..., RunningCluster]


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An own XDG_RUNTIME_DIR, short enough for sockets."""
    path = Path(tempfile.mkdtemp(prefix="mp", dir="/tmp"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(path))
    yield path
    shutil.rmtree(path)


def until(holds: Callable[[], bool], seconds: float = GUARD_SECONDS) -> float:
    """Seconds until it holds. Fails the test when it takes longer than `seconds`."""
    began = time.monotonic()
    while not holds():
        assert time.monotonic() - began < seconds, "took too long"
        time.sleep(0.05)
    return time.monotonic() - began


def parts(cluster: RunningCluster) -> dict[str, psutil.Process]:
    """The processes of the cluster's parts, by id."""
    found = {}
    for process in psutil.Process(cluster.process.pid).children():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            if "--id" in words:
                found[words[words.index("--id") + 1]] = process
    return found


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def incarnations(cluster: RunningCluster) -> dict[str, str]:
    with contextlib.suppress(OSError):
        return {part["id"]: part["incarnation"] for part in cluster.describe()["parts"]}  # type: ignore[attr-defined]
    return {}


def answer(url: str, prompt: str = "Hello") -> str:
    body = {"model": "smollm2", "prompt": prompt, "max_tokens": 4, "temperature": 0}
    request = urllib.request.Request(
        url + "/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=GUARD_SECONDS) as response:
        return str(json.load(response)["choices"][0]["text"])


def supervised(cluster: RunningCluster) -> dict[str, float]:
    """How many clients of each node it knows as workers of its own supervisor."""
    counters: dict[str, dict[str, float]] = cluster.describe()["counters"]  # type: ignore[assignment]
    return {part: values.get("supervised_clients", 0.0) for part, values in counters.items() if part.startswith("node")}


def left(runtime: Path) -> list[Path]:
    return [path for path in runtime.rglob("*") if path.is_dir() and path.parent == runtime / "moonpool"]


def test_it_stops_in_time_and_leaves_nothing(start_cluster: Start, runtime: Path) -> None:
    cluster = start_cluster(engine="timed", nodes=2, prefill=2, decode=2)
    running = parts(cluster)
    assert sorted(running) == ["decode-0", "decode-1", "gateway-0", "node-0", "node-1", "prefill-0", "prefill-1"]
    assert answer(cluster.url)
    until(lambda: supervised(cluster) == {"node-0": 2.0, "node-1": 2.0})
    assert len(left(runtime)) == 1
    cluster.process.send_signal(signal.SIGINT)
    assert cluster.process.wait(STOP_SECONDS) == 0
    assert not alive(list(running.values()))
    assert not left(runtime)


def test_killing_the_supervisor_ends_its_parts_and_not_those_of_another(start_cluster: Start, runtime: Path) -> None:
    other = start_cluster(engine="timed")
    theirs = incarnations(other)
    cluster = start_cluster(engine="timed")
    running = list(parts(cluster).values())
    assert len(left(runtime)) == 2
    cluster.process.kill()
    until(lambda: not alive(running), STOP_SECONDS)
    assert len(left(runtime)) == 2
    third = start_cluster(engine="timed")
    assert len(left(runtime)) == 2, "the dead cluster's directory is removed, the living one's is not"
    assert incarnations(other) == theirs
    assert answer(other.url)
    assert answer(third.url)


def test_the_doctor_beside_a_cluster_knows_it_for_one(start_cluster: Start, runtime: Path) -> None:
    cluster = start_cluster(engine="timed")
    port = int(cluster.url.rsplit(":", 1)[1])
    told = subprocess.run(
        [sys.executable, "-m", "moonpool", "doctor", "--port", str(port)],
        capture_output=True,
        text=True,
        timeout=GUARD_SECONDS,
    )
    assert told.returncode == 0, told.stdout
    assert re.search(rf"^ok +running cluster +version \S+ at 127.0.0.1:{port}, ready: ", told.stdout, re.MULTILINE)
    assert f"moonpool status --url {cluster.url} shows it; another beside it: moonpool serve --port {port + 1}" in (
        told.stdout
    )
    assert told.stdout.rstrip().endswith("a cluster runs here already")
    assert "lacks" not in told.stdout
    assert "is taken" not in told.stdout


def test_a_second_serve_on_the_same_port_is_refused_in_one_line(start_cluster: Start, runtime: Path) -> None:
    cluster = start_cluster(engine="timed")
    port = cluster.url.rsplit(":", 1)[1]
    second = subprocess.run(
        [sys.executable, "-m", "moonpool", "serve", "--engine", "timed", "--port", port],
        capture_output=True,
        text=True,
        timeout=GUARD_SECONDS,
    )
    assert second.returncode == 2
    assert second.stderr == (
        f"moonpool: port {port} on 127.0.0.1 is taken: stop what listens there, or choose another with --port\n"
    )
    assert answer(cluster.url)


@pytest.mark.parametrize(
    "command", [("serve", "--engine", "timed", "--port", "0"), ("node", "--conductor", "127.0.0.1:9")]
)
@pytest.mark.parametrize(
    ("size", "directory", "message"),
    [
        ("900TiB", "", r"900\.0 TiB more needed.*--ssd-per-node or another --ssd-dir"),
        ("1GiB", "/proc/x", r"SSD directory /proc/x/node-0: No such file or directory; choose another --ssd-dir"),
    ],
)
def test_an_ssd_tier_that_cannot_be_is_refused_in_one_line(
    command: tuple[str, ...], size: str, directory: str, message: str, runtime: Path, tmp_path: Path, smollm2: Path
) -> None:
    ssd = ("--ssd-per-node", size, "--ssd-dir", directory or str(tmp_path / "new" / "ssd"))
    refused = subprocess.run(
        [sys.executable, "-m", "moonpool", *command, "--dram-per-node", "1MiB", *ssd],
        capture_output=True,
        text=True,
        timeout=GUARD_SECONDS,
    )
    assert refused.returncode == 2
    assert re.fullmatch(rf"moonpool: .*{message}\n", refused.stderr)
    assert not refused.stdout
    assert not [*tmp_path.iterdir()]
    assert not left(runtime)


@pytest.mark.parametrize("part", ["prefill-0", "decode-0", "node-0", "gateway-0"])
def test_a_killed_part_comes_back_and_the_cluster_serves(start_cluster: Start, runtime: Path, part: str) -> None:
    cluster = start_cluster(engine="timed")
    before = incarnations(cluster)
    text = answer(cluster.url)
    parts(cluster)[part].kill()
    lost = {part, "prefill-0", "decode-0"} if part == "node-0" else {part}
    until(lambda: all(incarnations(cluster).get(id, before[id]) != before[id] for id in lost))
    cluster.wait_ready()
    after = incarnations(cluster)
    assert {id for id in after if after[id] != before[id]} == lost
    assert answer(cluster.url) == text


def test_it_runs_from_a_directory_with_spaces_and_reads_its_file_there(
    start_cluster: Start, runtime: Path, tmp_path: Path, smollm2: Path
) -> None:
    directory = tmp_path / "a path with spaces"
    directory.mkdir()
    (directory / "my model").symlink_to(smollm2)
    (directory / "my cluster.yaml").write_text("model: my model\nserved-model-name: smollm2\nengine: timed\n")
    cluster = start_cluster(config="my cluster.yaml", cwd=directory)
    assert answer(cluster.url)


def test_parts_started_by_hand_serve_and_a_stranger_does_not_join(runtime: Path, tmp_path: Path, smollm2: Path) -> None:
    port, control = free_port(), free_port()
    cluster_token, other_token = "the token of this cluster", "the token of another one"
    with contextlib.ExitStack() as stack:

        def start(kind: str, token: str, *arguments: str) -> Path:
            log = tmp_path / f"{kind}-{len(list(tmp_path.iterdir()))}.log"
            command = [sys.executable, "-m", "moonpool", kind, *arguments]
            with log.open("wb") as out:
                process = subprocess.Popen(
                    command, stdout=out, stderr=out, env=os.environ | {"MOONPOOL_CLUSTER_TOKEN": token}
                )
            stack.callback(process.wait, GUARD_SECONDS)
            stack.callback(process.terminate)
            return log

        model = ("--model", str(smollm2), "--served-model-name", "smollm2", "--engine", "timed")
        join = ("--conductor", f"127.0.0.1:{control}")
        start("gateway", cluster_token, "--port", str(port), "--control-port", str(control), *model)
        start("node", cluster_token, *join, "--bind", "127.0.0.2")
        start("prefill", cluster_token, *join, "--bind", "127.0.0.3", *model)
        strange = start("prefill", other_token, *join, "--id", "prefill-9", *model)
        until(lambda: "listening" in strange.read_text())
        start("decode", cluster_token, *join, "--bind", "127.0.0.4", *model)
        url = f"http://127.0.0.1:{port}"

        def is_ready() -> bool:
            with contextlib.suppress(OSError), urllib.request.urlopen(url + "/ready", timeout=10):
                return True
            return False

        until(is_ready)
        assert answer(url)
        with urllib.request.urlopen(url + "/cluster", timeout=10) as response:
            state = json.load(response)
        assert sorted(part["id"] for part in state["parts"]) == ["decode-0", "gateway-0", "node-0", "prefill-0"]
        addresses = {part["id"]: part["address"] for part in state["parts"]}
        assert addresses["decode-0"].startswith("tcp://127.0.0.4:")


def test_the_default_cluster_stays_under_its_memory_limit(start_cluster: Start, runtime: Path) -> None:
    cluster = start_cluster()
    assert answer(cluster.url, "word " * 1000)
    processes = [psutil.Process(cluster.process.pid), *parts(cluster).values()]
    pss = sum(process.memory_full_info().pss for process in processes)
    arena = 1 << 30
    assert pss + arena < 3.5 * 2**30, "as if the whole arena were in use and counted nowhere yet"
