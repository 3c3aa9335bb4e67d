"""A mistake in the configuration is said when vLLM starts, with the way out."""

from __future__ import annotations

import pytest

from moonpool.connectors.settings import check_policy, check_version, read_settings
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


def test_a_policy_that_fails_requests_is_refused() -> None:
    check_policy("recompute")
    with pytest.raises(ConfigError, match='"kv_load_failure_policy": "recompute"'):
        check_policy("fail")
