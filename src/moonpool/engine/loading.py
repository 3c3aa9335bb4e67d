"""Weights from a local directory into transformers' model code: safetensors or GGUF only, no remote code.

Safetensors stay memory-mapped, so workers on one host share the page cache's copy.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.utils import logging

from moonpool.engine.attention import ATTENTION
from moonpool.errors import ModelError

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt(3)."""
CACHED_PRODUCTS = 32


def keep_freed_memory() -> None:
    """Tell glibc to reuse the memory of big activations: giving each back costs some 10 % of prefill in page faults."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return
    mallopt(M_MMAP_THRESHOLD, 1 << 30)
    mallopt(M_TRIM_THRESHOLD, 256 << 20)


def bound_caches() -> None:
    """Let oneDNN, and torch's layer over it, keep the code that they make for a shape of a product for few shapes.

    Each keeps 1,024 by default, .3 to 1 MiB a piece, and each count of tokens makes a handful: a worker that serves
    prompts of all lengths would grow by hundreds of MiB. Making one again takes half a millisecond, once a step.
    To be called before the first product of the process; what the environment says already is left.
    """
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, str(CACHED_PRODUCTS))


def forget_pages(weights: Iterable[torch.Tensor]) -> None:
    """Unmap from this process what it has read of weights that lie in a mapped file; a later read maps them again."""
    with Path("/proc/self/maps").open() as lines:
        files = [line.split(maxsplit=5) for line in lines if ".safetensors" in line]
    spans = [tuple(int(end, 16) for end in fields[0].split("-")) for fields in files]
    try:
        madvise = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return
    for weight in weights:
        first = -(-weight.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        size = weight.data_ptr() + weight.nbytes - first
        if size > 0 and any(low <= first and first + size <= high for low, high in spans):
            madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), mmap.MADV_DONTNEED)


def trim_memory() -> None:
    """Return to the system what loading has freed: `keep_freed_memory` would keep it for activations."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def silence() -> None:
    """No bars and no warnings of transformers: what matters is checked here and raised."""
    quiet: tuple[Callable[[], None], ...] = (logging.disable_progress_bar, logging.set_verbosity_error)
    for switch in quiet:
        switch()


def gguf_file(path: Path) -> str | None:
    """The directory's GGUF file, where it has no safetensors."""
    if any(path.glob("*.safetensors")):
        return None
    found = sorted(path.glob("*.gguf"))
    return found[0].name if found else None


def load_config(path: Path) -> PretrainedConfig:
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(path, gguf_file=gguf_file(path), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{path}: no configuration that transformers knows: {_line(error)}") from error
    return config


def load_model(
    path: Path, config: PretrainedConfig, dtype: torch.dtype, device: torch.device, layers: range | None = None
) -> PreTrainedModel:
    """The causal model in evaluation mode, attention bound to our pages.

    `layers`: only these are read and kept, and `layer_idx` counts from the first of them; of what is before and behind
    all layers, what a stage of a pipeline needs (`_cut`).
    """
    silence()
    kind = AutoModelForCausalLM if layers is None else _without_others(config, layers)
    load: Callable[..., Any] = kind.from_pretrained
    model: PreTrainedModel
    report: dict[str, Iterable[object]]
    try:
        model, report = load(
            path,
            config=config,
            dtype=dtype,
            attn_implementation=ATTENTION,
            gguf_file=gguf_file(path),
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"{path}: the weights do not load: {_line(error)}") from error
    lacking = sorted(str(key) for kind in ("missing_keys", "mismatched_keys") for key in report[kind])
    if lacking:
        raise ModelError(f"{path}: {len(lacking)} tensors are missing or of the wrong shape, first {lacking[0]}")
    if not hasattr(model, "model") or not hasattr(model, "lm_head"):
        raise ModelError(
            f"{path}: {config.model_type} has no `.model` and `.lm_head`; it cannot be driven layer by layer"
        )
    model.requires_grad_(False)
    if layers is not None:
        _cut(model, layers)
    torch.nn.Module.to(model, device)
    return model


class _Absent(torch.nn.Module):
    """In the place of a layer of another stage: what a file has for it is not read."""


def _without_others(config: PretrainedConfig, layers: range) -> Any:
    """transformers' class of this model, whose layers outside the range are made and filled by nobody."""
    known: Any = AutoModelForCausalLM._model_mapping[type(config)]  # a class for each verified family

    def cut_init(self: Any, config: PretrainedConfig) -> None:
        known.__init__(self, config)
        for index in range(len(self.model.layers)):
            if index not in layers:
                self.model.layers[index] = _Absent()

    return type(known.__name__, (known,), {"__init__": cut_init, "__module__": known.__module__})


def _cut(model: Any, layers: range) -> None:
    """A stage's part: the first one embeds, the last one normalises and has the head, and only these."""
    inner, count = model.model, len(model.model.layers)
    inner.layers = torch.nn.ModuleList(inner.layers[layers.start : layers.stop])
    for index, layer in enumerate(inner.layers):
        layer.self_attn.layer_idx = index
    if layers.start > 0:
        inner.embed_tokens = torch.nn.Identity()
        if hasattr(inner, "embedding_multiplier"):
            inner.embedding_multiplier = 1.0
    if layers.stop < count:
        inner.norm = torch.nn.Identity()
        model.lm_head = torch.nn.Identity()


def end_tokens(model: PreTrainedModel, config: PretrainedConfig) -> frozenset[int]:
    """End-of-sequence ids of the generation configuration, else of the model's."""
    generation: GenerationConfig | None = model.generation_config
    ends = generation.eos_token_id if generation is not None else None
    if ends is None:
        ends = config.eos_token_id
    if ends is None:
        return frozenset()
    return frozenset(ends) if isinstance(ends, list) else frozenset((int(ends),))


def _line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
