"""The parts as the command puts them together."""

from __future__ import annotations

import asyncio

import pytest

from moonpool import cli
from moonpool.command.settings import read_config
from moonpool.core.vocabulary import PartId
from moonpool.store import node
from moonpool.store.node import NodeConfig
from moonpool.wire.link import Link


def test_a_node_gets_what_is_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[NodeConfig] = []

    async def run_node(link: Link, conductor: str, config: NodeConfig, *_: object) -> None:
        made.append(config)

    monkeypatch.setattr(node, "run_node", run_node)
    config = read_config(None, {"conductor": "127.0.0.1:9", "eviction": "length-aware", "dram-per-node": "64MiB"})
    asyncio.run(cli._node(config, None, PartId("node-0"))())
    assert [(c.eviction, c.dram_bytes) for c in made] == [("length-aware", 64 << 20)]
