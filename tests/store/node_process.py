"""A node in a process of its own: name, Conductor's address, run directory, bytes of DRAM, token."""

from __future__ import annotations

import asyncio
import contextlib
import sys

from moonpool.core.vocabulary import PartId
from moonpool.store.node import NodeConfig, run_node
from moonpool.wire.link import Link


async def main(name: str, conductor: str, run_dir: str, dram_bytes: str, token: str) -> None:
    link = Link(PartId(name), "127.0.0.1", 0, token or None)
    try:
        await run_node(link, conductor, NodeConfig(int(dram_bytes), run_dir, "127.0.0.1", token=token or None))
    finally:
        link.close()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main(*sys.argv[1:]))
