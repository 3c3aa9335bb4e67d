"""From chunks of prompts to rows of an engine's batch, and from a layer that is computed to the store thread.

A prefill worker and the further stages of a pipeline do the same with theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from moonpool.core.prefill import Chunk
from moonpool.engine.engine import Engine, Row
from moonpool.live.sink import Sink
from moonpool.wire.messages import Work


class Prompt(Protocol):
    """One attempt at one worker."""

    work: Work
    tokens: list[int]
    pages: tuple[int, ...]
    sink: Sink | None
    dropped: bool

    def time_left(self) -> float: ...


def rows_of(engine: Engine, chunks: Sequence[Chunk], prompts: Sequence[Prompt]) -> list[Row]:
    """On the engine's thread: pages that the chunks begin are cleared."""
    block = engine.space.block_tokens
    for chunk, prompt in zip(chunks, prompts, strict=True):
        for page in prompt.pages[-(-chunk.start // block) : -(-(chunk.start + chunk.count) // block)]:
            engine.clear(page)
    return [
        Row(
            tokens=prompt.tokens,
            prompt_tokens=prompt.work.prompt_tokens,
            start=chunk.start,
            count=chunk.count,
            pages=prompt.pages,
            sampling=prompt.work.sampling if chunk.last else None,
        )
        for chunk, prompt in zip(chunks, prompts, strict=True)
    ]


def store_layer(block: int, prompt: Prompt, chunk: Chunk, layer: int) -> None:
    """On the store thread: the runs that this chunk has completed in this layer. `block`: tokens of one."""
    assert prompt.sink is not None
    if prompt.dropped:
        return
    end = chunk.start + chunk.count
    done = range(chunk.start // block, end // block)
    if done:
        prompt.sink.store_blocks(layer, [(i, prompt.pages[i]) for i in done], prompt.time_left())
    if chunk.last and end % block:
        prompt.sink.store_tail(layer, prompt.pages[end // block], end % block, prompt.time_left())
