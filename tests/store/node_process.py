"""A node in a process of its own: name, Conductor's address, its configuration as JSON."""

from __future__ import annotations

import contextlib
import sys

import msgspec
import uvloop

from moonpool.core.vocabulary import PartId
from moonpool.store.node import NodeConfig, run_node
from moonpool.wire.link import Link


async def main(name: str, conductor: str, config: NodeConfig) -> None:
    link = Link(PartId(name), "127.0.0.1", 0, config.token)
    try:
        await run_node(link, conductor, config)
    finally:
        link.close()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(main(sys.argv[1], sys.argv[2], msgspec.json.decode(sys.argv[3], type=NodeConfig)))
