"""The measurements of `make bench-engine`, the same for every engine: prompts and steps, each step timed.

An engine is measured in a process of its own, a peer's in the peer's own environment: nothing but the standard library
may be imported here.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any, Protocol

FIRST_ID, LAST_ID = 100, 40_000
"""Of the token ids that prompts are made of: ordinary ones of every vocabulary."""
STREAM_TOKENS = 64
"""Of the prompt of a stream that decodes."""

Prompt = list[int]


class EngineSide(Protocol):
    """An engine under test, greedy, with no reuse of prefixes."""

    def prefill(self, prompt: Prompt) -> Callable[[], object]:
        """A call that computes the prompt up to its first token."""
        ...

    def start(self, prompts: list[Prompt]) -> Callable[[], object]:
        """Prefill all; a call then gives each of them one more token. Ends what was started before."""
        ...

    def extra(self, order: dict[str, Any]) -> dict[str, Any]:
        """What only this side can tell."""
        ...


class EngineWalk:
    def __init__(self, side: EngineSide) -> None:
        self._side = side
        self._step: Callable[[], object] | None = None

    def carry_out(self, order: dict[str, Any]) -> dict[str, Any]:
        """The seconds of every step."""
        match order["do"]:
            case "prefill":
                return _timed(self._side.prefill(prompt(order["seed"], order["tokens"])), 1)
            case "start":
                self._step = self._side.start([prompt(seed, STREAM_TOKENS) for seed in range(order["streams"])])
                return {}
            case "decode":
                if self._step is None:
                    raise ValueError("no streams were started")
                return _timed(self._step, order["steps"])
            case _:
                return self._side.extra(order)


def prompt(seed: int, tokens: int) -> Prompt:
    rng = random.Random(seed)
    return [rng.randrange(FIRST_ID, LAST_ID) for _ in range(tokens)]


def _timed(call: Callable[[], object], times: int) -> dict[str, Any]:
    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return {"seconds": seconds}
