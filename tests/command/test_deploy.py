"""The examples in deploy/ name flags and keys that there are."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from moonpool.command.instances import read_instances
from moonpool.connectors.settings import read_settings
from tests.docs.command_line import parse

FOLDER = Path(__file__).parents[2] / "deploy" / "vllm"
SERVICES = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]

DOCKERFILE = (FOLDER / "Dockerfile").read_text()
SERVER: list[str] = json.loads(re.findall(r'^ENTRYPOINT (\["python".*)$', DOCKERFILE, re.MULTILINE)[0])[1:]


def commands() -> Iterator[list[str]]:
    """The words after `moonpool`, and after vLLM's `python`."""
    for unit in sorted(FOLDER.glob("*.service")):
        text = unit.read_text().replace("\\\n", " ")
        words = shlex.split(re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)[0])
        yield words[1:]
    for service in SERVICES.values():
        command = service["command"]
        yield shlex.split(command) if isinstance(command, str) else [*SERVER, *command]


COMMANDS = list(commands())
OURS = [words for words in COMMANDS if words[0] != "-m"]
VLLM = [words for words in COMMANDS if words[:2] == SERVER]


@pytest.mark.parametrize("words", OURS, ids=" ".join)
def test_flags_are_known(words: list[str]) -> None:
    parse([word.replace("%l", "host") for word in words])


def test_servers_load_the_connector() -> None:
    assert len(VLLM) == 3
    for words in VLLM:
        text = " ".join(words)
        found = re.search(r"--kv-transfer-config[ =](\{.*?\}\})", text)
        assert found, text
        config = json.loads(found[1])
        assert config["kv_connector_module_path"] == "moonpool.connectors.vllm"
        assert config["kv_load_failure_policy"] == "recompute"
        assert read_settings(config["kv_connector_extra_config"]).node.startswith("/run/moonpool/")


def test_the_gateway_s_file_names_the_servers_of_compose(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    file = tmp_path / "vllm.yaml"
    file.write_text((FOLDER / "vllm.yaml").read_text().replace("/model", str(tmp_path)))
    read = read_instances(file).instances
    ports = [word.partition("=")[2] for words in VLLM for word in words if word.startswith("--port=")]
    assert [instance.url for instance in read.instances] == [f"http://127.0.0.1:{port}" for port in ports]
    assert all(instance.pool for instance in read.instances)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_takes_the_units(tmp_path: Path) -> None:
    """Their programs are not where they say, here; all else is as it wants it."""
    for unit in FOLDER.glob("*.service"):
        text = re.sub(r"^ExecStart=/opt/\S+", "ExecStart=/bin/true", unit.read_text(), flags=re.MULTILINE)
        (tmp_path / unit.name).write_text(text)
    units = sorted(str(unit) for unit in tmp_path.iterdir())
    done = subprocess.run(["systemd-analyze", "verify", *units], capture_output=True, text=True, timeout=60)
    assert (len(units), done.returncode, done.stderr) == (4, 0, "")


@pytest.mark.skipif(shutil.which("docker-compose") is None, reason="docker-compose is not installed")
@pytest.mark.parametrize("model", ["/models/one", ""])
def test_compose_takes_its_file_once_the_model_is_named(model: str) -> None:
    words = ["docker-compose", "-f", str(FOLDER / "compose.yaml"), "config", "--services"]
    done = subprocess.run(words, env={**os.environ, "MODEL": model}, capture_output=True, text=True, timeout=60)
    if model:
        assert (done.returncode, sorted(done.stdout.split())) == (0, sorted(SERVICES)), done.stderr
    else:
        assert done.returncode
        assert "a directory with the model" in done.stderr
