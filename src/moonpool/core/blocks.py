"""Token ids to chained block keys (DESIGN: blocks and the pool).

A key is the first 16 bytes of SHA-256 over the parent's key and the block's token ids as little-endian
u32, so equal keys mean equal prefixes. The chain's root covers the key space and the request's salt.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence

from moonpool.core.vocabulary import BLOCK_KEY_BYTES, BlockKey, KeySpace, KeySpaceId

DEFAULT_LAYOUT = "layer,kv,token,kv_head,head_dim"
_KEY_SPACE_DOMAIN = b"moonpool key space 1"
_ROOT_DOMAIN = b"moonpool chain root 1"


def key_space_id(
    *,
    model_fingerprint: str,
    dtype: str,
    block_tokens: int,
    layers: int,
    kv_heads: int,
    head_dim: int,
    lora: str = "",
    tensor_parallel: int = 1,
    layout: str = DEFAULT_LAYOUT,
) -> KeySpaceId:
    """32 hex digits that differ whenever the bytes of equal tokens could differ."""
    numbers = (block_tokens, layers, kv_heads, head_dim, tensor_parallel)
    texts = (model_fingerprint, dtype, lora, layout, *map(str, numbers))
    return KeySpaceId(_digest(_KEY_SPACE_DOMAIN, texts).hex())


def chain_root(space: KeySpace, salt: str = "") -> bytes:
    """The parent of every first block: requests with different salts or key spaces share no key."""
    return _digest(_ROOT_DOMAIN, (space.id, salt))


def block_keys(tokens: Sequence[int], space: KeySpace, salt: str = "") -> tuple[BlockKey, ...]:
    """Keys of the whole blocks of `tokens`; a partial tail has none.

    Raises OverflowError for a token id outside u32.
    """
    return extend_keys((), tokens, space, salt)


def extend_keys(
    keys: Sequence[BlockKey], tokens: Sequence[int], space: KeySpace, salt: str = ""
) -> tuple[BlockKey, ...]:
    """Keys of the whole blocks of `tokens`, of which the first `len(keys)` are known already.

    `tokens` is the whole sequence from its first token on; only what follows the known blocks is hashed.
    """
    size = space.block_tokens
    first, whole = len(keys), len(tokens) // size
    if whole <= first:
        return tuple(keys[:whole])
    ids = array("I", tokens[first * size : whole * size])
    if sys.byteorder == "big":
        ids.byteswap()
    data = memoryview(ids).cast("B")
    step = size * ids.itemsize
    chain = list(keys)
    parent: bytes = keys[-1] if keys else chain_root(space, salt)
    for at in range(0, len(data), step):
        parent = next_key(parent, data[at : at + step])
        chain.append(parent)
    return tuple(chain)


def next_key(parent: bytes, tokens: bytes | memoryview) -> BlockKey:
    """Of the block with these token ids (u32, little-endian), after the block with the key `parent` or the root."""
    state = hashlib.sha256(parent)
    state.update(tokens)
    return BlockKey(state.digest()[:BLOCK_KEY_BYTES])


def hit_limit(tokens: int, block_tokens: int) -> int:
    """Most leading blocks of a prompt that may be taken as cached: one token is always computed."""
    return max(tokens - 1, 0) // block_tokens


def common_blocks(a: Sequence[BlockKey], b: Sequence[BlockKey]) -> int:
    """Length of the common leading run of two chains; a chained key that is equal vouches for all before it."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[middle - 1] == b[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


def _digest(domain: bytes, texts: Sequence[str]) -> bytes:
    state = hashlib.sha256(domain)
    for text in texts:
        data = text.encode("utf-8", "surrogatepass")
        state.update(len(data).to_bytes(8, "little"))
        state.update(data)
    return state.digest()[:BLOCK_KEY_BYTES]
