"""A cluster on the timed engine that is a hardware profile: its sizes, its seconds, and what does not go together."""

from __future__ import annotations

import pytest

from moonpool import cli
from moonpool.command.hardware import hardware_of, sized, timed_config
from moonpool.command.settings import read_config
from moonpool.config import Config
from moonpool.core.cost import PrefillCoefficients, TransferCost
from moonpool.errors import ConfigError
from moonpool.sim.profile import load_profile, scaled

A800 = {"engine": "timed", "hardware": "a800-llama2-70b", "slow-down": "8", "shrink-kv": "2560"}


def test_sizes_that_are_not_given_are_the_hardwares() -> None:
    config = sized(read_config(None, A800 | {"dram-per-node": "64MiB", "max-batch": "32"}))
    assert config.pool.block_size == 512
    assert config.batch.prefill_chunk == config.batch.pipeline_chunk == 4096
    assert config.pool.decode_pages == 1_400_000 // 512
    assert config.pool.prefill_pages == 4 * (131_072 // 512 + 1)
    assert (config.pool.dram_per_node, config.batch.max_batch) == (64 << 20, 32)
    assert sized(config) == config, "a part reads again what `serve` has written"
    assert sized(read_config(None, A800)).pool.dram_per_node == 3_000_000 * 128
    assert sized(Config()) == Config()


def test_the_engine_has_the_profiles_kv_and_seconds() -> None:
    profile = hardware_of(read_config(None, A800))
    assert profile is not None
    assert profile == scaled(load_profile("a800-llama2-70b"), 8.0, 2560.0)
    made = timed_config(profile)
    assert made.layers * 2 * made.words_per_half * 8 == profile.kv_bytes_per_token == 128
    assert (made.context_tokens, made.decode) == (131_072, profile.decode)
    assert made.prefill == PrefillCoefficients(0.008, 8 * 1.1458e-4, 8 * 9.002e-10)
    one = timed_config(scaled(profile, 1.0, 8.0))
    assert (one.layers, one.words_per_half) == (1, 1)


def test_the_conductor_and_the_workers_expect_the_profiles_seconds_before_they_measure() -> None:
    profile, rules = scaled(load_profile("a800-llama2-70b"), 8.0, 2560.0), cli._rules(read_config(None, A800))
    assert (rules.prefill_cost, rules.decode_cost) == (profile.prefill, profile.decode)
    assert rules.transfer_cost.bytes_per_second == profile.link_bytes_per_second
    plain = cli._rules(Config())
    assert (plain.prefill_cost, plain.transfer_cost) == (PrefillCoefficients(), TransferCost())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"slow-down": "8"}, "--slow-down 8 is of a hardware profile: give --hardware"),
        ({"engine": "timed", "shrink-kv": "3"}, "--shrink-kv 3 is of a hardware profile"),
        ({"hardware": "a800-llama2-70b"}, "is for --engine timed: the torch engine is as fast as this machine"),
        (A800 | {"hardware": "abacus"}, "no hardware profile 'abacus'; choose one of a800"),
    ],
)
def test_what_does_not_go_together_is_told(given: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sized(read_config(None, given))


def test_kv_that_is_no_whole_words_is_refused() -> None:
    odd = scaled(load_profile("a800-llama2-70b"), 1.0, 2560.0)
    with pytest.raises(ConfigError, match="100 bytes of KV a token are no multiple of 16; --shrink-kv"):
        timed_config(
            type(odd)(**{name: getattr(odd, name) for name in odd.__struct_fields__} | {"kv_bytes_per_token": 100})
        )
