"""The kernels of a decode step compute what torch does, and are left out where they cannot be had."""

from __future__ import annotations

import logging
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from moonpool.engine import compiled, native
from moonpool.engine.engine import Row
from moonpool.engine.layers import Norm, rotate
from moonpool.engine.linear import PackedLinear
from moonpool.engine.native import MOST_ROWS, Kernels
from moonpool.engine.quantize import Int8Linear
from moonpool.engine.runner import TorchEngine
from moonpool.wire.messages import Sampling
from tests.engine.test_against_generate import prompt_of
from tests.engine.test_families import FAMILIES, save

GREEDY = Sampling(seed=0, temperature=0.0, max_tokens=64, ignore_eos=True)
CLOSE = 1e-3


@pytest.fixture
def kernels() -> Kernels:
    found = native.load(2)
    assert found is not None
    return found


@pytest.mark.parametrize(("inputs", "outputs"), [(100, 72), (64, 192), (7, 33), (576, 200)])
def test_products_of_every_count_of_rows(kernels: Kernels, inputs: int, outputs: int) -> None:
    torch.manual_seed(inputs)
    parts = [nn.Linear(inputs, outputs - 16, bias=False), nn.Linear(inputs, 16)]
    layer = PackedLinear(parts, kernels)
    assert layer.native is not None
    hidden = torch.randn(1, MOST_ROWS, inputs)
    expected = torch.cat([part(hidden) for part in parts], -1)
    whole = layer(hidden)
    for rows in range(1, MOST_ROWS + 1):
        assert torch.allclose(layer(hidden[:, :rows]), expected[:, :rows], atol=1e-5)
        assert torch.equal(layer(hidden[:, :rows]), whole[:, :rows])  # the same to the last bit in every batch


@pytest.mark.parametrize(("inputs", "outputs"), [(100, 72), (7, 33), (576, 200)])
def test_int8_is_that_of_torch(kernels: Kernels, inputs: int, outputs: int) -> None:
    """To the rounding of its last float32 operations, in every batch to the last bit."""
    torch.manual_seed(inputs)
    parts = [nn.Linear(inputs, outputs - 16, bias=False), nn.Linear(inputs, 16)]
    layer, theirs = Int8Linear(parts, kernels), Int8Linear(parts)
    assert layer.native is not None
    hidden = torch.randn(1, MOST_ROWS, inputs) * 9
    hidden[:, 1] = 0
    hidden[:, 2, 0] = 1000
    expected, whole = theirs(hidden), layer(hidden)
    for rows in range(1, MOST_ROWS + 1):
        assert torch.allclose(layer(hidden[:, :rows]), expected[:, :rows], rtol=1e-5, atol=1e-5)
        assert torch.equal(layer(hidden[:, :rows]), whole[:, :rows])


def test_weights_that_lie_otherwise_are_not_read(kernels: Kernels) -> None:
    weights = torch.randn(128, 64)
    packed = torch.ops.mkldnn._reorder_linear_weight(weights, 512)
    assert native.linear_shape(packed, weights, None) is not None
    assert native.linear_shape(packed, weights.flip(0), None) is None
    plain = torch.ops.mkldnn._reorder_linear_weight(weights, 1)
    assert native.linear_shape(plain, weights, None) is None, "it lies as it came"


@pytest.mark.parametrize("width", [16, 52])
def test_the_norm_is_that_of_torch(kernels: Kernels, width: int) -> None:
    hidden, weight = torch.randn(1, 5, width), torch.randn(width)
    assert torch.allclose(Norm(weight, 0.1, kernels)(hidden), F.rms_norm(hidden, [width], weight, 0.1), atol=1e-5)


