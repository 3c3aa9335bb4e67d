"""A mistake in the configuration is said when vLLM starts, with the way out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import moonpool
from moonpool.connectors.settings import check_policy, check_supported, check_version, read_settings
from moonpool.errors import ConfigError


def test_only_the_node_is_required() -> None:
    settings = read_settings({"node": "/run/pool/node-0.sock", "load_seconds": 2})
    assert (settings.node, settings.load_seconds) == ("/run/pool/node-0.sock", 2)


@pytest.mark.parametrize(
    ("extra", "what"),
    [
        (None, '"node" is required'),
        ({"node": "10.0.0.1:9100"}, "the path of the socket"),
        ({"node": "/a.sock", "deadline": 3}, "deadline"),
        ({"node": "/a.sock", "load_seconds": 0}, "load_seconds"),
        ({"node": "/a.sock", "load_seconds": "2"}, "load_seconds"),
    ],
)
def test_what_is_wrong_is_named(extra: dict[str, object] | None, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        read_settings(extra)


def test_another_vllm_is_refused_with_those_that_are_known() -> None:
    check_version("0.32.0", False)
    check_version("0.32.1+cpu", False)
    check_version("0.40.0", True)
    for version in ("0.31.0", "1.32.0", "dev", ""):
        with pytest.raises(ConfigError, match=r"tested with vLLM 0\.32.*allow_untested_vllm"):
            check_version(version, False)


def test_one_that_lacks_what_the_connector_is_made_of_is_named_too(tmp_path: Path) -> None:
    """Its classes are gone before anybody can ask for its version."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text('__version__ = "0.10.2"')
    done = subprocess.run(
        [sys.executable, "-P", "-c", "import moonpool.connectors.vllm"],
        env={"PYTHONPATH": f"{Path(moonpool.__file__).parents[1]}:{tmp_path}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "ConfigError: vLLM 0.10.2: this Moonpool is tested with vLLM 0.32; install one of those" in done.stderr


def test_a_policy_that_fails_requests_is_refused() -> None:
    check_policy("recompute")
    with pytest.raises(ConfigError, match='"kv_load_failure_policy": "recompute"'):
        check_policy("fail")


class FullAttentionSpec:
    """vLLM's kinds count by their names."""


class SlidingWindowSpec(FullAttentionSpec):
    pass


def configured(**parallel: int) -> Any:
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 1, "decode_context_parallel_size": 1} | parallel
    return SimpleNamespace(parallel_config=SimpleNamespace(**sizes), speculative_config=None)


def cached(*specs: object) -> Any:
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs])


def test_what_would_not_be_moved_right_is_refused() -> None:
    whole = FullAttentionSpec()
    check_supported(configured(), cached(whole))
    check_supported(configured(), cached(SimpleNamespace(kv_cache_specs={"a": whole, "b": whole})))
    drafting = configured()
    drafting.speculative_config = object()
    refused = [
        (configured(pipeline_parallel_size=2), cached(whole), "pipeline_parallel_size 2"),
        (configured(decode_context_parallel_size=2), cached(whole), "decode_context_parallel_size 2"),
        (drafting, cached(whole), "speculative"),
        (configured(), cached(whole, whole), "2 groups"),
        (configured(), cached(SlidingWindowSpec()), "SlidingWindowSpec"),
        (configured(), cached(SimpleNamespace(kv_cache_specs={"a": whole, "b": SlidingWindowSpec()})), "SlidingWindow"),
    ]
    for config, caches, what in refused:
        with pytest.raises(ConfigError, match=what):
            check_supported(config, caches)
