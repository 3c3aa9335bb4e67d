"""Attention over pages for one packed batch: prefill chunks and decode tokens of several sequences.

transformers' model code calls `paged_attention` (registered under `ATTENTION`) once a layer; the batch's
shape, page tables and masks are prepared once a step in `Batch`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from moonpool.engine.contexts import Contexts, Seated
from moonpool.engine.engine import Row
from moonpool.engine.native import LANES, MOST_ROWS, PANEL, Kernels, Step
from moonpool.engine.pages import Pages

ATTENTION = "moonpool"
PAD_LIMIT = 1.25
"""Decode rows of different lengths share a padded gather while padding adds no more than this factor."""


@dataclass(slots=True)
class Chunk:
    """A run of `count` tokens of one sequence at batch row `first`; `end` tokens have KV once it is written."""

    first: int
    count: int
    end: int
    pages: Tensor
    mask: Tensor | None


@dataclass(slots=True)
class DecodeGroup:
    """Single tokens of several sequences whose page tables are padded to one length."""

    rows: Tensor
    k_rows: Tensor
    v_rows: Tensor
    size: int
    span: int
    mask: Tensor | None


class Scratch:
    """Reused buffers for gathered K and V: fresh ones of some MiB a layer cost more in page faults than the copy.

    They grow to the largest batch seen, at most to all pages once per padded row.
    """

    def __init__(self, pages: Pages, dtype: torch.dtype) -> None:
        self._pages, self._dtype = pages, dtype
        self._buffers = self._allocate(16)

    def _allocate(self, rows: int) -> tuple[Tensor, Tensor]:
        shape = (rows, *self._pages.shape[2:])
        empty = [torch.empty(shape, dtype=self._dtype, device=self._pages.device) for _ in range(2)]
        return empty[0], empty[1]

    def gather(self, cache: Tensor, k_rows: Tensor, v_rows: Tensor) -> tuple[Tensor, Tensor]:
        """K and V pages [n, block_tokens, kv_heads, head_dim], valid until the next call."""
        count = len(k_rows)
        if count > len(self._buffers[0]):
            self._buffers = self._allocate(2 * count)
        key, value = (buffer[:count] for buffer in self._buffers)
        torch.index_select(cache, 0, k_rows, out=key)
        torch.index_select(cache, 0, v_rows, out=value)
        return key, value


class Batch:
    """One step's packed tokens. `ids`, `positions`: [1, T]; `last`: [rows], the index of each row's last token."""

    def __init__(
        self,
        pages: Pages,
        scratch: Scratch,
        contexts: Contexts | None,
        rows: Sequence[Row],
        on_layer: Callable[[int], None] | None,
        kernels: Kernels | None = None,
    ) -> None:
        self.pages, self.scratch, self.on_layer = pages, scratch, on_layer
        self._kernels = kernels
        self._prefills = kernels is not None and pages.shape[-1] % PANEL == 0
        self._device = device = pages.device
        self._block = block = pages.block_tokens
        ids: list[int] = []
        positions: list[int] = []
        written: list[int] = []
        last: list[int] = []
        decodes: list[tuple[int, Row]] = []
        self.chunks: list[Chunk] = []
        for row in rows:
            first, end = len(ids), row.start + row.count
            ids.extend(row.tokens[row.start : end])
            positions.extend(range(row.start, end))
            written.extend(row.pages[at // block] for at in range(row.start, end))
            last.append(first + row.count - 1)
            if row.count == 1:
                decodes.append((first, row))
            else:
                self.chunks.append(self._chunk(first, row))
        self.seated: Seated | None = None
        self.groups: list[DecodeGroup] = []
        if decodes and contexts is not None and on_layer is None:
            # With `on_layer` a layer of the context may come only when it is waited for.
            self.seated = contexts.seat([row for _, row in decodes])
        pages.touch(set(written))
        if self.seated is not None and contexts is not None:
            contexts.stamp()
        self._single: Step | None = None
        if decodes and kernels is not None and pages.shape[-1] % LANES == 0:
            used = [row.pages[: _pages(row.start + 1, block)] for _, row in decodes]
            self._single = Step(used, [row.start + 1 for _, row in decodes], block)
        self.decoding = self._single if not self.chunks and on_layer is None and len(rows) <= MOST_ROWS else None
        """Set where all rows are tokens that decode, which kernels take through whole modules."""
        if self.seated is None and self._single is None:
            self.groups = [self._group(group) for group in _alike(decodes, block)]
        self._singles = torch.tensor([first for first, _ in decodes], device=device)
        self._padding = _padding(self.seated, device) if self.seated is not None else None
        self.ids = torch.tensor([ids], device=device)
        self.positions = torch.tensor([positions], device=device)
        self.last = torch.tensor(last, device=device)
        self._slots = torch.tensor(written, device=device), self.positions[0] % block

    def _chunk(self, first: int, row: Row) -> Chunk:
        end = row.start + row.count
        table = torch.tensor(row.pages[: _pages(end, self._block)], device=self._device)
        mask = None
        if row.start > 0 and not self._prefills:
            keys = torch.arange(end, device=self._device)
            mask = keys[None, :] <= keys[row.start :, None]
        return Chunk(first, row.count, end, table, mask)

    def _group(self, decodes: list[tuple[int, Row]]) -> DecodeGroup:
        ends = [row.start + 1 for _, row in decodes]
        span = max(ends)
        width = _pages(span, self._block)
        table = torch.full((len(decodes), width), self.pages.zero_page)
        for index, (_, row) in enumerate(decodes):
            used = _pages(ends[index], self._block)
            table[index, :used] = torch.tensor(row.pages[:used])
        rows = 2 * table.flatten().to(self._device)
        mask = None
        if min(ends) < span:
            mask = (torch.arange(span)[None, :] < torch.tensor(ends)[:, None])[:, None, None, :].to(self._device)
        firsts = torch.tensor([first for first, _ in decodes], device=self._device)
        return DecodeGroup(firsts, rows, rows + 1, len(decodes), span, mask)

    def attend(self, layer: int, qkv: Tensor, heads: int, scale: float | None) -> Tensor:
        """Write this layer's KV, tell `on_layer`, attend.

        qkv [T, H + 2 KV, D]: heads of queries, of keys, of values; gives [T, H, D].
        """
        query = qkv[:, :heads]
        both = qkv[:, heads:].view(len(qkv), 2, -1, qkv.shape[2])
        self.pages.slots(layer).index_put_(self._slots, both)
        if self.on_layer is not None:
            self.on_layer(layer)
        cache = self.pages.rows(layer)
        if not self.chunks and self._single is not None:
            return self._attend_natively(self._single, layer, qkv, heads, scale)
        if not self.chunks and self.seated is not None:
            return self._attend_seated(self.seated, layer, query, both, scale)
        if not self.chunks and len(self.groups) == 1:
            return _decode(self.groups[0], cache, self.scratch, query, scale)
        if len(self.chunks) == 1 and not len(self._singles) and self._prefills:
            return self._prefill_natively(self.chunks[0], layer, qkv, heads, scale)
        if len(self.chunks) == 1 and not len(self._singles):
            return _prefill(self.chunks[0], cache, self.scratch, query, both, scale)
        out = query.new_empty(query.shape)
        for chunk in self.chunks:
            part = slice(chunk.first, chunk.first + chunk.count)
            if self._prefills:
                out[part] = self._prefill_natively(chunk, layer, qkv[part], heads, scale)
            else:
                out[part] = _prefill(chunk, cache, self.scratch, query[part], both[part], scale)
        if self._single is not None:
            drawn = self._attend_natively(self._single, layer, qkv.index_select(0, self._singles), heads, scale)
            out.index_copy_(0, self._singles, drawn)
        for group in self.groups:
            picked = query.index_select(0, group.rows)
            out.index_copy_(0, group.rows, _decode(group, cache, self.scratch, picked, scale))
        if self.seated is not None:
            singles = self._singles
            new = both.index_select(0, singles)
            drawn = self._attend_seated(self.seated, layer, query.index_select(0, singles), new, scale)
            out.index_copy_(0, singles, drawn)
        return out

    def _prefill_natively(self, chunk: Chunk, layer: int, qkv: Tensor, heads: int, scale: float | None) -> Tensor:
        assert self._kernels is not None
        start = chunk.end - chunk.count
        return self._kernels.prefill(chunk.pages, start, qkv, heads, scale, self.pages.tensor(layer))

    def _attend_natively(self, step: Step, layer: int, qkv: Tensor, heads: int, scale: float | None) -> Tensor:
        assert self._kernels is not None
        return self._kernels.attend(step, qkv.contiguous(), heads, scale, self.pages.tensor(layer))

    def _attend_seated(self, seated: Seated, layer: int, query: Tensor, both: Tensor, scale: float | None) -> Tensor:
        """[rows, H, D] from [rows, H, D] and the rows' new K and V [rows, 2, KV, D]."""
        seated.both[layer].index_put_((seated.seats, seated.last), both)
        rows, heads, dim = query.shape
        key, value = seated.keys[layer], seated.values[layer]
        grouped = query.reshape(rows, key.shape[1], -1, dim)
        if self._padding is None:
            out = torch.empty_like(grouped)
            for row, (seat, end) in enumerate(zip(seated.seats.tolist(), seated.ends, strict=True)):
                own = slice(seat, seat + 1)
                out[row] = F.scaled_dot_product_attention(
                    grouped[row : row + 1], key[own, :, :end], value[own, :, :end], scale=scale
                )[0]
            return out.view(rows, heads, dim)
        if not seated.in_order:
            placed = grouped.new_zeros((seated.width, *grouped.shape[1:]))
            grouped = placed.index_copy_(0, seated.seats, grouped)
        out = F.scaled_dot_product_attention(grouped, key, value, attn_mask=self._padding.mask, scale=scale)
        if not seated.in_order:
            out = out.index_select(0, seated.seats)
        return out.reshape(rows, heads, dim)


