"""vLLM on CPU as a side of `make bench-engine`; runs in its own virtual environment (`bench/vllm_cpu.py`).

Argument: the model's directory. Driven in this process, a step of its engine at a time, without detokenization, so that
neither HTTP nor its front end is measured: scheduler, model and sampler are, as in our own side.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any

from vllm import LLM, SamplingParams

from moonpool.bench.engine_walk import EngineWalk, Prompt
from moonpool.bench.orders import answering, carry_out_orders

CONTEXT_TOKENS = 4096
STREAMS = 16


class VllmSide:
    def __init__(self, path: str) -> None:
        llm = LLM(
            model=path,
            dtype="float32",
            max_model_len=CONTEXT_TOKENS,
            max_num_batched_tokens=CONTEXT_TOKENS,  # a prompt of 2,048 is one chunk
            max_num_seqs=STREAMS,
            enable_prefix_caching=False,
            disable_log_stats=True,
        )
        self._engine = llm.llm_engine
        self._ids = itertools.count()
        self._running: list[str] = []

    def prefill(self, prompt: Prompt) -> Callable[[], object]:
        self._end()

        def call() -> None:
            self._add(prompt, 1)
            while self._engine.has_unfinished_requests():
                self._engine.step()

        return call

    def start(self, prompts: list[Prompt]) -> Callable[[], object]:
        self._end()
        for prompt in prompts:
            self._running.append(self._add(prompt, CONTEXT_TOKENS - len(prompt)))
        self._engine.step()

        def step() -> None:
            self._engine.step()

        return step

    def extra(self, order: dict[str, Any]) -> dict[str, Any]:
        raise ValueError(f"no such order: {order['do']}")

    def _add(self, prompt: Prompt, max_tokens: int) -> str:
        name = str(next(self._ids))
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        self._engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        return name

    def _end(self) -> None:
        if self._running:
            self._engine.abort_request(self._running)
            self._running = []


if __name__ == "__main__":
    with answering() as answer:
        carry_out_orders(EngineWalk(VllmSide(sys.argv[1])).carry_out, answer)
