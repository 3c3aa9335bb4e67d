"""The file of `moonpool gateway --instances`."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from moonpool.command.instances import read_instances
from moonpool.errors import ConfigError

GOOD = {"model": "m", "tokenizer": "tok", "instances": [{"url": "http://a:8000/v1/"}]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tok").mkdir()
    (tmp_path / "tok" / "tokenizer.json").write_text("{}")
    return tmp_path


def write(folder: Path, content: object) -> Path:
    file = folder / "vllm.yaml"
    file.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return file


def test_what_is_left_out_has_a_default(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY", "secret")
    second = {"url": "https://b", "id": "big", "role": "both", "max-sequences": 8, "api-key-env": "KEY"}
    read = read_instances(write(folder, {**GOOD, "instances": [*GOOD["instances"], second]}))
    assert read.tokenizer == folder / "tok"
    first, other = read.instances.instances
    assert (first.id, first.url, first.role, first.max_sequences, first.api_key) == (
        "vllm-0",
        "http://a:8000",
        "both",
        256,
        None,
    )
    assert (other.id, other.url, other.max_sequences, other.api_key) == ("big", "https://b", 8, "secret")


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"instances": []}, "none is given, and no allowed-addresses"),
        ({"allowed-addresses": ["10.0.0.0/24", "http://a"]}, "'http://a' must be an address, a network"),
        ({"allowed-addresses": ["10.0.0.300"]}, "'10.0.0.300' must be"),
        ({"instances": [{"url": "a:8000"}]}, r"instances\[0\].*must be like http://host:8000"),
        ({"instances": [{"url": "http://a:99999"}]}, "must be like"),
        ({"instances": [{"url": "http://a", "role": "both "}]}, "role"),
        ({"instances": [{"url": "http://a", "port": 1}]}, "port"),
        ({"instances": [{"url": "http://a"}, {"url": "http://a/v1"}]}, "two instances have the url http://a"),
        ({"instances": [{"url": "http://a", "id": "x"}, {"url": "http://b", "id": "x"}]}, "the id x"),
        ({"instances": [{"url": "http://a", "api-key-env": "NO_SUCH_KEY"}]}, "no NO_SUCH_KEY"),
        ({"instances": [{"url": "http://a", "role": "prefill"}]}, "none of role decode or both"),
        ({"instances": [{"url": "http://a", "kv-events": "a:5557"}]}, "kv-events"),
        (
            {"instances": [{"url": "http://a", "kv-events": "tcp://a:1", "kv-events-listen": "tcp://b:1"}]},
            "not both",
        ),
        (
            {
                "instances": [
                    {"url": "http://a", "role": "prefill", "kv-transfer-params": True},
                    {"url": "http://b", "role": "decode"},
                ]
            },
            "must have it, or none",
        ),
        ({"model": ""}, "model"),
    ],
)
def test_a_mistake_is_named(folder: Path, changed: dict[str, object], says: str) -> None:
    file = write(folder, {**GOOD, **changed})
    with pytest.raises(ConfigError, match=says) as found:
        read_instances(file)
    assert str(file) in str(found.value)
    assert "\n" not in str(found.value)


def test_no_file_and_no_yaml(folder: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        read_instances(folder / "none.yaml")
    with pytest.raises(ConfigError, match="line 2 is not YAML"):
        read_instances(write(folder, "model: [\n"))
