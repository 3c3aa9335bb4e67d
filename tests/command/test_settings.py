"""Configuration: one file, flags over it, and mistakes that name the key and the way out."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from moonpool.command.settings import duration, keys_of, read_config, size
from moonpool.config import Config, as_flat
from moonpool.core.vocabulary import Slo
from moonpool.errors import ConfigError


def written(directory: Path, text: str) -> Path:
    file = directory / "moonpool.yaml"
    file.write_text(text)
    return file


def test_flags_override_the_file_and_the_file_overrides_defaults(tmp_path: Path) -> None:
    file = written(tmp_path, "prefill: 3\ndecode: 2\ndram-per-node: 2GiB\nslo-ttft: 250ms\nlog-json: true\n")
    config = read_config(file, {"decode": "5", "port": None})
    assert (config.fleet.prefill, config.fleet.decode, config.fleet.nodes) == (3, 5, 1)
    assert config.pool.dram_per_node == 2 << 30
    assert config.placement.slo_ttft == 0.25
    assert config.log.log_json
    assert config.front.port == Config().front.port


def test_a_written_tree_reads_back_the_same(tmp_path: Path) -> None:
    flags = {"prefill": "2", "slo-tbt": "80ms", "dram-per-node": "64MiB", "served-model-name": "little", "id": "node-7"}
    config = read_config(None, flags)
    assert read_config(written(tmp_path, yaml.safe_dump(as_flat(config))), {}) == config


CLASSES = """
classes:
  - {name: high, slo-ttft: 2s, slo-tbt: 100ms, share: 0.3}
  - {name: low, rank: 10, slo-ttft: 30}
