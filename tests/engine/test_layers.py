"""A replaced layer computes what transformers' own layer does."""

from __future__ import annotations

import torch
import transformers as tf
from torch import nn

from moonpool.engine.layers import Norm, Rotary, rotate
from moonpool.engine.linear import PackedLinear, joined_linear


def test_packed_layers_are_the_layers_one_after_another() -> None:
    torch.manual_seed(1)
    parts = [nn.Linear(48, 32, bias=False), nn.Linear(48, 16), nn.Linear(48, 16)]
    for rows in (1, 3, 40):
        hidden = torch.randn(1, rows, 48)
        expected = torch.cat([part(hidden) for part in parts], -1)
        for make in (PackedLinear, joined_linear):
            assert torch.allclose(make(parts)(hidden), expected, atol=1e-5)


def test_the_norm_is_transformers_own() -> None:
    torch.manual_seed(2)
    theirs = tf.models.llama.modeling_llama.LlamaRMSNorm(48, eps=0.1)
    theirs.weight = nn.Parameter(torch.randn(48), requires_grad=False)
    for shape in ((1, 1, 48), (1, 7, 48), (5, 3, 48)):
        hidden = torch.randn(shape)
        assert torch.allclose(Norm(theirs.weight, 0.1)(hidden), theirs(hidden), atol=1e-5)


def test_rotation_in_place_is_transformers_own() -> None:
    llama = tf.models.llama.modeling_llama
    config = tf.LlamaConfig(hidden_size=64, num_attention_heads=4, head_dim=16)
    embedding = llama.LlamaRotaryEmbedding(config)
    positions = torch.tensor([[5, 700, 3]])
    heads = torch.randn(3, 4, 16)
    cos, sin = embedding(heads, positions)
    expected, _ = llama.apply_rotary_pos_emb(heads.transpose(0, 1)[None], heads.transpose(0, 1)[None], cos, sin)
    rotate(heads, *Rotary(embedding)(heads, positions))
    assert torch.allclose(heads, expected[0].transpose(0, 1), atol=1e-5)
