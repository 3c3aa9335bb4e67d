"""int8 weights on a CPU: linear layers through FBGEMM's kernels, which are part of torch.

Weights are int8 with a scale for each output, activations are rounded to int8 with a scale for each token, products
are summed exactly in integers, and what leaves is float32. A row of one of these layers is therefore the same to the
last bit in whatever batch it is computed.

Two things keep it accurate (docs/decisions/0016):

- Inputs are first rotated, 64 at a time, by a Hadamard matrix, which spreads the few large activations of a token over
  their neighbours (QuaRot, arXiv 2404.00456); weights are rotated alike at load, so the product is the same.
- Without VNNI the kernel adds products of neighbours in 16 bits and saturates silently: 255 * (a + b) fits for weights
  a, b of one sign only up to a + b = 128. `quantized_rows` chooses scales that keep every pair there, which costs
  weights a fraction of a bit; the usual way out, 7 bits for activations, costs those a whole one.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from moonpool.engine.linear import joined_bias
from moonpool.engine.loading import forget_pages
from moonpool.engine.native import MOST_ROWS, Kernels, LinearShape, int8_shape
from moonpool.errors import ModelError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

SCHEME = "int8-rows-1"
"""Part of the key space: changes whenever the arithmetic does, since other weights make other KVCache."""

LEVELS, ZERO = 127, 128
"""Activations are -127..127 times their token's scale / 127, stored as 1..255."""
SMALLEST = 1e-30
"""What a row of zeros is divided by."""
ROTATED = 64
"""Most inputs that are rotated together."""
SLAB = 1 << 20
"""Weights quantized at a time, which bounds the memory that loading takes beside the model."""

_OPERATION = "linear_with_input_q_dq_qweight_dq_output_fp32"


class Int8Linear(nn.Module):
    """One linear layer in int8 out of several with the same input (`linear.MakeLinear`).

    Few rows go through our own kernels where they are there, which have the weights once more in their own order.
    """

    def __init__(self, parts: Sequence[nn.Linear], kernels: Kernels | None = None) -> None:
        super().__init__()
        self._rotation = hadamard(_rotated(parts[0].in_features))
        pieces = [
            quantized_rows(_rotate(slab.float(), self._rotation))
            for part in parts
            for slab in torch.split(part.weight.detach(), max(1, SLAB // part.in_features))
        ]
        levels, scale = (torch.cat(piece) for piece in zip(*pieces, strict=True))
        self._packed = _packed(levels, scale)
        self._bias = joined_bias(parts)
        self._kernels = kernels
        self.native: LinearShape | None = None
        if kernels is not None and kernels.has_int8:
            self.native, self._kept = int8_shape(levels, scale, self._bias, len(self._rotation))
        forget_pages([part.weight for part in parts])

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., inputs] float32 to [..., outputs] float32."""
        if self.native is not None and self._kernels is not None and hidden.shape[:-1].numel() <= MOST_ROWS:
            return self._kernels.linear(self.native, hidden.contiguous())
        hidden = _rotate(hidden, self._rotation)
        largest = hidden.abs().amax(-1, keepdim=True).clamp_(min=SMALLEST)
        multiply = getattr(torch.ops.quantized, _OPERATION)
        out: Tensor = multiply(hidden.div_(largest), 1 / LEVELS, ZERO, self._packed).mul_(largest)
        if self._bias is not None:
            out += self._bias
        return out


def check_supported(config: PretrainedConfig, name: str, dtype: str, device: str = "cpu") -> None:
    """Raises ModelError where int8 cannot be computed.

    Experts of a mixture are no linear layers in transformers, so most weights would stay as they are.
    """
    if any(getattr(config, count, None) for count in ("num_experts", "num_local_experts")):
        raise ModelError(f"{name}: --quantize int8 does not cover mixtures of experts: leave it out")
    if device != "cpu" or dtype != "float32":
        raise ModelError(
            f"--quantize int8 computes on a CPU with float32 activations, not with {dtype} on {device}: "
            "leave it out, or take --dtype float32"
        )
    if "fbgemm" not in torch.backends.quantized.supported_engines or not hasattr(torch.ops.quantized, _OPERATION):
        raise ModelError(
            f"--quantize int8 needs FBGEMM, which torch {torch.__version__} does not have on this machine "
            "(x86-64 with AVX2): leave it out"
        )


def quantized_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 levels [outputs, inputs] and float32 scales [outputs]: levels * scale is about `weight`.

    The scale is the largest sum of two neighbours (2i, 2i + 1) of one sign over 127; rounded, no pair exceeds 128.
    """
    pairs = nn.functional.pad(weight, (0, weight.shape[1] % 2)).view(len(weight), -1, 2)
    sums = torch.maximum(pairs.clamp(min=0).sum(-1), pairs.clamp(max=0).sum(-1).neg_())
    scale = (sums.amax(1) / LEVELS).clamp_(min=SMALLEST)
    return (weight / scale[:, None]).round_().to(torch.int8), scale


def hadamard(size: int) -> Tensor:
    """The symmetric orthogonal matrix of +-1 / sqrt(size); size is a power of two."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix / math.sqrt(size)


def _rotated(inputs: int) -> int:
    """The largest power of two that divides `inputs`, at most ROTATED."""
    return min(ROTATED, inputs & -inputs)


def _rotate(rows: Tensor, rotation: Tensor) -> Tensor:
    rotated: Tensor = torch.mm(rows.reshape(-1, len(rotation)), rotation).view(rows.shape)
    return rotated


def _packed(levels: Tensor, scale: Tensor) -> object:
    """The kernel's own layout. It takes torch's quantized tensors, which warn that they will go."""
    engine = torch.backends.quantized.engine
    zeros = torch.zeros(len(scale), dtype=torch.int64)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*quantized tensor creation functions.*")
        torch.backends.quantized.engine = "fbgemm"
        try:
            tensor = torch._make_per_channel_quantized_tensor(levels, scale.double(), zeros, 0)
            packed: object = torch.ops.quantized.linear_prepack(tensor, None)
        finally:
            torch.backends.quantized.engine = engine
    return packed
