"""vLLM with Moonpool's connector, or alone; runs in vLLM's own virtual environment (`bench/vllm_cpu.py`).

Arguments: the model's directory, and options of `vllm.LLM` as JSON. Driven in this process by orders, without HTTP.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from vllm import LLM, SamplingParams

from moonpool.bench.orders import answering, carry_out_orders

CONTEXT_TOKENS = 4096


class ConnectedVllm:
    def __init__(self, path: str, options: dict[str, Any]) -> None:
        settings = {
            "dtype": "float32",
            "max_model_len": CONTEXT_TOKENS,
            "max_num_seqs": 8,
            "enforce_eager": True,
            "disable_log_stats": False,
        }
        self._llm = LLM(model=path, **(settings | options))

    def carry_out(self, order: dict[str, Any]) -> dict[str, Any]:
        match order["do"]:
            case "generate":
                return self._generate(order)
            case "forget":
                # vLLM's own cache, not the pool.
                return {"done": self._llm.reset_prefix_cache()}
            case _:
                raise ValueError(f"no such order: {order['do']}")

    def _generate(self, order: dict[str, Any]) -> dict[str, Any]:
        """Prompts that run side by side: tokens, the log-probabilities of the likeliest at each, and what was hit."""
        before = self._counts()
        began = time.monotonic()
        prompts: list[Any] = [
            {"prompt_token_ids": prompt} | ({"cache_salt": order["salt"]} if order.get("salt") else {})
            for prompt in order["prompts"]
        ]
        sampling = SamplingParams(temperature=0.0, max_tokens=order.get("max_tokens", 4), ignore_eos=True, logprobs=5)
        outputs = self._llm.generate(prompts, sampling, use_tqdm=False)
        after = self._counts()
        return {
            "seconds": [time.monotonic() - began],
            "outputs": [
                {
                    "tokens": list(output.outputs[0].token_ids),
                    "logprobs": [
                        {str(token): entry.logprob for token, entry in step.items()}
                        for step in output.outputs[0].logprobs
                    ],
                    "cached_tokens": output.num_cached_tokens,
                }
                for output in outputs
            ],
            "counts": {name: value - before.get(name, 0) for name, value in after.items()},
        }

    def _counts(self) -> dict[str, float]:
        return {metric.name: metric.value for metric in self._llm.get_metrics() if hasattr(metric, "value")}


if __name__ == "__main__":
    with answering() as answer:
        carry_out_orders(ConnectedVllm(sys.argv[1], json.loads(sys.argv[2])).carry_out, answer)
