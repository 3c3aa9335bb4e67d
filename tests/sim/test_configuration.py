from __future__ import annotations

from pathlib import Path

import pytest

from moonpool.core.conductor import ConductorConfig
from moonpool.core.vocabulary import Slo
from moonpool.errors import ConfigError
from moonpool.sim.cluster import Setup
from moonpool.sim.configuration import configuration_keys, read_configuration
from moonpool.sim.coupled_cluster import CoupledSetup
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
    assert isinstance(setup, Setup)
    assert (setup.prefill, setup.decode, setup.eviction) == (3, 8, "lfu")
    rules = setup.conductor
    assert (rules.placement, rules.admission, rules.output_share) == ("load-balance", "none", 0.5)
    assert rules.slo == Slo(5.0, 0.1)
    assert setup.profile == BASE.profile
    assert read_configuration(write(tmp_path, ""), BASE).setup == BASE
    small = read_configuration(write(tmp_path, "hardware: h100-llama2-70b\ndram-tokens: 2048\n"), BASE).setup.profile
    assert (small.name, small.dram_tokens) == ("h100-llama2-70b", 2048)
    assert read_configuration(write(tmp_path, "name: other"), BASE).name == "other"


def test_a_file_may_be_of_coupled_workers(tmp_path: Path) -> None:
    text = "coupled: 4\ncoupled-mode: prefill-first\nrouting: round-robin\nttft: 5\neviction: lfu\ndram-tokens: 2048\n"
    setup = read_configuration(write(tmp_path, text), BASE).setup
    assert isinstance(setup, CoupledSetup)
    assert (setup.workers, setup.mode, setup.routing, setup.eviction) == (4, "prefill-first", "round-robin", "lfu")
    assert (setup.slo, setup.profile.dram_tokens) == (Slo(5.0, 0.1), 2048)


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
        ("coupled: 0", r"`coupled` is 0; give a number from 1 to 4096"),
        ("coupled: 2\nchunk: 0", r"`chunk` is 0; give a number from 1 to"),
        ("coupled: 2\nprefill: 2", "coupled workers have no `prefill`; their keys are name, hardware"),
        ("coupled: 2\ncoupled-mode: best", "'best' - at `coupled-mode`"),
        ("routing: round-robin", "`routing` is of coupled workers; give `coupled`"),
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
