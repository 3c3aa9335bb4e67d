"""Layers of a model divided over the stages of a pipeline (PAPER §3), and what a stage needs of its engine.

A stage is an engine that holds some of the layers, and their KV only. It takes what the stage before it has made of a
packed batch (`hidden`, bytes) and gives what the next one takes; the last one draws.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from moonpool.engine.engine import Bytes, Draw, Engine, Row
from moonpool.errors import ModelError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from moonpool.engine.families import Shape

HEAD_TOKENS = 128
"""Tokens that a step is taken to have: the head computes one of them, the layers all."""


class StageEngine(Engine, Protocol):
    def hidden_bytes(self, tokens: int, rows: int) -> int:
        """Of what goes from one stage to the next, for a batch of so many tokens in so many rows."""
        ...

    def stage(
        self, rows: Sequence[Row], hidden: Bytes | None, on_layer: Callable[[int], None] | None = None
    ) -> Bytes | list[Draw | None]:
        """As `step`, but of these layers only. `hidden`: of the same rows by the stage before; None for the first.

        It is read in the call and not kept. Gives what the next stage takes, or draws if this is the last one.
        """
        ...


def split_layers(layers: int, stages: int, head: float = 0.0) -> list[range]:
    """Consecutive layers for each stage, so that the slowest is as fast as can be; later ones get fewer in a tie.

    `head`: seconds of the language-model head of a step, in those of a layer; the last stage has it. (The embedding is
    a look-up: some thousandths of a layer.) Raises ModelError for more stages than layers.
    """
    if not 1 <= stages <= layers:
        raise ModelError(f"a pipeline of {stages} stages: the model has {layers} layers to divide")
    counts = [layers]
    if stages > 1:
        others = stages - 1

        def slowest(last: int) -> float:
            return max(-(-(layers - last) // others), last + head)

        last = min(range(1, layers - others + 1), key=slowest)
        counts = [(layers - last) // others + (stage < (layers - last) % others) for stage in range(others)]
        counts.append(last)
    starts = [sum(counts[:stage]) for stage in range(stages)]
    return [range(start, start + count) for start, count in zip(starts, counts, strict=True)]


def layers_of(config: PretrainedConfig, shape: Shape, stage: tuple[int, int]) -> range:
    """The layers of this stage (number, of so many), divided by their multiplications for a token."""
    width, number, count = int(config.hidden_size), *stage
    attention = 2 * width * shape.head_dim * (shape.heads + shape.kv_heads)
    inner = getattr(config, "moe_intermediate_size", None) or getattr(config, "intermediate_size", None) or 4 * width
    experts = int(getattr(config, "num_experts_per_tok", None) or 1)
    head = width * shape.vocabulary / (HEAD_TOKENS * (attention + 3 * width * int(inner) * experts))
    return split_layers(shape.layers, count, head)[number]
