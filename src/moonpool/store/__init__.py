"""The KVCache pool: the node that holds it, and what programs use it with."""

from moonpool.core.vocabulary import BlockKey, BlockMeta, KeySpace
from moonpool.errors import NodeUnreachableError, PoolError
from moonpool.store.aio import AsyncClient, AsyncSpace
from moonpool.store.api import Blocks, Client, Space, key_of

__all__ = [
    "AsyncClient",
    "AsyncSpace",
    "BlockKey",
    "BlockMeta",
    "Blocks",
    "Client",
    "KeySpace",
    "NodeUnreachableError",
    "PoolError",
    "Space",
    "key_of",
]
