"""Decoder layers made fast in place: modules of transformers' own model replaced by ones that compute the same.

The model stays transformers'; its layers' order, residuals and mixtures of experts are untouched. Replaced are, one
decoder layer at a time (so that a slice of a model can be treated alike): attention, whose projections of query, key
and value become one product and whose rotary positions are applied in place; gated MLPs, whose two first projections
become one; RMS norms; and the linear layers left. tests/engine/test_layers.py compares with the untouched modules.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation

from moonpool.engine.attention import Batch
from moonpool.engine.linear import MakeLinear
from moonpool.engine.native import LANES, MOST_ROWS, AttentionShape, Kernels, LinearShape, MlpShape


class Norm(nn.Module):
    """RMS norm in float32: x / sqrt(mean(x²) + eps) * weight, over the last axis, in four operations or one of ours."""

    def __init__(self, weight: Tensor, eps: float, kernels: Kernels | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach(), requires_grad=False)
        self.eps = float(eps)
        self._kernels = kernels
        self._eps = torch.full((1, 1, 1), eps, device=weight.device)
        self._share = 1.0 / len(weight)

    def forward(self, hidden: Tensor) -> Tensor:
        if self._kernels is not None:
            return self._kernels.norm(hidden.contiguous(), self.weight, self.eps)
        rows = hidden.reshape(-1, hidden.shape[-1])
        mean = torch.baddbmm(self._eps, rows[:, None, :], rows[:, :, None], alpha=self._share)
        return hidden.mul(mean.rsqrt_().view(*hidden.shape[:-1], 1)).mul_(self.weight)


class Rotary(nn.Module):
    """The model's own rotary embedding, in the form that `rotate` takes: cos, and sin with the first half negated."""

    def __init__(self, theirs: nn.Module) -> None:
        super().__init__()
        self._theirs = theirs

    def forward(self, hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Two of [T, 1, rotated dimensions]."""
        cos, sin = self._theirs(hidden, position_ids)
        sin[..., : sin.shape[-1] // 2].neg_()
        return cos[0, :, None], sin[0, :, None]


def rotate(heads: Tensor, cos: Tensor, signed_sin: Tensor) -> None:
    """Apply rotary positions to [T, heads, head_dim] in place; dimensions beyond those of `cos` are not rotated."""
    part = heads[..., : cos.shape[-1]]
    half = torch.roll(part, cos.shape[-1] // 2, -1)
    part.mul_(cos).addcmul_(half, signed_sin)


class Attention(nn.Module):
    """Self-attention of every verified family: joined projections, optional norms of query and key, paged attention."""

    def __init__(self, theirs: Any, make: MakeLinear, kernels: Kernels | None = None) -> None:
        super().__init__()
        parts = [theirs.qkv_proj] if hasattr(theirs, "qkv_proj") else [theirs.q_proj, theirs.k_proj, theirs.v_proj]
        self.layer_idx = int(theirs.layer_idx)
        self._scale: float = theirs.scaling
        self._dim: int = theirs.head_dim
        self._heads: int = theirs.o_proj.in_features // self._dim
        self._kv_heads = (sum(len(part.weight) for part in parts) // self._dim - self._heads) // 2
        self._rotated: bool = getattr(theirs, "use_rope", True)
        self.qkv, self.out = make(parts), make([theirs.o_proj])
        self.q_norm: nn.Module | None = getattr(theirs, "q_norm", None)
        self.k_norm: nn.Module | None = getattr(theirs, "k_norm", None)
        self._kernels, self._native = kernels, self._native_shape()

    def _native_shape(self) -> AttentionShape | None:
        """For tokens that decode; None where the kernels do not do what this attention does."""
        qkv, out = getattr(self.qkv, "native", None), getattr(self.out, "native", None)
        if not isinstance(qkv, LinearShape) or not isinstance(out, LinearShape) or self._dim % LANES:
            return None
        shape = AttentionShape(qkv, out, heads=self._heads, kv_heads=self._kv_heads, dim=self._dim, scale=self._scale)
        if self.q_norm is not None or self.k_norm is not None:
            if not isinstance(self.q_norm, Norm) or not isinstance(self.k_norm, Norm):
                return None
            shape.q_norm, shape.k_norm = self.q_norm.weight.data_ptr(), self.k_norm.weight.data_ptr()
            shape.q_eps, shape.k_eps = self.q_norm.eps, self.k_norm.eps
            shape.together = len(self.q_norm.weight) != self._dim
        return shape

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], *, batch: Batch, **_: object
    ) -> tuple[Tensor, None]:
        """[1, T, hidden] to the same."""
        if self._kernels is not None and self._native is not None and batch.decoding is not None:
            self._native.rotated = position_embeddings[0].shape[-1] if self._rotated else 0
            cache = batch.pages.tensor(self.layer_idx)
            hidden = hidden_states.contiguous()
            return self._kernels.attention(self._native, batch.decoding, hidden, position_embeddings, cache), None
        qkv = self.qkv(hidden_states[0]).view(-1, self._heads + 2 * self._kv_heads, self._dim)
        rotated = qkv[:, : self._heads + self._kv_heads]
        if self.q_norm is not None and self.k_norm is not None:
            _normalize(self.q_norm, rotated[:, : self._heads])
            _normalize(self.k_norm, rotated[:, self._heads :])
        if self._rotated and self._kernels is not None:
            self._kernels.rotate(qkv, rotated.shape[1], position_embeddings)
        elif self._rotated:
            rotate(rotated, *position_embeddings)
        out = batch.attend(self.layer_idx, qkv, self._heads, self._scale)
        return self.out(out.reshape(1, len(out), -1)), None


def _normalize(norm: nn.Module, heads: Tensor) -> None:
    """Each head of [T, heads, head_dim] in place, or (olmo2) all heads of a token together."""
    weight = norm.weight
    assert isinstance(weight, Tensor)
    together = len(weight) != heads.shape[-1]
    heads.copy_(norm(heads.flatten(1)).view(heads.shape) if together else norm(heads))


class GatedMlp(nn.Module):
    """down(act(gate(x)) * up(x)) with gate and up as one product."""

    def __init__(self, theirs: Any, make: MakeLinear, kernels: Kernels | None = None) -> None:
        super().__init__()
        parts = [theirs.gate_up_proj] if hasattr(theirs, "gate_up_proj") else [theirs.gate_proj, theirs.up_proj]
        self.gate_up, self.down = make(parts), make([theirs.down_proj])
        self._act: nn.Module = theirs.activation_fn if hasattr(theirs, "activation_fn") else theirs.act_fn
        self._is_silu = isinstance(self._act, nn.SiLU | SiLUActivation)
        self._kernels, self._native = kernels, self._native_shape()

    def _native_shape(self) -> MlpShape | None:
        gate_up, down = getattr(self.gate_up, "native", None), getattr(self.down, "native", None)
        if not isinstance(gate_up, LinearShape) or not isinstance(down, LinearShape) or down.inputs % LANES:
            return None
        return MlpShape(gate_up, down) if self._is_silu else None

    def forward(self, hidden: Tensor) -> Tensor:
        if self._kernels is not None and self._native is not None and hidden.shape[:-1].numel() <= MOST_ROWS:
            return self._kernels.mlp(self._native, hidden.contiguous())
        both: Tensor = self.gate_up(hidden)
        if self._kernels is not None and self._is_silu and both.shape[-1] % (2 * LANES) == 0:
            middle = self._kernels.activate(both)
        else:
            gate, up = both.chunk(2, dim=-1)
            middle = self._act(gate).mul_(up)
        out: Tensor = self.down(middle)
        return out


def replace_layer(layer: Any, make: MakeLinear, kernels: Kernels | None = None) -> None:
    """Make one decoder layer of a verified family fast."""
    replace_norms(layer, kernels)
    layer.self_attn = Attention(layer.self_attn, make, kernels)
    if hasattr(layer.mlp, "down_proj"):  # else a mixture of experts
        layer.mlp = GatedMlp(layer.mlp, make, kernels)


def replace_norms(module: nn.Module, kernels: Kernels | None = None) -> None:
    """All RMS norms below a module; those of other types than float32 compute in float32 and round: they stay."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            eps = getattr(child, "variance_epsilon", None)
            weight = getattr(child, "weight", None)
            if eps is not None and isinstance(weight, Tensor) and weight.dtype == torch.float32:
                setattr(parent, name, Norm(weight, eps, kernels))


def replace(model: Any, layers: Iterable[nn.Module], make: MakeLinear, kernels: Kernels | None = None) -> None:
    """Make a causal model fast, of whose decoder layers `layers` are there."""
    for layer in layers:
        replace_layer(layer, make, kernels)
    replace_norms(model, kernels)
    model.model.rotary_emb = Rotary(model.model.rotary_emb)
    if isinstance(model.lm_head, nn.Linear):  # else a stage before the last
        model.lm_head = make([model.lm_head])
