"""A stage's layers of a prompt's cached blocks, from the node of its pipeline's leader into the engine's pages."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from moonpool.core.vocabulary import BlockKey, NodePeer
from moonpool.engine.engine import Engine
from moonpool.errors import PoolError
from moonpool.live.sink import copy_in
from moonpool.live.worker import in_thread
from moonpool.messenger.receiving import ReadGroup
from moonpool.messenger.tcp import TcpMessenger
from moonpool.store.client import NodeClient
from moonpool.store.pending import awaited


async def bring(
    engine: Engine,
    node: NodeClient,
    here: NodePeer,
    home: NodePeer,
    messenger: TcpMessenger,
    keys: Sequence[BlockKey],
    marks: Sequence[int],
    pages: Sequence[int],
    time_left: float,
) -> None:
    """The layers here of these blocks, of the very copies that the leader has loaded (`marks`, one a key).

    Layers of two copies are no block: both may be right and yet differ, by the batch that they were computed in.
    Raises PoolError, TransferError.
    """
    if home.id == here.id:
        await _copy_here(engine, node, keys, marks, pages, home)
    else:
        await _read_there(engine, home, messenger, keys, marks, pages, time_left)


async def _copy_here(
    engine: Engine,
    node: NodeClient,
    keys: Sequence[BlockKey],
    marks: Sequence[int],
    pages: Sequence[int],
    home: NodePeer,
) -> None:
    with await awaited(node.lease(engine.space, keys, marks=True)) as lease:
        if lease.count < len(keys):
            raise PoolError(f"{lease.count} of {len(keys)} cached blocks are left on {home.id}")
        if tuple(lease.marks) != tuple(marks):
            raise PoolError(f"a cached block was replaced by another copy on {home.id} while the stages loaded it")
        await in_thread(copy_in, engine, lease.views, pages)


async def _read_there(
    engine: Engine,
    home: NodePeer,
    messenger: TcpMessenger,
    keys: Sequence[BlockKey],
    marks: Sequence[int],
    pages: Sequence[int],
    time_left: float,
) -> None:
    space, layers = engine.space, engine.layers
    size = space.run_bytes
    parts = [np.empty(len(layers) * size, np.uint8) for _ in keys]
    group = ReadGroup(space.runs, marks=dict(zip(keys, marks, strict=True)))
    some = layers.start, len(layers)
    reading = messenger.read(home.data_address, space.id, keys, parts, time_left, layers=some, group=group)
    if (found := await asyncio.wrap_future(reading)) < len(keys):
        raise PoolError(f"{found} of {len(keys)} cached blocks are left on {home.id}")

    def copy() -> None:
        for part, page in zip(parts, pages, strict=False):
            for number, layer in enumerate(layers):
                engine.run(layer, page)[:] = part[number * size : (number + 1) * size]

    await in_thread(copy)