@dataclass(slots=True)
class Padding:
    """What keeps rows that are shorter than the longest from the rest of their seats."""

    mask: Tensor | None


def _padding(seated: Seated, device: torch.device) -> Padding | None:
    """None where padding would add more than `PAD_LIMIT`: such rows attend one by one."""
    longest = max(seated.ends)
    if longest * seated.width > PAD_LIMIT * sum(seated.ends):
        return None
    if min(seated.ends) == longest and seated.width == len(seated.ends):
        return Padding(None)
    ends = torch.zeros(seated.width, dtype=torch.int64)
    ends[seated.seats.cpu()] = torch.tensor(seated.ends)
    outside = torch.arange(longest)[None, :] >= ends[:, None]
    mask = torch.zeros(seated.width, longest).masked_fill_(outside, float("-inf"))
    return Padding(mask[:, None, None, :].to(device))


def _pages(tokens: int, block: int) -> int:
    return -(-tokens // block)


def _alike(decodes: list[tuple[int, Row]], block: int) -> list[list[tuple[int, Row]]]:
    """Split single tokens into groups whose page tables may be padded to one length.

    All in one group, in batch order, where that is cheap enough; else by length, longest first.
    """
    if not decodes:
        return []
    used = [_pages(row.start + 1, block) for _, row in decodes]
    if max(used) * len(used) <= PAD_LIMIT * sum(used):
        return [decodes]
    groups: list[list[tuple[int, Row]]] = []
    width = total = 0
    for pages, item in sorted(zip(used, decodes, strict=True), key=lambda pair: (-pair[0], pair[1][0])):
        if groups and width * (len(groups[-1]) + 1) <= PAD_LIMIT * (total + pages):
            groups[-1].append(item)
            total += pages
        else:
            groups.append([item])
            width = total = pages
    return groups


def _prefill(chunk: Chunk, cache: Tensor, scratch: Scratch, query: Tensor, both: Tensor, scale: float | None) -> Tensor:
    """[count, H, D] from [count, H, D] and new K and V [count, 2, KV, D]; a sequence's first chunk needs no gather."""
    key, value = both[:, 0], both[:, 1]
    if chunk.mask is not None:
        key, value = (
            part.flatten(0, 1)[: chunk.end] for part in scratch.gather(cache, 2 * chunk.pages, 2 * chunk.pages + 1)
        )
    out = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        key.transpose(0, 1)[None],
        value.transpose(0, 1)[None],
        attn_mask=chunk.mask,
        is_causal=chunk.mask is None,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out[0].transpose(0, 1)


def _decode(group: DecodeGroup, cache: Tensor, scratch: Scratch, query: Tensor, scale: float | None) -> Tensor:
    """[size, H, D] from [size, H, D]; the heads of one KV head are its query rows, so K and V are not repeated.

    Masked positions are pages of zeros, or the rest of a page that was cleared before use: never NaN.
    """
    heads, dim = query.shape[1:]
    kv_heads = cache.shape[2]
    key, value = (
        part.view(group.size, -1, kv_heads, dim)[:, : group.span]
        for part in scratch.gather(cache, group.k_rows, group.v_rows)
    )
    out = F.scaled_dot_product_attention(
        query.reshape(group.size, kv_heads, heads // kv_heads, dim),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask=group.mask,
        scale=scale,
    )
    return out.reshape(group.size, heads, dim)


def paged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    batch: Batch,
    scaling: float | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [1, H, T, D], key and value [1, KV, T, D]; gives [1, T, H, D]."""
    layer = module.layer_idx  # in every attention module of the verified families
    assert isinstance(layer, int)
    qkv = torch.cat((query[0], key[0], value[0])).transpose(0, 1).contiguous()
    out = batch.attend(layer, qkv, query.shape[1], scaling)
    return out[None], None
