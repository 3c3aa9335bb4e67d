"""vLLM's KVCache of one worker, as rows of bytes: a block of a layer is one run, whatever vLLM has put into it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from moonpool.errors import ConfigError
from moonpool.messenger.transfer import Bytes


class Pages:
    """Whole blocks only; what lies where within a block is vLLM's business, and part of `layout`."""

    def __init__(self, caches: Mapping[str, Any], blocks: int) -> None:
        """`caches`: of each attention layer by its name, blocks first, as vLLM registers them; `blocks`: how many.

        Raises ConfigError for what cannot be moved as whole blocks.
        """
        numbers = {_layer_number(name): name for name in caches}
        if not caches or len(numbers) < len(caches):
            raise ConfigError(f"two caches for a layer are not supported yet (cross-attention?): {', '.join(caches)}")
        self.names = tuple(numbers[number] for number in sorted(numbers))
        """First layer first."""
        self._numbers = {name: number for number, name in enumerate(self.names)}
        self._rows = [_rows(name, caches[name], blocks) for name in self.names]
        sizes = {rows.shape[1] for rows in self._rows}
        if len(sizes) > 1:
            raise ConfigError(f"layers whose blocks differ in size ({sorted(sizes)} bytes) are not supported yet")
        self.run_bytes: int = sizes.pop()
        self.layout = _layout(caches[self.names[0]], blocks)
        """Equal text means that equal KV has equal bytes."""
        if any(_layout(cache, blocks) != self.layout for cache in caches.values()):
            raise ConfigError("layers whose caches are laid out differently are not supported yet")

    def __len__(self) -> int:
        """Layers."""
        return len(self._rows)

    def number(self, name: str) -> int | None:
        """Of the layer with this name; None for one that is not ours."""
        return self._numbers.get(name)

    def run(self, layer: int, block: int) -> Bytes:
        """Writable, `run_bytes` long."""
        row: Bytes = self._rows[layer][block]
        return row


def _layer_number(name: str) -> int:
    numbers = [int(part) for part in name.split(".") if part.isdigit()]
    if len(numbers) != 1:
        raise ConfigError(f"the layer {name!r} has no number of its own: models of this kind are not supported yet")
    return numbers[0]


def _rows(name: str, cache: Any, blocks: int) -> Bytes:
    """(blocks, bytes of one)"""
    if not isinstance(cache, torch.Tensor):
        raise ConfigError(f"the layer {name} keeps several tensors (a state-space model?), which is not supported yet")
    if cache.device.type != "cpu":
        raise ConfigError(f"the KVCache is on {cache.device}; this version of the connector moves it on CPUs only")
    if cache.shape[0] % blocks:
        raise ConfigError(f"the layer {name} has {cache.shape[0]} blocks, no multiple of {blocks}")
    parts = cache.shape[0] // blocks
    inner = cache.permute(0, *_memory_order(cache))
    if not inner[0].is_contiguous() or (parts > 1 and inner.stride(0) != inner[0].numel()):
        raise ConfigError(f"the layer {name} does not keep a block in one piece: choose another VLLM_KV_CACHE_LAYOUT")
    memory = inner.detach().view(torch.uint8).numpy()
    size = memory[0].size * parts
    return np.lib.stride_tricks.as_strided(memory, (blocks, size), (memory.strides[0] * parts, 1))


def _memory_order(cache: torch.Tensor) -> list[int]:
    """Its dimensions but the first, the widest stride first."""
    strides = cache.stride()
    return sorted(range(1, cache.dim()), key=lambda dim: -strides[dim])


def _layout(cache: torch.Tensor, blocks: int) -> str:
    return f"{tuple(cache.shape[1:])} by {_memory_order(cache)}, {cache.dtype}, {cache.shape[0] // blocks} in a block"
