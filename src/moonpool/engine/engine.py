"""What a worker needs of an engine. Implementations: `runner.TorchEngine`, `timed.TimedEngine`.

An engine owns KV pages (page = block) but not their allocation: `core/prefill.py` and `core/decode.py`
say which page holds what. One thread calls `step`; `run` views may be read and written by others for
pages that no running step touches.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from moonpool.core.vocabulary import KeySpace
from moonpool.wire.messages import Sampling

log = logging.getLogger(__name__)

Bytes = npt.NDArray[np.uint8]


@dataclass(slots=True)
class Row:
    """A run of `count` tokens of one sequence to compute in this step, from `start` on.

    `tokens` is the whole sequence so far (the row computes tokens[start : start + count]);
    KV of tokens[: start] is in `pages` already. If `sampling` is given a token is drawn from the last
    logits; its output position is `start + count - prompt_tokens`.
    """

    tokens: Sequence[int]
    prompt_tokens: int
    start: int
    count: int
    pages: Sequence[int]
    sampling: Sampling | None = None


@dataclass(slots=True)
class Draw:
    token: int
    logprob: float | None = None
    top: list[tuple[int, float]] = field(default_factory=list)
    is_end: bool = False
    """One of the model's end tokens (or the request's stop_token_ids), and not ignored."""
    error: str | None = None
    """Why nothing was drawn for this row; the rest of the draw then says nothing."""


def draw_alone(draw: Callable[[], Draw]) -> Draw:
    """What `draw` returns, or what it raises as `Draw.error`: a row that fails costs no other its step."""
    try:
        return draw()
    except Exception as e:
        log.exception("a token could not be drawn")
        return Draw(-1, error=f"its token could not be drawn: {type(e).__name__}: {e}")


class Engine(Protocol):
    """See DESIGN §7."""

    @property
    def space(self) -> KeySpace: ...

    @property
    def layers(self) -> range:
        """Those of the model that are computed here: all of them, but in a stage of a pipeline (`pipeline.py`)."""
        ...

    @property
    def takes_layers(self) -> bool:
        """Whether a `run` that is written during a step counts in it, where `on_layer` of its layer waits for that."""
        ...

    @property
    def page_count(self) -> int: ...

    @property
    def context_tokens(self) -> int:
        """Longest sequence the model takes."""
        ...

    def clear(self, page: int) -> None:
        """Zero a page in all layers that are here, before it is used again (0 * NaN is NaN in attention)."""
        ...

    def run(self, layer: int, page: int) -> Bytes:
        """A writable view of the `space.run_bytes` bytes of one layer of one page: [k, v][token][kv_head][head_dim]."""
        ...

    def tail_runs(self, layer: int, page: int, tokens: int) -> tuple[Bytes, Bytes]:
        """Writable views of the first `tokens` tokens of K and of V in one layer of one page."""
        ...

    def step(self, rows: Sequence[Row], on_layer: Callable[[int], None] | None = None) -> list[Draw | None]:
        """Compute the rows as one packed batch; draw where a row has `sampling`.

        What goes wrong in drawing for one row is that row's `Draw.error`; a raised error is one of the whole step.
        `on_layer(l)` is called on this thread as soon as layer l's KV of all rows is in the pages, and before any of
        them attends in that layer: it may wait until that layer of what is before `start` has come (`takes_layers`).
        An exception that it raises ends the step and passes through.
        """
        ...
