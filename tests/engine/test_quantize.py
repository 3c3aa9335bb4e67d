"""int8 weights: exact sums, rows that do not depend on their batch, accuracy, a key space of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, MixtralConfig

from moonpool.engine.accuracy import AGREEMENT_LIMIT, PERPLEXITY_LIMIT, compare, passages
from moonpool.engine.engine import Row
from moonpool.engine.local import generate
from moonpool.engine.quantize import Int8Linear, check_supported, hadamard, quantized_rows
from moonpool.engine.runner import TorchEngine
from moonpool.errors import ModelError
from moonpool.wire.messages import Sampling

NEARLY = 0.3
"""Logits, which reach 30."""
ROWS = (1, 2, 3, 7, 8, 16, 33, 130)


@pytest.fixture(scope="module")
def quantized(smollm2: Path) -> TorchEngine:
    return TorchEngine(smollm2, page_count=40, quantize="int8", poison=True)


def linear(inputs: int, outputs: int, seed: int = 0, bias: bool = False) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=bias)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(layer.weight.shape, generator=torch.Generator().manual_seed(seed)))
    return layer.requires_grad_(False)


def random_rows(count: int, inputs: int) -> torch.Tensor:
    return torch.randn(count, inputs, generator=torch.Generator().manual_seed(count))


@pytest.mark.parametrize(("inputs", "outputs"), [(576, 960), (1536, 576), (100, 7), (33, 3), (4, 1)])
def test_no_pair_of_products_saturates(inputs: int, outputs: int) -> None:
    """The worst case: each activation as large as can be, with the sign of its weight. All weights alike, then random.

    Odd inputs are not rotated, so their activations reach the kernel as they are; the others are rotated back first.
    """
    for weight in (torch.ones(outputs, inputs), linear(inputs, outputs).weight):
        layer = nn.Linear(inputs, outputs, bias=False).requires_grad_(False)
        rotation = hadamard(min(64, inputs & -inputs))
        layer.weight.copy_((weight.reshape(-1, len(rotation)) @ rotation).reshape(weight.shape))
        levels, scale = quantized_rows(weight)
        worst = weight.sign()[-1:]
        hidden = (worst.reshape(-1, len(rotation)) @ rotation).reshape(worst.shape)
        expected = (worst.double() @ levels.double().t()) * scale.double()
        got = Int8Linear([layer])(hidden).double()
        torch.testing.assert_close(got, expected, rtol=0.01, atol=0.01 * float(expected.abs().max()))


@pytest.mark.parametrize(("inputs", "outputs"), [(576, 960), (1536, 576), (192, 64)])
def test_a_row_is_the_same_to_the_bit_in_every_batch(inputs: int, outputs: int) -> None:
    layer = Int8Linear([linear(inputs, outputs)])
    hidden = random_rows(max(ROWS), inputs)
    together = layer(hidden)
    for count in ROWS:
        assert torch.equal(layer(hidden[:count]), together[:count])
    assert all(torch.equal(layer(hidden[row : row + 1]), together[row : row + 1]) for row in range(0, 130, 13))


def test_parts_follow_each_other_and_keep_their_biases() -> None:
    parts = [linear(64, 24, seed=1, bias=True), linear(64, 8, seed=2), linear(64, 8, seed=3, bias=True)]
    hidden = random_rows(5, 64)[None]
    expected = torch.cat([Int8Linear([part])(hidden) for part in parts], dim=-1)
    joined = Int8Linear(parts)(hidden)
    assert joined.shape == (1, 5, 40)
    assert torch.equal(joined, expected)
    exact = torch.cat([part(hidden) for part in parts], dim=-1)
    torch.testing.assert_close(joined, exact, rtol=0, atol=0.03 * float(exact.abs().max()))


def test_zeros_stay_zeros_and_nan_stays_in_its_row() -> None:
    layer, hidden = Int8Linear([linear(64, 16)]), random_rows(3, 64)
    hidden[0], hidden[1, 5] = 0.0, float("nan")
    out = layer(hidden)
    assert torch.equal(out[0], torch.zeros(16))
    assert out[1].isnan().all()
    assert torch.equal(out[2:], layer(hidden[2:]))


def test_large_activations_do_not_drown_their_neighbours() -> None:
    """What rotation is for: one activation 300 times as large as the others."""
    exact, hidden = linear(576, 64), random_rows(4, 576)
    hidden[:, 100] = 300.0
    exact.weight[:, 100] = 0.0
    error = Int8Linear([exact])(hidden) - exact(hidden)
    plain = (hidden * (127 / 300)).round() * (300 / 127)
    assert error.std() < 0.5 * (exact(plain) - exact(hidden)).std()


def test_accuracy_on_our_text(engine: TorchEngine, quantized: TorchEngine, smollm2: Path) -> None:
    tokens = passages(smollm2)
    assert len(tokens) > 2000
    found = compare(engine, quantized, tokens[:512])
    assert 1 < found.perplexity < 60
    assert found.ratio <= PERPLEXITY_LIMIT
    assert found.agreement >= AGREEMENT_LIMIT
    assert found.greedy >= AGREEMENT_LIMIT


def test_an_output_holds_in_other_chunks_and_company(quantized: TorchEngine, smollm2: Path) -> None:
    """Attention and norms round by the shape of the batch, and int8 turns that into levels of activations.

    So what was taken in one batch is nearly the best in another, and nearly always the best.
    """
    tokens = passages(smollm2)
    prompts = [tokens[at : at + 40 + at // 10] for at in (0, 300, 600)]
    samplings = [Sampling(seed=0, temperature=0, max_tokens=12) for _ in prompts]
    outputs = generate(quantized, prompts, samplings, chunk=16)
    best = 0
    for prompt, output in zip(prompts, outputs, strict=True):
        logits = quantized.logits_along([*prompt, *output[:-1]])[len(prompt) - 1 :]
        behind = logits.amax(-1) - logits[torch.arange(len(output)), torch.tensor(output)]
        assert float(behind.max()) < NEARLY
        best += int((behind == 0).sum())
    assert best >= 0.9 * sum(map(len, outputs))


def test_kvcache_is_not_shared_with_other_weights(engine: TorchEngine, quantized: TorchEngine) -> None:
    assert quantized.space.id != engine.space.id
    assert quantized.space.run_bytes == engine.space.run_bytes


def test_float_weights_are_not_kept(quantized: TorchEngine) -> None:
    """Embedding and norms only: 113 MB of 538."""
    model = quantized._model
    assert not any(isinstance(module, nn.Linear) for module in model.modules())
    kept = sum(parameter.nbytes for parameter in model.parameters())
    assert kept < 0.25 * 538e6


def test_logits_in_a_batch_are_nearly_those_alone(quantized: TorchEngine, smollm2: Path) -> None:
    """Attention and norms round differently by a batch's shape, which may move an activation by one level."""
    tokens = passages(smollm2)[:40]
    sampling = Sampling(seed=0, temperature=0, max_tokens=1)
    rows = [Row(tokens, len(tokens), 0, len(tokens), [page], sampling) for page in range(3)]
    rows[1].tokens = passages(smollm2)[100:140]
    for page in range(3):
        quantized.clear(page)
    together = quantized.logits(rows)
    quantized.clear(0)
    alone = quantized.logits(rows[:1])[0]
    assert float((together[0] - alone).abs().max()) < 2 * NEARLY
    assert float(alone.max() - alone[int(together[0].argmax())]) < NEARLY


def test_what_int8_cannot_compute_is_refused() -> None:
    with pytest.raises(ModelError, match="take --dtype float32"):
        check_supported(LlamaConfig(), "llama", "bfloat16")
    with pytest.raises(ModelError, match="on a CPU"):
        check_supported(LlamaConfig(), "llama", "float32", "cuda")
    with pytest.raises(ModelError, match="mixtures of experts"):
        check_supported(MixtralConfig(), "mixtral", "float32")
    check_supported(LlamaConfig(), "llama", "float32")
