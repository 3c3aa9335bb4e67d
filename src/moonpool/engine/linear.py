"""Linear layers in the memory layout that this machine multiplies fastest.

Where a library call has a packed form of its weights, packing once at load saves packing at every call; and a single
row (one stream decoding) is a matrix-vector product, bound by memory, for which plain columns are read fastest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

PACKED_FOR_ROWS = 512
"""Rows that oneDNN's packed layout is chosen for; the layouts for 8 and for 2,048 rows are no faster."""

MakeLinear = Callable[[Sequence[nn.Linear]], nn.Module]
"""One linear layer out of several with the same input; its outputs follow each other in their order."""


class PackedLinear(nn.Module):
    """float32 on CPU: rows through oneDNN with packed weights, a single row through a plain product.

    The originals stay mapped from the model's file, shared by all workers of a host; each layout is private memory.
    The one for single rows is made when the first one comes, so that a prefill worker has only the other.
    """

    def __init__(self, parts: Sequence[nn.Linear]) -> None:
        super().__init__()
        self._weights = [part.weight.detach() for part in parts]
        self._bias = joined_bias(parts)
        self._packed = torch.ops.mkldnn._reorder_linear_weight(torch.cat(self._weights), PACKED_FOR_ROWS)
        self._columns: Tensor | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., inputs] to [..., outputs]."""
        if hidden.numel() == hidden.shape[-1]:
            out = torch.mm(hidden.view(1, -1), self._columns if self._columns is not None else self._make_columns())
            if self._bias is not None:
                out += self._bias
            return out.view(*hidden.shape[:-1], -1)
        out = torch.ops.mkldnn._linear_pointwise(hidden, self._packed, self._bias, "none", [], "")
        return out

    def _make_columns(self) -> Tensor:
        inputs, outputs = self._weights[0].shape[1], sum(len(weight) for weight in self._weights)
        self._columns = torch.empty(inputs, outputs)
        torch.cat([weight.t() for weight in self._weights], dim=1, out=self._columns)
        return self._columns


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


def linear_maker(dtype: torch.dtype, device: torch.device) -> MakeLinear:
    if device.type == "cpu" and dtype == torch.float32 and torch.backends.mkldnn.is_available():
        return PackedLinear
    return joined_linear
