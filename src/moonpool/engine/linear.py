"""Linear layers in the memory layout that this machine multiplies fastest.

Packing weights once at load saves packing them at every call, and what is read in order is read fastest: measured on
two cores without AVX-512, oneDNN's packed layout beats plain products at every count of rows from 1 to 2,048.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from moonpool.engine.loading import forget_pages
from moonpool.engine.native import MOST_ROWS, Kernels, LinearShape, linear_shape

PACKED_FOR_ROWS = 512
"""Rows that the packed layout is chosen for. The layout for a single row is slower, at a single row too."""

MakeLinear = Callable[[Sequence[nn.Linear]], nn.Module]
"""One linear layer out of several with the same input; its outputs follow each other in their order."""


class PackedLinear(nn.Module):
    """float32 on CPU through oneDNN, few rows through our own kernels where they are there.

    The packed weights are private memory; what was read of the file is let go.
    """

    def __init__(self, parts: Sequence[nn.Linear], kernels: Kernels | None = None) -> None:
        super().__init__()
        self._bias = joined_bias(parts)
        weights = torch.cat([part.weight.detach() for part in parts])
        packed = _packed(weights)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self._kernels = kernels
        self.native: LinearShape | None = None
        if kernels is not None:
            self.native = linear_shape(packed, weights, self._bias)
        forget_pages([part.weight for part in parts])

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., inputs] to [..., outputs]."""
        if self.native is not None and self._kernels is not None and hidden.shape[:-1].numel() <= MOST_ROWS:
            return self._kernels.linear(self.native, hidden.contiguous())
        out: Tensor = torch.ops.mkldnn._linear_pointwise(hidden, self.weight, self._bias, "none", [], "")
        return out


def _packed(weights: Tensor) -> Tensor:
    """As for one thread: for more of them oneDNN lays some shapes out in a way that the kernels do not read."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weights, PACKED_FOR_ROWS)
        return packed
    finally:
        torch.set_num_threads(threads)


def joined_bias(parts: Sequence[nn.Linear]) -> Tensor | None:
    """[outputs], zero for a part that has none; None where no part has one."""
    if all(part.bias is None for part in parts):
        return None
    return torch.cat(
        [part.bias if part.bias is not None else part.weight.new_zeros(len(part.weight)) for part in parts]
    )


def joined_linear(parts: Sequence[nn.Linear]) -> nn.Linear:
    """One plain linear layer: for devices and types without a layout of their own here."""
    weight, bias = torch.cat([part.weight.detach() for part in parts]), joined_bias(parts)
    joined = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    joined.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        joined.bias = nn.Parameter(bias, requires_grad=False)
    return joined


def linear_maker(dtype: torch.dtype, device: torch.device, kernels: Kernels | None = None) -> MakeLinear:
    if device.type == "cpu" and dtype == torch.float32 and torch.backends.mkldnn.enabled:
        return partial(PackedLinear, kernels=kernels)
    return joined_linear
