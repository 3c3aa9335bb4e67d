"""What may be registered while the gateway runs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from moonpool.command.instances import External, read_instances
from moonpool.command.registrar import read_instance
from moonpool.core.vocabulary import PartId
from moonpool.errors import ConfigError


@pytest.fixture
def external(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> External:
    monkeypatch.setenv("VLLM_KEY", "secret")
    monkeypatch.setenv("OTHER_SECRET", "of somebody else")
    (tmp_path / "tokenizer.json").write_text("{}")
    file = tmp_path / "vllm.yaml"
    served = [{"url": "http://10.0.0.1:8000", "api-key-env": "VLLM_KEY"}]
    allowed = ["10.0.0.0/24", "fd00::/8", "Big.example"]
    file.write_text(yaml.safe_dump({"model": "m", "tokenizer": ".", "instances": served, "allowed-addresses": allowed}))
    return read_instances(file)


def read(external: External, **server: Any) -> Any:
    return read_instance(external, json.dumps(server).encode(), {PartId("vllm-0")})


@pytest.mark.parametrize("host", ["10.0.0.7", "[fd00::1]", "big.example", "BIG.EXAMPLE"])
def test_allowed_addresses_are_taken(external: External, host: str) -> None:
    made = read(external, url=f"http://{host}:8000/v1", **{"api-key-env": "VLLM_KEY", "max-sequences": 4})
    assert (made.id, made.url, made.api_key, made.max_sequences) == ("vllm-1", f"http://{host}:8000", "secret", 4)
    assert read(external, url=f"http://{host}:8000", id="big").id == "big"


@pytest.mark.parametrize(
    ("server", "says"),
    [
        ({"url": "http://10.0.1.1:8000"}, "http://10.0.1.1:8000 is not among the allowed-addresses"),
        ({"url": "http://10.0.0.1@169.254.169.254"}, "must be like"),
        ({"url": "http://169.254.169.254\\@10.0.0.1"}, "must be like"),
        ({"url": "http://10.0.0.1/\r\nHost: evil"}, "must be like"),
        ({"url": "http://[10.0.0.1"}, "must be like"),
        ({"url": "http://\uff11\uff10.0.0.1"}, "must be like"),
        ({"url": "http://10.0.0.1.evil.example"}, "not among"),
        ({"url": "http://[::ffff:10.0.0.1]:8000"}, "not among"),
        ({"url": "http://localhost:8000"}, "not among"),
        ({"url": "http://10.0.0.1", "kv-events": "tcp://192.168.0.1:5557"}, "tcp://192.168.0.1:5557 is not among"),
        ({"url": "http://10.0.0.1", "kv-events": "tcp://10.0.0.1:1;192.168.0.1:5557"}, "not among"),
        ({"url": "http://10.0.0.1", "kv-events": "tcp://[10.0.0.1"}, "not among"),
        ({"url": "http://10.0.0.1", "kv-events": "ipc:///run/other.sock"}, "ipc:///run/other.sock is not among"),
        ({"url": "http://10.0.0.1", "kv-events-replay": "tcp://*:5557"}, "not among"),
        ({"url": "http://10.0.0.1", "api-key-env": "OTHER_SECRET"}, "OTHER_SECRET is not one that"),
        ({"url": "file:///etc/passwd"}, "must be like http://host:8000"),
        ({"url": "http://10.0.0.1", "id": "gateway-0"}, "id gateway-0 is what a part of the cluster itself"),
        ({"url": "http://10.0.0.1", "id": "vllm-0.cache"}, "of the cluster itself"),
        ({"url": "http://10.0.0.1", "colour": "red"}, "colour"),
        ({}, "url"),
    ],
)
def test_anything_else_is_not(external: External, server: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        read(external, **server)


def test_no_json(external: External) -> None:
    with pytest.raises(ConfigError, match="no instance"):
        read_instance(external, b"url: x", set())
