"""Tiny random models: each verified family is greedy-equal to `generate`, everything else is refused by name."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

from moonpool.engine.families import VERIFIED
from moonpool.engine.local import generate
from moonpool.engine.runner import TorchEngine
from moonpool.errors import ModelError
from moonpool.wire.messages import Sampling
from tests.exactness import EPSILON, Reference

SMALL = {
    "vocab_size": 320,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

FAMILIES: dict[str, Callable[[], tf.PretrainedConfig]] = {
    "granite": lambda: tf.GraniteConfig(
        **SMALL, attention_multiplier=0.2, logits_scaling=3.0, residual_multiplier=0.7, embedding_multiplier=2.0
    ),
    "llama": lambda: tf.LlamaConfig(**SMALL),
    "llama with llama3 rope and tied embeddings": lambda: tf.LlamaConfig(
        **SMALL, rope_parameters=LLAMA3_ROPE, tie_word_embeddings=True
    ),
    "llama of one KV head": lambda: tf.LlamaConfig(**SMALL | {"num_key_value_heads": 1}),
    "llama without shared KV heads": lambda: tf.LlamaConfig(**SMALL | {"num_key_value_heads": 6}),
    "mistral": lambda: tf.MistralConfig(**SMALL, sliding_window=None, head_dim=16),
    "mistral with a window as long as its context": lambda: tf.MistralConfig(**SMALL, sliding_window=256),
    "mixtral": lambda: tf.MixtralConfig(**SMALL, **EXPERTS),
    "olmo2": lambda: tf.Olmo2Config(**SMALL),
    "phi3": lambda: tf.Phi3Config(**SMALL),
    "qwen2": lambda: tf.Qwen2Config(**SMALL),
    "qwen3": lambda: tf.Qwen3Config(**SMALL, head_dim=16),
    "qwen3_moe": lambda: tf.Qwen3MoeConfig(
        **SMALL, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
    ),
    "smollm3": lambda: tf.SmolLM3Config(**SMALL),
}

SLIDING = {"sliding_window": 32}
MLA = {"n_routed_experts": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "first_k_dense_replace": 1}
REFUSED: dict[str, tuple[Callable[[], tf.PretrainedConfig], str]] = {
    "sliding": (lambda: tf.MistralConfig(**SMALL, **SLIDING), "mistral uses sliding-window attention"),
    "some layers sliding": (
        lambda: tf.Qwen2Config(**SMALL, **SLIDING, use_sliding_window=True, max_window_layers=1),
        r"qwen2 uses sliding-window attention \(window 32, context 256\)",
    ),
    "soft-capping": (lambda: tf.Gemma2Config(**SMALL), "gemma2 caps attention logits softly"),
    "mla": (lambda: tf.DeepseekV3Config(**SMALL, **MLA), "deepseek_v3 uses multi-head latent attention"),
    "encoder": (lambda: tf.T5Config(), "t5 is an encoder-decoder model"),
    "alibi": (lambda: tf.BloomConfig(), "bloom uses ALiBi"),
    "learned positions": (lambda: tf.GPT2Config(), "gpt2 has no rotary positions"),
    "no attention": (lambda: tf.MambaConfig(), "mamba has no rotary positions"),
    "unverified": (lambda: tf.GPTNeoXConfig(), "gpt_neox is not a verified family; verified families: granite, llama"),
    "another": (lambda: tf.GemmaConfig(), "gemma is not a verified family"),
}


def save(config: tf.PretrainedConfig, folder: Path) -> Path:
    torch.manual_seed(5)
    model = tf.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def quiet() -> None:
    tf.utils.logging.disable_progress_bar()
    tf.utils.logging.set_verbosity_error()


def prompts_of(lengths: tuple[int, ...]) -> list[list[int]]:
    rng = random.Random(8)
    return [[rng.randrange(3, 320) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_equal_to_generate(name: str, tmp_path: Path) -> None:
    path = save(FAMILIES[name](), tmp_path)
    reference = Reference(path)
    engine = TorchEngine(path, block_tokens=16, page_count=40, poison=True)
    prompts = prompts_of((1, 15, 16, 17, 33, 70))
    sampling = Sampling(seed=0, temperature=0.0, max_tokens=12, ignore_eos=True)
    expected = [reference.generate(prompt, 12) for prompt in prompts]
    assert len({tuple(output) for output in expected}) == len(prompts), "a model that ignores its prompt proves nothing"
    for chunk in (200, 16, 23, 1):
        outputs = generate(engine, prompts, [sampling] * len(prompts), chunk)
        for prompt, output, wanted in zip(prompts, outputs, expected, strict=True):
            if output != wanted:
                assert reference.check(prompt, output).ties > 0


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_the_models_own(name: str, tmp_path: Path) -> None:
    """Sampling needs their scale, which greedy tokens do not show."""
    path = save(FAMILIES[name](), tmp_path)
    seen: list[float | None] = []
    prompt = prompts_of((40,))[0]
    engine = TorchEngine(path, block_tokens=16, page_count=8)
    sampling = Sampling(seed=0, temperature=0.0, max_tokens=1, logprobs=0)
    token = generate(engine, [prompt], [sampling], 64, lambda _, drawn: seen.append(drawn.logprob))[0][0]
    raw = Reference(path).logits(prompt, [token])[0].log_softmax(-1)
    assert seen == [pytest.approx(float(raw[token]), abs=EPSILON)]


def test_every_verified_family_is_tested() -> None:
    assert {name.split()[0] for name in FAMILIES} == set(VERIFIED)


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_computed_wrongly_is_refused(name: str, tmp_path: Path) -> None:
    config, reason = REFUSED[name]
    config().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=reason) as error:
        TorchEngine(tmp_path, page_count=2)
    assert "\n" not in str(error.value)


def test_longrope_serves_up_to_its_original_length(tmp_path: Path) -> None:
    """Beyond it all frequencies change, and KV that was computed before would be wrong."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64, **factors}
    config = tf.Phi3Config(**SMALL, rope_parameters=rope, original_max_position_embeddings=64)
    engine = TorchEngine(save(config, tmp_path), page_count=2)
    assert engine.context_tokens == 64


def test_quantized_weights_are_refused(tmp_path: Path) -> None:
    config = tf.LlamaConfig(**SMALL, quantization_config={"quant_method": "gptq", "bits": 4})
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="llama has quantized weights; take"):
        TorchEngine(tmp_path, page_count=2)


def test_damaged_weights_are_refused(tmp_path: Path) -> None:
    """transformers would fill what is missing with random numbers and warn."""
    path = save(tf.LlamaConfig(**SMALL), tmp_path / "whole")
    lacking = tmp_path / "lacking"
    shutil.copytree(path, lacking)
    weights = load_file(path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, lacking / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"1 tensors are missing.*model\.layers\.1\.mlp\.up_proj\.weight"):
        TorchEngine(lacking, page_count=2)
    cut = tmp_path / "cut"
    shutil.copytree(path, cut)
    whole = (cut / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match="cut: the weights do not load"):
        TorchEngine(cut, page_count=2)


def test_end_tokens_come_from_the_generation_configuration(tmp_path: Path) -> None:
    path = save(tf.LlamaConfig(**SMALL), tmp_path)
    assert TorchEngine(path, page_count=2).ends == {2}
    tf.GenerationConfig(eos_token_id=[5, 9]).save_pretrained(path)
    assert TorchEngine(path, page_count=2).ends == {5, 9}
