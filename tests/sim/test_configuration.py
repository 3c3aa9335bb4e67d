from __future__ import annotations

from pathlib import Path

import pytest

from moonpool.core.conductor import ConductorConfig
from moonpool.core.vocabulary import Slo
from moonpool.errors import ConfigError
from moonpool.sim.cluster import Setup
from moonpool.sim.configuration import configuration_keys, read_configuration
from moonpool.sim.profile import load_profile

BASE = Setup(load_profile("a800-llama2-70b"), 8, 8, ConductorConfig(placement="load-balance", slo=Slo(30.0, 0.1)))


def write(folder: Path, text: str) -> Path:
    file = folder / "mine.yaml"
    file.write_text(text)
    return file


def test_what_the_file_lacks_is_as_given(tmp_path: Path) -> None:
    file = write(tmp_path, "prefill: 3\nadmission: none\nttft: 5\noutput-share: 0.5\neviction: lfu\n")
    found = read_configuration(file, BASE)
    assert found.name == "mine"
    setup = found.setup
    assert (setup.prefill, setup.decode, setup.eviction) == (3, 8, "lfu")
    rules = setup.conductor
    assert (rules.placement, rules.admission, rules.output_share) == ("load-balance", "none", 0.5)
    assert rules.slo == Slo(5.0, 0.1)
    assert setup.profile == BASE.profile
    assert read_configuration(write(tmp_path, ""), BASE).setup == BASE
    small = read_configuration(write(tmp_path, "hardware: h100-llama2-70b\ndram-tokens: 2048\n"), BASE).setup.profile
    assert (small.name, small.dram_tokens) == ("h100-llama2-70b", 2048)
    assert read_configuration(write(tmp_path, "name: other"), BASE).name == "other"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("placment: random", r"unknown key `placment`; the keys are name, hardware, dram-tokens, ttft, tbt, prefill"),
        ("placement: best", r"mine.yaml: .*'best'"),
        ("prefill: 6\npipeline: 4", r"`pipeline` is 4; it must divide the 6 prefill machines"),
        ("pipeline: 0", r"`pipeline` is 0; it must divide"),
        ("dram-tokens: 100", r"`dram-tokens` is 100; give the tokens .* at least 512"),
        ("dram-tokens: much", r"`dram-tokens` is much; give the tokens"),
        ("prefill: 0", r"`prefill` is 0; give a number from 1 to 4096"),
        ("threshold: 0.5", r"threshold is 0.5; the least is 1"),
        ("prefill: many", r"Expected `int`, got `str`.*prefill"),
        ("hardware: h9000", "no hardware profile 'h9000'"),
        ("- 1", "must be keys with values"),
        ("a: [", "is no YAML"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        read_configuration(write(tmp_path, text), BASE)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the configuration .*none.yaml"):
        read_configuration(tmp_path / "none.yaml", BASE)


def test_what_the_hardware_gives_is_no_key() -> None:
    assert not {"seed", "slo", "profile", "conductor", "prefill-cost"} & set(configuration_keys())
