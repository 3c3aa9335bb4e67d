"""The engine's KV pages: one tensor a layer, so that a layer of a page is one contiguous run of bytes.

Layout of a layer: `[page][k, v][token][kv_head][head_dim]`; seen flat, K of page p is row 2p and V is
row 2p + 1. One page more than asked for exists and is always zero: batches that pad point at it.
"""

from __future__ import annotations

import itertools
import mmap
import threading
from collections.abc import Iterable, Sequence

import numpy as np
import torch
import xxhash

from moonpool.engine.engine import Bytes, Row


class Pages:
    """Pages in host memory: `run` is a view of the very bytes that attention reads.

    Memory is anonymous and page-aligned; what no step has touched costs no RSS.
    """

    def __init__(
        self,
        *,
        layers: int,
        page_count: int,
        block_tokens: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.device = device
        self.layers, self.page_count, self.block_tokens = layers, page_count, block_tokens
        self.shape = (page_count + 1, 2, block_tokens, kv_heads, head_dim)
        self.run_bytes = 2 * block_tokens * kv_heads * head_dim * dtype.itemsize
        self.zero_page = page_count
        self._bytes = [self._allocate() for _ in range(layers)]
        """Per layer [page_count + 1, run_bytes] uint8, in host memory."""
        self._tensors = [torch.from_numpy(array).view(dtype).view(self.shape) for array in self._bytes]
        self.touched = np.zeros(page_count + 1, np.int64)
        """Per page when it was last written, or a view of it asked for, on the clock that `now` reads."""
        self._clock = itertools.count(1)

    def now(self) -> int:
        """Later than every page was touched so far."""
        return next(self._clock)

    def touch(self, pages: Iterable[int]) -> None:
        now = next(self._clock)  # of other threads too: each has a number of its own
        for page in pages:
            self.touched[page] = now

    def _allocate(self) -> Bytes:
        size = (self.page_count + 1) * self.run_bytes
        return np.frombuffer(mmap.mmap(-1, size), np.uint8).reshape(self.page_count + 1, self.run_bytes)

    def tensor(self, layer: int) -> torch.Tensor:
        """[pages, 2, block_tokens, kv_heads, head_dim]."""
        return self._tensors[layer]

    def rows(self, layer: int) -> torch.Tensor:
        """[2 * pages, block_tokens, kv_heads, head_dim], for gathering whole pages."""
        return self._tensors[layer].view(-1, *self.shape[2:])

    def slots(self, layer: int) -> torch.Tensor:
        """[pages, block_tokens, 2, kv_heads, head_dim], for writing single tokens."""
        return self._tensors[layer].transpose(1, 2)

    def clear(self, page: int) -> None:
        self.touch([page])
        for tensor in self._tensors:
            tensor[page].zero_()

    def fill(self, page: int, value: float) -> None:
        self.touch([page])
        for tensor in self._tensors:
            tensor[page].fill_(value)

    def run(self, layer: int, page: int) -> Bytes:
        """[run_bytes] uint8, writable."""
        self.touch([page])
        view: Bytes = self._bytes[layer][page]
        return view

    def tail_runs(self, layer: int, page: int, tokens: int) -> tuple[Bytes, Bytes]:
        """K and V of the first `tokens` tokens, each [tokens * bytes of a token's K] uint8, writable."""
        run, half = self.run(layer, page), self.run_bytes // 2
        size = half * tokens // self.block_tokens
        return run[:size], run[half : half + size]

    def settle(self, rows: Sequence[Row]) -> None:
        """Called before a step reads the rows' pages; nothing to do where views are the memory itself."""


class DevicePages(Pages):
    """Pages on an accelerator: a run is a host copy, taken when asked for and put back before the next step.

    So a view is good until the next step that has its page in a row, which is how workers use views:
    to fill a page before it is first computed on, and to read a layer inside `on_layer`.
    """

    def __init__(
        self,
        *,
        layers: int,
        page_count: int,
        block_tokens: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(
            layers=layers,
            page_count=page_count,
            block_tokens=block_tokens,
            kv_heads=kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            device=device,
        )
        self._mirrors = self._tensors
        self._tensors = [torch.zeros(self.shape, dtype=dtype, device=device) for _ in range(layers)]
        self._lent: dict[tuple[int, int], int] = {}
        """(page, layer) -> checksum of the host copy when it was lent; only a changed one is put back."""
        self._lock = threading.Lock()  # store threads ask for runs while a step begins

    def run(self, layer: int, page: int) -> Bytes:
        self.touch([page])
        mirror: Bytes = self._bytes[layer][page]
        with self._lock:
            known = self._lent.get((page, layer))
            if known is None or known == xxhash.xxh3_64_intdigest(mirror.data):
                self._mirrors[layer][page].copy_(self._tensors[layer][page])
                self._lent[page, layer] = xxhash.xxh3_64_intdigest(mirror.data)
        return mirror

    def clear(self, page: int) -> None:
        self._forget(page)
        super().clear(page)

    def fill(self, page: int, value: float) -> None:
        self._forget(page)
        super().fill(page, value)

    def _forget(self, page: int) -> None:
        with self._lock:
            for layer in range(self.layers):
                self._lent.pop((page, layer), None)

    def settle(self, rows: Sequence[Row]) -> None:
        used = {page for row in rows for page in row.pages}
        with self._lock:
            for page, layer in [lent for lent in self._lent if lent[0] in used]:
                checksum = self._lent.pop((page, layer))
                if checksum != xxhash.xxh3_64_intdigest(self._bytes[layer][page].data):
                    self._tensors[layer][page].copy_(self._mirrors[layer][page])