@pytest.mark.parametrize("dim", [8, 40, 64, 128])
def test_attention_over_pages(kernels: Kernels, dim: int) -> None:
    """Pages in any order, rows of any length; what lies behind their ends is NaN."""
    torch.manual_seed(dim)
    block, heads, kv_heads = 16, 6, 2
    cache = torch.full((12, 2, block, kv_heads, dim), float("nan"))
    tables, ends = [[7], [3, 1, 5], [0, 11]], [1, 41, 32]
    qkv = torch.randn(3, heads + 2 * kv_heads, dim) * 3
    out = []
    for row, (table, end) in enumerate(zip(tables, ends, strict=True)):
        context = torch.randn(2, end, kv_heads, dim)
        for at in range(end):
            cache[table[at // block], :, at % block] = context[:, at]
        key, value = (part.transpose(0, 1)[None] for part in context)
        query = qkv[row, :heads, None][None]
        out.append(F.scaled_dot_product_attention(query, key, value, scale=0.2, enable_gqa=True)[0, :, 0])
    found = kernels.attend(native.Step(tables, ends, block), qkv, heads, 0.2, cache)
    assert torch.allclose(found, torch.stack(out), atol=1e-5)


def test_a_model_has_the_logits_that_it_has_through_torch(smollm2: Path) -> None:
    """Tokens that decode alone, and beside a prompt."""
    found = []
    for kernels in (True, False):
        engine = TorchEngine(smollm2, page_count=12, poison=True, kernels=kernels)
        for page in range(12):
            engine.clear(page)
        prompts = [prompt_of(n)[:n] for n in (3, 66, 130)]
        tables = [[4 * i, 4 * i + 1, 4 * i + 2] for i in range(3)]
        ready = [Row(p, len(p), 0, len(p) - 1, t) for p, t in zip(prompts, tables, strict=True)]
        single = [Row(p, len(p), len(p) - 1, 1, t, GREEDY) for p, t in zip(prompts, tables, strict=True)]
        engine.logits(ready)
        alone = engine.logits(single)
        beside = engine.logits([single[1], Row(prompts[0], 3, 0, 3, tables[0], GREEDY), single[2]])
        found.append((alone, beside))
    for mine, theirs in zip(*found, strict=True):
        assert torch.allclose(mine, theirs, atol=CLOSE)


def test_compiled_once(kernels: Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONPOOL_HOME", str(tmp_path))
    started: list[list[str]] = []
    run = subprocess.run

    def spy(command: list[str], **options: Any) -> Any:
        started.append(command)
        return run(command, **options)

    monkeypatch.setattr(compiled.subprocess, "run", spy)
    assert native.load(1) is not None
    assert native.load(1) is not None
    assert len([command for command in started if "-shared" in command]) == 1
    assert len(list((tmp_path / "kernels").iterdir())) == 1


@pytest.mark.parametrize(
    ("script", "said"), [(None, "there is no gcc"), ("echo no such flag >&2; exit 1", "no such flag")]
)
def test_without_a_compiler(
    script: str | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if script is not None:
        compiler = tmp_path / "gcc"
        compiler.write_text(f"#!/bin/sh\n{script}\n")
        compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("MOONPOOL_HOME", str(tmp_path / "home"))
    with caplog.at_level(logging.WARNING):
        assert native.load(1) is None
    assert said in caplog.text


def test_the_families_run_through_the_kernels(tmp_path: Path) -> None:
    """Else test_families.py would say nothing of them."""
    for family in ("olmo2", "phi3", "qwen2", "qwen3", "smollm3", "granite"):
        engine = TorchEngine(save(FAMILIES[family](), tmp_path / family), page_count=4)
        layer = engine._model.model.layers[0]
        assert layer.self_attn._native is not None
        assert layer.mlp._native is not None


@pytest.mark.parametrize("rows", [3, 50])
def test_small_operations_of_few_rows_and_many(kernels: Kernels, rows: int) -> None:
    torch.manual_seed(rows)
    gate_up = torch.randn(1, rows, 48) * 20
    gate, up = gate_up.chunk(2, dim=-1)
    assert torch.allclose(kernels.activate(gate_up), F.silu(gate) * up, rtol=1e-5, atol=1e-5)
    heads, cos, sin = torch.randn(rows, 5, 24), torch.randn(rows, 1, 16), torch.randn(rows, 1, 16)
    expected = heads.clone()
    rotate(expected[:, :3], cos, sin)
    kernels.rotate(heads, 3, (cos, sin))
    assert torch.allclose(heads, expected, atol=1e-6)


@pytest.mark.parametrize(("block", "start", "count"), [(16, 0, 1), (16, 0, 70), (64, 64, 50), (32, 93, 130)])
@pytest.mark.parametrize(("dim", "heads", "kv_heads"), [(64, 6, 2), (128, 3, 3), (64, 40, 1)])
def test_a_chunk_of_a_prompt(
    kernels: Kernels, block: int, start: int, count: int, dim: int, heads: int, kv_heads: int
) -> None:
    """Causal over its pages in any order; what lies behind its end is NaN."""
    torch.manual_seed(start)
    end = start + count
    pages = torch.randperm(16)[: -(-end // block)]
    cache = torch.full((16, 2, block, kv_heads, dim), float("nan"))
    context = torch.randn(end, 2, kv_heads, dim)
    for at in range(end):
        cache[pages[at // block], :, at % block] = context[at]
    qkv = torch.cat((torch.randn(count, heads, dim) * 5, context[start:].flatten(1, 2)), 1)
    key, value = context.permute(1, 2, 0, 3)[:, None]
    mask = torch.arange(end)[None] <= torch.arange(start, end)[:, None]
    query = qkv[:, :heads].transpose(0, 1)[None]
    expected = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=0.2, enable_gqa=True)
    found = kernels.prefill(pages, start, qkv, heads, 0.2, cache)
    assert torch.allclose(found, expected[0].transpose(0, 1), atol=1e-4)
