"""Kernels of our own on a CPU (native.c): their arguments and calls.

Without them, which `load` says, all goes through torch.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moonpool.engine.compiled import LackError, compiled

log = logging.getLogger(__name__)

MOST_ROWS = 32
"""Beyond that torch's products of many rows are as fast."""
LANES = 8
"""Dimensions of a head, and of an MLP's middle, come in multiples of it."""
PANEL, BYTES = 64, 4
"""Outputs that lie together, and of int8 inputs too."""
SAMPLED = 4096


class LinearShape(ctypes.Structure):
    """`Linear` of native.c."""

    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("inputs", ctypes.c_int64),
        ("outputs", ctypes.c_int64),
        ("depth", ctypes.c_int64),
        ("scales", ctypes.c_void_p),
        ("totals", ctypes.c_void_p),
        ("rotated", ctypes.c_int64),
    )


class AttentionShape(ctypes.Structure):
    """`Attention` of native.c."""

    _fields_ = (
        ("qkv", LinearShape),
        ("out", LinearShape),
        ("q_norm", ctypes.c_void_p),
        ("k_norm", ctypes.c_void_p),
        ("together", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("dim", ctypes.c_int64),
        ("rotated", ctypes.c_int64),
        ("q_eps", ctypes.c_float),
        ("k_eps", ctypes.c_float),
        ("scale", ctypes.c_float),
    )


class MlpShape(ctypes.Structure):
    """`Mlp` of native.c."""

    _fields_ = (("gate_up", LinearShape), ("down", LinearShape))


class StepShape(ctypes.Structure):
    """`Step` of native.c."""

    _fields_ = (
        ("rows", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("block", ctypes.c_int64),
        ("threads", ctypes.c_int64),
        ("tables", ctypes.c_void_p),
        ("ends", ctypes.c_void_p),
        ("cosines", ctypes.c_void_p),
        ("sines", ctypes.c_void_p),
        ("scratch", ctypes.c_void_p),
        ("room", ctypes.c_int64),
    )


class PromptShape(ctypes.Structure):
    """`Prompt` of native.c."""

    _fields_ = (
        ("pages", ctypes.c_void_p),
        ("start", ctypes.c_int64),
        ("count", ctypes.c_int64),
        ("block", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("dim", ctypes.c_int64),
        ("tiles", ctypes.c_int64),
        ("threads", ctypes.c_int64),
        ("scale", ctypes.c_float),
    )


class Step:
    """The tokens of one step that are a sequence's only one in it. `ends`: tokens of each, its new one included."""

    def __init__(self, tables: Sequence[Sequence[int]], ends: Sequence[int], block: int) -> None:
        width = max(map(len, tables))
        padded = [[*table, *[0] * (width - len(table))] for table in tables]
        self._tables, self._ends = torch.tensor(padded), torch.tensor(ends)
        self.longest = max(ends)
        self.shape = StepShape(
            rows=len(ends), width=width, block=block, tables=self._tables.data_ptr(), ends=self._ends.data_ptr()
        )


class Kernels:
    """The compiled functions for one engine: one thread calls them. Tensors are contiguous float32 on the CPU."""

    def __init__(self, library: ctypes.CDLL, threads: int) -> None:
        self._threads = threads
        self._scratch = torch.empty(0)
        self.has_int8 = bool(library.moonpool_int8())
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        self._norm = _function(library.moonpool_norm, [pointer] * 3 + [size] * 2 + [ctypes.c_float, size])
        self._rotate = _function(library.moonpool_rotate, [pointer] * 3 + [size] * 6)
        self._activate = _function(library.moonpool_activate, [pointer] * 2 + [size] * 3)
        self._linear = _function(library.moonpool_linear, [pointer] * 4 + [size] * 2)
        self._mlp = _function(library.moonpool_mlp, [pointer] * 4 + [size] * 2)
        self._prefill = _function(library.moonpool_prefill, [pointer] * 5)
        self._attend = _function(library.moonpool_attend, [pointer] * 5)
        self._attention = _function(library.moonpool_attention, [pointer] * 5)

    def norm(self, hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMS norm over the last axis."""
        width = len(weight)
        out = torch.empty_like(hidden)
        rows = hidden.numel() // width
        self._norm(hidden.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, width, eps, self._threads)
        return out

    def rotate(self, heads: Tensor, count: int, embeddings: tuple[Tensor, Tensor]) -> None:
        """Rotary positions of the first `count` of [T, heads, dim], in place; embeddings as `layers.Rotary` gives."""
        rows, every, dim = heads.shape
        rotated = embeddings[0].shape[-1]
        self._rotate(*_pointers(heads, *embeddings), rows, count, every, dim, rotated, self._threads)

    def activate(self, gate_up: Tensor) -> Tensor:
        """[..., 2 width] to [..., width]: silu(gate) * up."""
        width = gate_up.shape[-1] // 2
        out = gate_up.new_empty((*gate_up.shape[:-1], width))
        self._activate(*_pointers(gate_up, out), out.numel() // width, width, self._threads)
        return out

    def linear(self, layer: LinearShape, hidden: Tensor) -> Tensor:
        """[..., inputs] to [..., outputs]."""
        out = hidden.new_empty((*hidden.shape[:-1], layer.outputs))
        rows = hidden.numel() // layer.inputs
        room = self._room(_bytes_room(layer, rows))
        self._linear(ctypes.addressof(layer), hidden.data_ptr(), out.data_ptr(), room, rows, self._threads)
        return out

    def mlp(self, mlp: MlpShape, hidden: Tensor) -> Tensor:
        """[..., inputs] to the same: down(silu(gate) * up)."""
        out = torch.empty_like(hidden)
        rows = hidden.numel() // mlp.gate_up.inputs
        scratch = self._room(rows * 3 * mlp.down.inputs + _bytes_room(mlp.gate_up, rows) + _bytes_room(mlp.down, rows))
        self._mlp(ctypes.addressof(mlp), hidden.data_ptr(), out.data_ptr(), scratch, rows, self._threads)
        return out

    def prefill(self, pages: Tensor, start: int, qkv: Tensor, heads: int, scale: float | None, cache: Tensor) -> Tensor:
        """[T, H, D] from [T, H + 2 KV, D] with positions: a chunk from token `start` on.

        Its K and V are in the cache already. D is a multiple of PANEL; pages int64, as many as the tokens up to the
        chunk's end take.
        """
        count, all_heads, dim = qkv.shape
        kv_heads, tiles = (all_heads - heads) // 2, -(-(start + count) // PANEL)
        out = qkv.new_empty((count, heads, dim))
        prompt = PromptShape(
            pages=pages.data_ptr(),
            start=start,
            count=count,
            block=cache.shape[2],
            heads=heads,
            kv_heads=kv_heads,
            dim=dim,
            tiles=tiles,
            threads=self._threads,
            scale=dim**-0.5 if scale is None else scale,
        )
        room = self._room(kv_heads * tiles * 2 * PANEL * dim)
        self._prefill(ctypes.addressof(prompt), *_pointers(qkv, cache), room, out.data_ptr())
        return out

    def attend(self, step: Step, qkv: Tensor, heads: int, scale: float | None, cache: Tensor) -> Tensor:
        """[rows, H, D] from [rows, H + 2 KV, D] with positions; the rows' K and V are in the cache already."""
        rows, all_heads, dim = qkv.shape
        scale = dim**-0.5 if scale is None else scale
        attention = AttentionShape(heads=heads, kv_heads=(all_heads - heads) // 2, dim=dim, scale=scale)
        out = qkv.new_empty((rows, heads, dim))
        self._prepare(step, 0)
        self._attend(*map(ctypes.addressof, (attention, step.shape)), *_pointers(qkv, cache, out))
        return out

    def attention(
        self, attention: AttentionShape, step: Step, hidden: Tensor, embeddings: tuple[Tensor, Tensor], cache: Tensor
    ) -> Tensor:
        """[..., hidden] to the same; K and V are written to the cache, a layer's pages (`Pages.tensor`)."""
        out = torch.empty_like(hidden)
        step.shape.cosines, step.shape.sines = _pointers(*embeddings)
        rows = step.shape.rows
        sums = rows * (attention.qkv.outputs + attention.out.inputs)
        self._prepare(step, sums + _bytes_room(attention.qkv, rows) + _bytes_room(attention.out, rows))
        self._attention(*map(ctypes.addressof, (attention, step.shape)), *_pointers(hidden, cache, out))
        return out

    def _prepare(self, step: Step, sums: int) -> None:
        step.shape.room = room = -(-step.longest // LANES) * LANES
        step.shape.scratch = self._room(sums + room * self._threads)
        step.shape.threads = self._threads

    def _room(self, floats: int) -> int:
        if self._scratch.numel() < floats:
            self._scratch = torch.empty(2 * floats)
        return self._scratch.data_ptr()


def linear_shape(packed: Tensor, plain: Tensor, bias: Tensor | None) -> LinearShape | None:
    """What the kernels need of oneDNN's packed weights; None where they do not lie as the kernels read them.

    `plain` [outputs, inputs] is what was packed: some thousand of its weights are looked up.
    """
    outputs, inputs = plain.shape
    panels = -(-outputs // PANEL)
    depth = torch.ops.mkldnn._nbytes(packed) // (4 * PANEL * panels)
    if depth < inputs:
        return None
    address, count = torch.ops.mkldnn.data_ptr(packed), depth * PANEL * panels
    memory = torch.frombuffer((ctypes.c_float * count).from_address(address), dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(outputs, (SAMPLED,), generator=generator)
    columns = torch.randint(inputs, (SAMPLED,), generator=generator)
    places = (rows // PANEL * depth + columns) * PANEL + rows % PANEL
    if not torch.equal(memory[places], plain[rows, columns]):
        return None
    return LinearShape(address, bias.data_ptr() if bias is not None else None, inputs, outputs, depth)


def int8_shape(
    levels: Tensor, scale: Tensor, bias: Tensor | None, rotated: int
) -> tuple[LinearShape, tuple[Tensor, ...]]:
    """What the kernels need of int8 weights [outputs, inputs] of a scale for each output, and what must stay for it."""
    outputs, inputs = levels.shape
    padded = torch.nn.functional.pad(levels, (0, -inputs % BYTES, 0, -outputs % PANEL))
    packed = padded.view(-1, PANEL, padded.shape[1] // BYTES, BYTES).transpose(1, 2).contiguous()
    totals = 128 * levels.sum(1, dtype=torch.int32)
    scale = scale.float().contiguous()
    shape = LinearShape(
        packed.data_ptr(),
        bias.data_ptr() if bias is not None else None,
        inputs,
        outputs,
        padded.shape[1] // BYTES,
        scale.data_ptr(),
        totals.data_ptr(),
        rotated,
    )
    return shape, (packed, scale, totals)


def _bytes_room(layer: LinearShape, rows: int) -> int:
    """Floats that the inputs of an int8 layer take as bytes, and their scales."""
    return rows * (layer.depth + 1) if layer.scales else 0


def load(threads: int) -> Kernels | None:
    """The kernels, compiled unless they were before. None, and a line in the log, where that cannot be done."""
    try:
        return Kernels(ctypes.CDLL(str(compiled())), threads)
    except LackError as lack:
        log.warning("decoding goes through torch, which is slower: %s", lack)
        return None


def _function(function: Any, arguments: Sequence[Any]) -> Any:
    function.argtypes, function.restype = arguments, None
    return function


def _pointers(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(tensor.data_ptr() for tensor in tensors)
