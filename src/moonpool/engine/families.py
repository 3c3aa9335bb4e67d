"""Which models the torch engine computes right, and why others are refused.

The verified families are greedy-equal to transformers' `generate` in tests/engine/test_families.py. Everything
is read from the configuration, before any weight is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moonpool.errors import ModelError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

VERIFIED = (
    "granite",
    "llama",
    "mistral",
    "mixtral",
    "olmo2",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "smollm3",
)


@dataclass(frozen=True, slots=True)
class Shape:
    """What the engine needs to know of a model. `logits_divisor`: granite divides its logits by a constant."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context_tokens: int
    vocabulary: int
    logits_divisor: float


def inspect(config: PretrainedConfig, name: str) -> Shape:
    """The shape of a verified model; `ModelError` names what is not handled."""
    reason = _refusal(config)
    if reason:
        raise ModelError(
            f"{name}: {config.model_type} {reason}; "
            f"verified families: {', '.join(VERIFIED)}, with full rotary attention"
        )
    heads = int(config.num_attention_heads)
    head_dim = getattr(config, "head_dim", None)
    return Shape(
        layers=int(config.num_hidden_layers),
        heads=heads,
        kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_dim=int(head_dim or config.hidden_size // heads),
        context_tokens=_context(config),
        vocabulary=int(config.vocab_size),
        logits_divisor=float(getattr(config, "logits_scaling", None) or 1.0),
    )


def _refusal(config: PretrainedConfig) -> str | None:
    """The most telling reason first; a family that nobody verified is the last."""
    softcap = getattr(config, "attn_logit_softcapping", None)
    window = _window(config)
    if getattr(config, "is_encoder_decoder", False):
        return "is an encoder-decoder model, which needs a second KV cache"
    if getattr(config, "quantization_config", None) is not None:
        return "has quantized weights; take a safetensors copy in float or a GGUF file"
    if getattr(config, "kv_lora_rank", None) is not None:
        return "uses multi-head latent attention (MLA), whose cache has another layout"
    if softcap is not None:
        return f"caps attention logits softly (attn_logit_softcapping={softcap})"
    if window is not None:
        return f"uses sliding-window attention (window {window}, context {_positions(config)})"
    if getattr(config, "alibi", False) or config.model_type in ("bloom", "mpt"):
        return "uses ALiBi instead of rotary positions"
    if not _rope(config):
        return "has no rotary positions"
    if config.model_type not in VERIFIED:
        return "is not a verified family"
    return None


def _window(config: PretrainedConfig) -> int | None:
    """The sliding window, where some layer uses one and the context is longer than it."""
    layer_types = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if window is None or window >= _positions(config):
        return None
    if layer_types is not None:
        return int(window) if any(kind != "full_attention" for kind in layer_types) else None
    return int(window) if getattr(config, "use_sliding_window", True) else None


def _rope(config: PretrainedConfig) -> dict[str, object]:
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    return dict(rope) if rope else {}


def _positions(config: PretrainedConfig) -> int:
    return int(getattr(config, "max_position_embeddings", None) or 0)


def _context(config: PretrainedConfig) -> int:
    """Longrope switches all frequencies at its original length: KV from before would be wrong after, so stop there."""
    rope = _rope(config)
    original = rope.get("original_max_position_embeddings")
    if rope.get("rope_type") == "longrope" and isinstance(original, int):
        return min(original, _positions(config))
    return _positions(config)
