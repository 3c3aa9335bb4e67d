"""Which instances of vLLM may share blocks: those whose KV of equal tokens has equal bytes (DESIGN: key spaces)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path

from msgspec import Struct

from moonpool.connectors.counters import log
from moonpool.core.blocks import key_space_id
from moonpool.core.vocabulary import KeySpace
from moonpool.engine.model import fingerprint
from moonpool.errors import ConfigError, ModelError

Adapter = tuple[str, str]
"""(name, path) of a LoRA adapter."""


class Shape(Struct, frozen=True):
    """What a worker says of its KVCache, as it lies in memory."""

    layers: int
    run_bytes: int
    layout: str


class Model(Struct, frozen=True):
    """What all ranks of an instance compute with."""

    weights: str
    """Fingerprint, or a name that stands for it."""
    settings: str
    """Whatever else changes what it computes: its configuration, quantization, the engine's version."""
    dtype: str
    """Of the KVCache."""
    block_tokens: int
    kv_heads: int
    head_dim: int


class Spaces:
    """The key spaces of an instance, one an adapter. Used by one thread."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._shapes: tuple[Shape, ...] = ()
        self._known: dict[Adapter | None, KeySpace | None] = {}

    @property
    def is_known(self) -> bool:
        """The workers have said what their blocks look like."""
        return bool(self._shapes)

    def learn(self, shapes: Mapping[tuple[int, int], Shape]) -> None:
        """`shapes`: by (pipeline rank, tensor rank). Raises ConfigError."""
        ranks = [(0, rank) for rank in range(len(shapes))]
        if sorted(shapes) != ranks:
            raise ConfigError("pipeline-parallel vLLM is not supported yet: use tensor parallelism")
        if len(set(shapes.values())) > 1:
            raise ConfigError(f"the ranks' KVCaches differ: {shapes}")
        self._shapes = tuple(shapes[rank] for rank in ranks)
        self._known.clear()

    def of(self, adapter: Adapter | None) -> KeySpace | None:
        """None: blocks of this adapter are shared with nobody, for nobody knows its weights."""
        if adapter not in self._known:
            self._known[adapter] = self._make(adapter)
        return self._known[adapter]

    def _make(self, adapter: Adapter | None) -> KeySpace | None:
        model, shape, ranks = self._model, self._shapes[0], len(self._shapes)
        try:
            lora = "" if adapter is None else _weights_in(adapter[1])
        except (ModelError, OSError) as e:
            log.warning("prompts with the adapter %s are not shared: %s", adapter, e)
            return None
        space = key_space_id(
            model_fingerprint=f"{model.weights}/{model.settings}",
            dtype=model.dtype,
            block_tokens=model.block_tokens,
            layers=shape.layers,
            kv_heads=model.kv_heads,
            head_dim=model.head_dim,
            lora=lora,
            tensor_parallel=ranks,
            layout=f"vllm: {shape.layout}",
        )
        return KeySpace(space, model.block_tokens, shape.layers * ranks, shape.run_bytes)


def weights_of(name: str, given: str, in_cache: Callable[[str], str]) -> str:
    """`name`: a model's directory or hub id; `given`: what the user says instead; `in_cache`: a hub id's directory.

    Raises ConfigError where the weights cannot be read and nothing is said instead.
    """
    if given:
        return f"as named: {given}"
    try:
        return _weights_in(name if Path(name).is_dir() else in_cache(name))
    except (ModelError, OSError, ValueError) as e:
        raise ConfigError(
            f"the weights of {name} cannot be told from others ({e}); name them in kv_connector_extra_config: "
            '"model": "…" (equal names must mean equal weights)'
        ) from None


def digest_of(*parts: object) -> str:
    """Hex, of anything that JSON or `str` can write."""
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _weights_in(folder: str) -> str:
    return fingerprint(Path(folder))
