"""examples/kv_store.py does what it says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from moonpool.core.vocabulary import NodePeer

from .kit import Conductor

EXAMPLE = Path(__file__).parents[2] / "examples" / "kv_store.py"


def run(*options: str) -> str:
    done = subprocess.run([sys.executable, str(EXAMPLE), *options], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.live
def test_with_a_pool_of_its_own() -> None:
    said = run()
    assert "put 32 new blocks of 1 MiB" in said
    assert said.count("24 of 32 blocks of its prompt were there, each byte right") == 2
    assert said.count("node-1): the first block is on 2 node(s)") == 1


def test_with_a_running_node(conductor: Conductor) -> None:
    node: NodePeer = conductor.start_node("node-0", 64 << 20)
    assert "put 32 new blocks" in run("--node", node.socket_path)
    said = run("--node", node.data_address)
    assert "put 0 new blocks" in said
    assert "24 of 32 blocks of its prompt were there, each byte right" in said
