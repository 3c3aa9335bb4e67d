"""`TorchEngine`: transformers' model code over our paged attention. Packed batches, one torch thread unless asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from moonpool.core.blocks import key_space_id
from moonpool.core.vocabulary import KeySpace
from moonpool.engine.attention import ATTENTION, Batch, Scratch, paged_attention
from moonpool.engine.contexts import Contexts
from moonpool.engine.engine import Bytes, Draw, Row
from moonpool.engine.families import inspect
from moonpool.engine.layers import replace
from moonpool.engine.linear import linear_maker
from moonpool.engine.loading import bound_caches, end_tokens, keep_freed_memory, load_config, load_model, trim_memory
from moonpool.engine.model import fingerprint
from moonpool.engine.native import load as load_kernels
from moonpool.engine.pages import DevicePages, Pages
from moonpool.engine.pipeline import layers_of
from moonpool.engine.quantize import SCHEME, Int8Linear, check_supported
from moonpool.engine.sampling import draw
from moonpool.errors import ModelError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

AttentionInterface.register(ATTENTION, paged_attention)


class TorchEngine:
    """A model on one device. `path`: a local model directory (see `model.resolve`).

    `stage` (number, of so many): only this part of the layers, for `stage()`; the rest is not read.

    `quantize`: none, or int8 (see `quantize.py`).
    `kernels`: false leaves out our own (`native.py`), which float32 and int8 on a CPU decode with.
    `poison` (tests) starts with all pages full of NaN, so that a read of memory nobody wrote shows.
    Raises `ModelError` for a model that would be computed wrongly or does not load.
    """

    def __init__(
        self,
        path: Path,
        *,
        block_tokens: int = 64,
        page_count: int,
        dtype: str = "float32",
        threads: int = 1,
        device: str = "cpu",
        quantize: str = "none",
        poison: bool = False,
        kernels: bool = True,
        stage: tuple[int, int] = (0, 1),
    ) -> None:
        if dtype not in DTYPES:
            raise ModelError(f"dtype {dtype} is unknown; choose one of {', '.join(DTYPES)}")
        torch.set_num_threads(threads)
        keep_freed_memory()
        bound_caches()
        config = load_config(path)
        self.shape = shape = inspect(config, path.name)
        self.device = torch.device(device)
        if quantize != "none":
            check_supported(config, path.name, dtype, self.device.type)
        self._layers = layers_of(config, shape, stage)
        self._model: PreTrainedModel = load_model(
            path, config, DTYPES[dtype], self.device, None if stage[1] == 1 else self._layers
        )
        on_cpu = self.device.type == "cpu"
        self._kernels = load_kernels(threads) if on_cpu and dtype == "float32" and kernels else None
        make = linear_maker(DTYPES[dtype], self.device, self._kernels)
        if quantize != "none":
            make = partial(Int8Linear, kernels=self._kernels)
        replace(self._model, self._model.model.layers, make, self._kernels)
        trim_memory()
        self._hidden_type = DTYPES[dtype]
        self._hidden_size = int(config.hidden_size)
        self._pages = self._make_pages(page_count, block_tokens, DTYPES[dtype])
        self._scratch = Scratch(self._pages, DTYPES[dtype])
        self._contexts = Contexts(self._pages, DTYPES[dtype]) if on_cpu and self._kernels is None else None
        self.poison = poison
        if poison:
            for page in range(page_count):
                self.poison_page(page)
        self.ends = end_tokens(self._model, config)
        """The model's own end tokens."""
        self._space = KeySpace(
            id=key_space_id(
                model_fingerprint=fingerprint(path),
                dtype=dtype if quantize == "none" else f"{dtype}/{SCHEME}",
                block_tokens=block_tokens,
                layers=shape.layers,
                kv_heads=shape.kv_heads,
                head_dim=shape.head_dim,
            ),
            block_tokens=block_tokens,
            runs=shape.layers,
            run_bytes=self._pages.run_bytes,
        )

    def _make_pages(self, page_count: int, block_tokens: int, dtype: torch.dtype) -> Pages:
        kind: type[Pages] = Pages
        if self.device.type != "cpu":
            kind = DevicePages
        return kind(
            layers=len(self._layers),
            page_count=page_count,
            block_tokens=block_tokens,
            kv_heads=self.shape.kv_heads,
            head_dim=self.shape.head_dim,
            dtype=dtype,
            device=self.device,
        )

    @property
    def space(self) -> KeySpace:
        return self._space

    @property
    def layers(self) -> range:
        return self._layers

    @property
    def takes_layers(self) -> bool:
        return self.device.type == "cpu"

    @property
    def page_count(self) -> int:
        return self._pages.page_count

    @property
    def context_tokens(self) -> int:
        return self.shape.context_tokens

    def clear(self, page: int) -> None:
        self._pages.clear(page)

    def poison_page(self, page: int) -> None:
        """Fill a free page with NaN; whoever uses it without `clear` or a full load gets NaN out."""
        self._pages.fill(page, float("nan"))

    def run(self, layer: int, page: int) -> Bytes:
        return self._pages.run(layer - self._layers.start, page)

    def tail_runs(self, layer: int, page: int, tokens: int) -> tuple[Bytes, Bytes]:
        return self._pages.tail_runs(layer - self._layers.start, page, tokens)

    def step(self, rows: Sequence[Row], on_layer: Callable[[int], None] | None = None) -> list[Draw | None]:
        """See `Engine.step`. Raises ValueError for a row outside its pages or the context."""
        with torch.inference_mode():
            return self._draw(rows, self._forward(rows, on_layer))

    def hidden_bytes(self, tokens: int, rows: int) -> int:
        return tokens * self._hidden_size * self._hidden_type.itemsize

    def stage(
        self, rows: Sequence[Row], hidden: Bytes | None, on_layer: Callable[[int], None] | None = None
    ) -> Bytes | list[Draw | None]:
        """See `StageEngine.stage`; `hidden` is [T, hidden size] in the model's dtype."""
        first = self._layers.start
        inside = on_layer if on_layer is None or not first else lambda layer: on_layer(first + layer)
        with torch.inference_mode():
            batch, out = self._compute(rows, hidden, inside)
            if self._layers.stop < self.shape.layers:
                return np.asarray(out.cpu().contiguous().view(torch.uint8).numpy().reshape(-1))
            return self._draw(rows, self._head(batch, rows, out))

    def logits(self, rows: Sequence[Row]) -> Tensor:
        """Compute the rows; [rows with `sampling`, vocabulary] float32 instead of draws, for comparisons."""
        with torch.inference_mode():
            return self._forward(rows, None)

    def logits_along(self, tokens: Sequence[int]) -> Tensor:
        """[tokens, vocabulary] float32: what follows each token of a new sequence, which fills the first pages."""
        pages = range(-(-len(tokens) // self.space.block_tokens))
        for page in pages:
            self.clear(page)
        with torch.inference_mode():
            row = Row(tokens=tokens, prompt_tokens=len(tokens), start=0, count=len(tokens), pages=list(pages))
            return self._project(self._compute([row], None, None)[1])

    def _draw(self, rows: Sequence[Row], logits: Tensor) -> list[Draw | None]:
        """`logits`: of the rows with `sampling`."""
        drawn = iter(draw([row for row in rows if row.sampling is not None], logits, self.ends))
        return [None if row.sampling is None else next(drawn) for row in rows]

    def _forward(self, rows: Sequence[Row], on_layer: Callable[[int], None] | None) -> Tensor:
        batch, hidden = self._compute(rows, None, on_layer)
        return self._head(batch, rows, hidden)

    def _compute(
        self, rows: Sequence[Row], hidden: Bytes | None, on_layer: Callable[[int], None] | None
    ) -> tuple[Batch, Tensor]:
        """[T, hidden size] behind the last layer that is here, from tokens or from what the stage before gave."""
        for row in rows:
            self._check(row)
        self._pages.settle(rows)
        batch = Batch(self._pages, self._scratch, self._contexts, rows, on_layer, self._kernels)
        given: dict[str, Tensor] = {"input_ids": batch.ids}
        if hidden is not None:
            before = torch.from_numpy(hidden).view(self._hidden_type).view(1, -1, self._hidden_size)
            given = {"inputs_embeds": before.to(self.device)}
        out = self._model.model(**given, position_ids=batch.positions, use_cache=False, batch=batch)
        states: Tensor = out.last_hidden_state[0]
        return batch, states

    def _head(self, batch: Batch, rows: Sequence[Row], hidden: Tensor) -> Tensor:
        """[rows with `sampling`, vocabulary] float32."""
        picked = [index for index, row in enumerate(rows) if row.sampling is not None]
        if not picked:
            return hidden.new_empty((0, self.shape.vocabulary), dtype=torch.float32)
        last = batch.last[torch.tensor(picked, device=self.device)]
        return self._project(hidden.index_select(0, last))

    def _project(self, hidden: Tensor) -> Tensor:
        """[n, vocabulary] float32 of [n, hidden size]."""
        logits: Tensor = self._model.lm_head(hidden).float()
        if self.shape.logits_divisor != 1.0:
            logits /= self.shape.logits_divisor
        return logits

    def _check(self, row: Row) -> None:
        end = row.start + row.count
        if row.count < 1 or row.start < 0 or end > len(row.tokens):
            raise ValueError(f"row computes tokens {row.start}..{end} of {len(row.tokens)}")
        if end > self.context_tokens:
            raise ValueError(f"row ends at token {end}, the context is {self.context_tokens}")
        if len(row.pages) * self.space.block_tokens < end:
            raise ValueError(f"row needs {end} tokens of pages and has {len(row.pages)} of {self.space.block_tokens}")