"""


def test_priority_classes_are_a_list_in_the_file_or_in_one_of_their_own(tmp_path: Path) -> None:
    config = read_config(written(tmp_path, CLASSES), {})
    high, low = config.placement.classes
    assert (high.name, high.rank, high.slo, high.share) == ("high", 0, Slo(2.0, 0.1), 0.3)
    assert (low.name, low.rank, low.slo, low.share) == ("low", 10, Slo(ttft=30.0), 0.0)
    assert read_config(written(tmp_path, yaml.safe_dump(as_flat(config))), {}) == config
    own = tmp_path / "classes.yaml"
    own.write_text(CLASSES)
    assert read_config(None, {"classes": str(own)}) == config
    own.write_text(yaml.safe_dump(yaml.safe_load(CLASSES)["classes"]))
    assert read_config(written(tmp_path, f"classes: {own}"), {}) == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("classes: 3", "must be a list of classes"),
        ("classes: [high]", "classes[0]: must be a mapping with name, rank"),
        ("classes: [{name: a, slo: 3}]", "classes[0]: unknown key 'slo'"),
        ("classes: [{name: 3}]", "classes[0].name: must be text"),
        ("classes: [{name: a, rank: 0.5}]", "classes[0].rank 0.5: must be a whole number"),
        ("classes: [{name: a, share: much}]", "classes[0].share 'much': must be a number"),
        ("classes: [{name: a, slo-ttft: soon}]", "classes[0].slo-ttft 'soon': must be a duration"),
        ("classes: [{name: a, slo-ttft: 0}]", "classes: class 'a': a limit is 0 s"),
        ("classes: [{name: a}, {name: a}]", "classes: class 'a' is there twice"),
        ("classes: absent.yaml", "cannot read absent.yaml: No such file"),
    ],
)
def test_a_mistake_in_a_class_names_it(tmp_path: Path, text: str, message: str) -> None:
    file = written(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        read_config(file, {})
    line = str(caught.value)
    assert line.startswith(f"{file}: classes")
    assert message in line


def test_an_empty_file_is_the_defaults(tmp_path: Path) -> None:
    assert read_config(written(tmp_path, "# nothing\n"), {}) == Config()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prefill: 1\nprefil: 2", "line 2: unknown key `prefil`, did you mean `prefill`?"),
        ("request_timeout: 3", "unknown key `request_timeout`, did you mean `request-timeout`?"),
        ("zzz: 3", "unknown key `zzz`"),
        ("port: 99999", "port 99999: must be a whole number, at least 0, at most 65535"),
        ("port: eighty", "port 'eighty': must be a whole number"),
        ("port: 1.5", "port 1.5: must be a whole number"),
        ("port:", "port None: must be a whole number"),
        ("port: {a: 1}", "port {'a': 1}: must be a whole number"),
        ("nodes: true", "nodes True: must be a whole number, at least 1, at most 32"),
        ("dram-per-node: 1KiB", "dram-per-node '1KiB': must be a size like 512MiB or 2GiB, at least 1 MiB"),
        ("dram-per-node: 1 Gib", "dram-per-node '1 Gib': must be a size"),
        ("slo-tbt: 0", "slo-tbt 0: must be a duration like 30s or 200ms, above 0"),
        ("slo-tbt: fast", "slo-tbt 'fast': must be a duration"),
        ("placement: algoritm-1", "did you mean `algorithm-1`?"),
        ("eviction: lifo", "eviction 'lifo': must be one of length-aware, lfu, lru"),
        ("log-level: INFO", "must be one of debug, error, info, warning"),
        ("log-json: perhaps", "log-json 'perhaps': must be true or false"),
        ("served-model-name: 7", "served-model-name 7: must be text"),
        ("served-model-name: ''", "served-model-name '': must be text that is not empty"),
        ("model: ''", "model '': must be text that is not empty"),
        ("id: 'a b'", "id 'a b': must be a name"),
        ("host: ''", "host '': must be text that is not empty"),
        ("port: 1\nport: 2", "line 2: `port` is given twice"),
        ("- port", "must hold `key: value` lines"),
        ("port: [", "line 1 is not YAML"),
        ("model: !!python/object:os.system x", "is not YAML"),
    ],
)
def test_a_mistake_in_the_file_names_the_key_and_the_limit(tmp_path: Path, text: str, message: str) -> None:
    file = written(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        read_config(file, {})
    line = str(caught.value)
    assert str(file) in line
    assert message in line
    assert "\n" not in line


def test_a_mistake_in_a_flag_names_the_flag() -> None:
    with pytest.raises(ConfigError, match="--max-batch '0': must be a whole number, at least 1, at most 4096"):
        read_config(None, {"max-batch": "0"})


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*absent\.yaml: No such file"):
        read_config(tmp_path / "absent.yaml", {})
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        read_config(tmp_path / "binary", {})


def test_a_key_of_another_command_is_unknown(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown key `id`"):
        read_config(written(tmp_path, "id: node-0"), {}, ("model", "fleet"))


def test_keys_are_unique_and_described() -> None:
    fields = sum(len(section.__struct_fields__) for section in msgspec.structs.asdict(Config()).values())
    assert len(keys_of()) == fields
    assert all(key.description for key in keys_of().values())


def test_units() -> None:
    assert [size(text) for text in ("7", "1KiB", "1.5 MiB", "2GB")] == [7, 1024, 3 << 19, 2 * 10**9]
    assert [duration(text) for text in ("7", "30s", "200ms", "1.5m", "2h")] == [7, 30, 0.2, 90, 7200]


@given(st.text(max_size=12))
def test_any_text_as_a_value_is_taken_or_refused_in_one_line(text: str) -> None:
    for key in ("dram-per-node", "slo-ttft", "port", "placement", "id"):
        try:
            read_config(None, {key: text})
        except ConfigError as e:
            refusal = str(e)
        else:
            refusal = ""
        assert "\n" not in refusal


def test_limits_of_a_nodes_clients_are_keys(tmp_path: Path) -> None:
    config = read_config(written(tmp_path, "lease-limit: 2m\nclient-quota: 64MiB\n"), {})
    assert (config.pool.lease_limit, config.pool.client_quota) == (120.0, 64 << 20)
    assert Config().pool.client_quota is None


def test_the_ssd_tier_is_two_keys(tmp_path: Path) -> None:
    config = read_config(written(tmp_path, "ssd-per-node: 20GiB\nssd-dir: /mnt/a,/mnt/b\n"), {})
    assert (config.pool.ssd_per_node, config.pool.ssd_dir) == (20 << 30, "/mnt/a,/mnt/b")
    assert read_config(None, {"ssd-per-node": "0"}).pool.ssd_per_node == Config().pool.ssd_per_node == 0
