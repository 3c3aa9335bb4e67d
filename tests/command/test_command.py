"""The command as a user meets it: real processes, their exit status, their one line, and what they leave behind."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

GUARD_SECONDS = 60.0
MISTAKES = {
    "option": (("serve", "--prot", "1"), "no such option: --prot", "--help"),
    "command": (("sreve",), "no such command", "sreve"),
    "value": (("serve", "--max-batch", "0"), "--max-batch '0': must be a whole number, at least 1", ""),
    "no value": (("serve", "--port"), "--port", ""),
    "yaml key": (("serve", "--config", "{dir}/bad.yaml"), "line 2: unknown key `decod`, did you mean `decode`?", ""),
    "yaml file": (("serve", "--config", "{dir}/absent.yaml"), "cannot read", "absent.yaml"),
    "port taken": (("serve", "--port", "{taken}"), "port {taken} on 127.0.0.1 is taken", "--port"),
    "host": (("serve", "--host", "192.0.2.1", "--port", "0"), "192.0.2.1", ""),
    "open host": (("serve", "--host", "0.0.0.0"), "--host 0.0.0.0 is open to the network", "moonpool keys add NAME"),
    "open gateway": (("gateway", "--host", "::"), "--host :: is open to the network", "moonpool keys add NAME"),
    "no keys": (("serve", "--keys", "{dir}/absent"), "absent is not there", "moonpool keys add NAME --keys"),
    "open keys": (("gateway", "--keys", "{dir}/bad.yaml"), "open to others", "chmod 600"),
    "memory": (("serve", "--port", "0", "--dram-per-node", "100TiB"), "not enough memory", "--dram-per-node"),
    "model": (("serve", "--port", "0", "--model", "{dir}/nothing"), "nothing", ""),
    "empty model": (("serve", "--port", "0", "--model", "{dir}"), "config.json", ""),
    "pull": (("pull", "gpt-5"), "gpt-5", "smollm2"),
    "no conductor": (("node",), "--conductor is missing", "HOST:PORT"),
    "bad conductor": (("decode", "--conductor", "nowhere"), "--conductor nowhere: must be HOST:PORT", ""),
    "short token": (("node", "--conductor", "127.0.0.1:1", "--cluster-token-file", "{dir}/short"), "token", "16"),
    "no token": (("node", "--conductor", "127.0.0.1:1", "--bind", "0.0.0.0"), "cluster token", ""),
    "trace": (("trace", "hits", "{dir}/bad.yaml"), "bad.yaml line 1 is neither a JSON object", "CSV"),
    "no trace": (("trace", "describe", "{dir}/absent"), "cannot read", "absent"),
    "capacity": (("trace", "hits", "{dir}/x", "--capacity", "10q"), "--capacity '10q': must be numbers", "inf"),
    "block size": (("trace", "hits", "{dir}/x", "--block-size", "0"), "--block-size", "--help"),
    "token file": (("node", "--conductor", "127.0.0.1:1", "--cluster-token-file", "{dir}/x"), "cannot read", "token"),
}


@pytest.fixture
def runtime() -> Iterator[Path]:
    """An own XDG_RUNTIME_DIR, short enough for sockets."""
    path = Path(tempfile.mkdtemp(prefix="mp", dir="/tmp"))
    yield path
    shutil.rmtree(path)


def moonpool(*arguments: str, runtime: Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MOONPOOL_CLUSTER")}
    return subprocess.run(
        [sys.executable, "-m", "moonpool", *arguments],
        capture_output=True,
        text=True,
        timeout=GUARD_SECONDS,
        env=environment | {"XDG_RUNTIME_DIR": str(runtime), "HF_HUB_OFFLINE": "1"},
        cwd=cwd,
    )


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_and_exit_status_2_and_leaves_nothing(
    name: str, tmp_path: Path, runtime: Path, smollm2: Path
) -> None:
    (tmp_path / "bad.yaml").write_text("prefill: 1\ndecod: 2\n")
    (tmp_path / "short").write_text("secret\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        words = {"dir": str(tmp_path), "taken": str(taken.getsockname()[1])}
        arguments, *expected = MISTAKES[name]
        before = {child.pid for child in psutil.Process().children(recursive=True)}
        result = moonpool(*(argument.format(**words) for argument in arguments), runtime=runtime)
    assert result.returncode == 2, result.stderr
    assert result.stderr.count("\n") == 1, result.stderr
    assert result.stderr.startswith("moonpool: ")
    assert result.stdout == ""
    for text in expected:
        assert text.format(**words).lower() in result.stderr.lower()
    assert {child.pid for child in psutil.Process().children(recursive=True)} == before
    assert not [file for file in runtime.rglob("*") if file.is_file() and file.name != ".lock"]


def test_help_answers_at_once_without_the_heavy_libraries() -> None:
    script = (
        "import sys; sys.argv = ['moonpool', '--help']; import atexit, os; from moonpool import cli\n"
        "from moonpool.live import process\n"
        "process.leave = lambda status: print(sorted({'torch', 'transformers', 'zmq', 'numpy'} & set(sys.modules)))\n"
        "cli.main()"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=GUARD_SECONDS)
    assert "serve" in result.stdout
    assert result.stdout.rstrip().endswith("[]")


def test_help_costs_at_most_thrice_what_its_library_costs(runtime: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = str(runtime / "compiled")  # as an installed package has it

    def seconds(*arguments: str) -> float:
        before = os.times()
        subprocess.run([sys.executable, *arguments], env=environment, stdout=subprocess.DEVNULL, timeout=GUARD_SECONDS)
        after = os.times()
        return after.children_user + after.children_system - before.children_user - before.children_system

    library = min(seconds("-c", "import typer, typer.rich_utils") for _ in range(4))
    ours = min(seconds("-m", "moonpool", "--help") for _ in range(4))
    assert ours < 3 * library, f"{ours:.2f} s where the command line's library takes {library:.2f} s"


def test_every_command_has_help(runtime: Path) -> None:
    for command in (
        "serve",
        "gateway",
        "conductor",
        "node",
        "prefill",
        "decode",
        "pull",
        "status",
        "doctor",
        "version",
        "trace hits",
        "trace describe",
        "keys add",
        "keys list",
        "keys revoke",
    ):
        result = moonpool(*command.split(), "--help", runtime=runtime)
        assert result.returncode == 0
        assert command in result.stdout


@pytest.mark.parametrize(
    ("command", "own", "foreign"),
    [
        (
            "node",
            ("--conductor", "--data-port", "--run-dir", "--dram-per-node", "--ssd-dir", "--lease-limit"),
            ("--node", "--block-size", "--prefill-pages", "--decode-pages"),
        ),
        (
            "conductor",
            ("--control-port", "--bind", "--placement", "--queue-bound", "--journal"),
            ("--conductor", "--node", "--data-port", "--run-dir"),
        ),
        ("prefill", ("--node", "--prefill-pages", "--pipeline", "--stage"), ("--dram-per-node", "--decode-pages")),
        ("decode", ("--node", "--decode-pages", "--max-batch"), ("--ssd-dir", "--prefill-pages", "--pipeline")),
        ("coupled", ("--node", "--decode-pages", "--coupled-mode"), ("--eviction", "--prefill-pages", "--pipeline")),
    ],
    ids=["node", "conductor", "prefill", "decode", "coupled"],
)
def test_a_parts_help_lists_what_that_part_goes_by(
    command: str, own: tuple[str, ...], foreign: tuple[str, ...], runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # else names are cut off
    listed = set(re.findall(r"--[a-z][a-z-]*", moonpool(command, "--help", runtime=runtime).stdout))
    assert listed >= set(own)
    assert not listed & set(foreign)


def test_one_file_serves_every_part(tmp_path: Path, runtime: Path) -> None:
    file = tmp_path / "moonpool.yaml"
    file.write_text("block-size: 32\nprefill-pages: 8\nnode: node-3\ndata-port: 1\nconductor: 'nowhere'\n")
    result = moonpool("node", "--config", str(file), runtime=runtime)
    assert (result.returncode, "nowhere" in result.stderr) == (2, True), result.stderr
    refused = moonpool("node", "--block-size", "32", runtime=runtime)
    assert (refused.returncode, "no such option" in refused.stderr.lower()) == (2, True), refused.stderr


def test_version(runtime: Path) -> None:
    from moonpool import __version__

    for word in ("version", "--version"):
        assert moonpool(word, runtime=runtime).stdout == f"moonpool {__version__}\n"


def test_a_module_of_the_same_name_in_the_directory_does_not_matter(tmp_path: Path, runtime: Path) -> None:
    """`python -m` would look there first; the supervisor starts its parts with -P for that reason."""
    (tmp_path / "yaml.py").write_text("raise SystemExit(9)")
    script = "from moonpool.live.supervisor import Supervisor as S; import inspect; print(inspect.signature(S))"
    result = subprocess.run(
        [sys.executable, "-P", "-c", script], capture_output=True, text=True, timeout=GUARD_SECONDS, cwd=tmp_path
    )
    assert "'-P'" in result.stdout


def test_doctor_names_what_is_missing(runtime: Path, smollm2: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = moonpool("doctor", "--port", str(port), runtime=runtime)
    assert result.returncode == 1
    assert f"port {port} on 127.0.0.1 is taken" in result.stdout
    assert result.stdout.rstrip().endswith("missing: port")


def test_doctor_is_content_where_a_cluster_can_run(runtime: Path, smollm2: Path) -> None:
    result = moonpool("doctor", "--port", "0", runtime=runtime)
    assert result.returncode == 0, result.stdout
    for what in ("Python", "memory", "shared memory", "disk", "CURVE", "open files", "torch", "model", "port"):
        assert what in result.stdout
