"""The torch engine as a side of `make bench-engine`. Arguments: model, threads, quantization, device, dtype."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from moonpool.bench.engine_walk import EngineWalk, Prompt
from moonpool.bench.orders import answering, carry_out_orders
from moonpool.engine.engine import Row
from moonpool.engine.runner import DTYPES, TorchEngine
from moonpool.wire.messages import Sampling

PAGES = 160
PAGES_A_STREAM = 10
CHUNK = 512
"""Tokens of a prefill step, as a worker's by default."""
READ_BYTES = 1 << 30
GREEDY = Sampling(seed=0, temperature=0.0, max_tokens=1 << 16, ignore_eos=True)


class TorchSide:
    def __init__(self, path: str, threads: int, quantize: str, device: str, dtype: str) -> None:
        self._engine = TorchEngine(
            Path(path), page_count=PAGES, threads=threads, quantize=quantize, device=device, dtype=dtype
        )
        stored = sum(file.stat().st_size for file in Path(path).glob("*.safetensors"))
        self._weight_bytes = stored * DTYPES[dtype].itemsize // torch.float32.itemsize

    def prefill(self, prompt: Prompt) -> Callable[[], object]:
        pages = self._clean(0, -(-len(prompt) // self._engine.space.block_tokens))

        def call() -> None:
            for start in range(0, len(prompt), CHUNK):
                count = min(CHUNK, len(prompt) - start)
                last = start + count == len(prompt)
                self._engine.step([Row(prompt, len(prompt), start, count, pages, GREEDY if last else None)])

        return call

    def start(self, prompts: list[Prompt]) -> Callable[[], object]:
        streams = [(list(prompt), self._clean(n * PAGES_A_STREAM, PAGES_A_STREAM)) for n, prompt in enumerate(prompts)]

        def rows() -> list[Row]:
            return [
                Row(tokens, len(prompt), len(tokens) - 1, 1, pages, GREEDY)
                for prompt, (tokens, pages) in zip(prompts, streams, strict=True)
            ]

        def step() -> None:
            for (tokens, _), drawn in zip(streams, self._engine.step(rows()), strict=True):
                assert drawn is not None
                tokens.append(drawn.token)

        for tokens, pages in streams:
            if len(tokens) > 1:
                self._engine.step([Row(tokens, len(tokens), 0, len(tokens) - 1, pages)])
        step()
        return step

    def extra(self, order: dict[str, Any]) -> dict[str, Any]:
        if order["do"] != "read":
            raise ValueError(f"no such order: {order['do']}")
        return {"seconds": [self._read_weights()]}

    def _read_weights(self) -> float:
        """Seconds to read as many bytes as the model's weights once, by all threads, at the rate of a long sum."""
        memory = torch.ones(READ_BYTES // 4, device=self._engine.device)
        best = float("inf")
        for _ in range(5):
            began = time.perf_counter()
            memory.sum().item()
            best = min(best, time.perf_counter() - began)
        return best * self._weight_bytes / READ_BYTES

    def _clean(self, first: int, count: int) -> list[int]:
        pages = list(range(first, first + count))
        for page in pages:
            self._engine.clear(page)
        return pages


if __name__ == "__main__":
    with answering() as answer:
        carry_out_orders(EngineWalk(TorchSide(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])).carry_out, answer)
