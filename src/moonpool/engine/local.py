"""Prompts straight through an engine, without a cluster: toy continuous batching for tests and benchmarks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from moonpool.engine.engine import Draw, Engine, Row
from moonpool.errors import ConfigError, MoonpoolError
from moonpool.wire.messages import Sampling


@dataclass(slots=True, eq=False)
class _Sequence:
    index: int
    sampling: Sampling
    tokens: list[int]
    prompt_tokens: int
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    done: bool = False

    @property
    def decoding(self) -> bool:
        return self.computed >= self.prompt_tokens


def generate(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    samplings: Sequence[Sampling],
    chunk: int = 512,
    on_draw: Callable[[int, Draw], None] | None = None,
) -> list[list[int]]:
    """The output tokens of each prompt, an end token included.

    A step takes every decoding sequence and one prefill chunk of at most `chunk` tokens. A prompt waits, in
    order, until the free pages hold it and all its output. `on_draw(prompt index, draw)` sees each token.
    Raises `MoonpoolError` for a token that could not be drawn.
    """
    waiting = deque(
        _Sequence(index, sampling, list(prompt), len(prompt))
        for index, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True))
    )
    everything = list(waiting)
    for sequence in everything:
        _check(engine, sequence)
    free = list(range(engine.page_count - 1, -1, -1))
    running: list[_Sequence] = []
    while waiting or running:
        _admit(engine, waiting, running, free)
        rows = list(_rows(running, chunk))
        draws = engine.step([row for _, row in rows])
        for (sequence, row), drawn in zip(rows, draws, strict=True):
            sequence.computed += row.count
            if drawn is None:
                continue
            if drawn.error is not None:
                raise MoonpoolError(f"prompt {sequence.index}: {drawn.error}")
            _append(sequence, drawn)
            if on_draw is not None:
                on_draw(sequence.index, drawn)
            if sequence.done:
                running.remove(sequence)
                free.extend(sequence.pages)
    return [sequence.tokens[sequence.prompt_tokens :] for sequence in everything]


def _need(engine: Engine, sequence: _Sequence) -> int:
    """Pages; the last token drawn never gets KV."""
    return -(-(sequence.prompt_tokens + sequence.sampling.max_tokens - 1) // engine.space.block_tokens)


def _check(engine: Engine, sequence: _Sequence) -> None:
    total = sequence.prompt_tokens + sequence.sampling.max_tokens
    if sequence.prompt_tokens < 1 or sequence.sampling.max_tokens < 1:
        raise ConfigError(f"prompt {sequence.index}: it and its max_tokens must be at least 1")
    if total > engine.context_tokens:
        raise ConfigError(
            f"prompt {sequence.index}: {total} tokens with output, the context is {engine.context_tokens}"
        )
    if _need(engine, sequence) > engine.page_count:
        raise ConfigError(f"prompt {sequence.index} needs {_need(engine, sequence)} pages of {engine.page_count}")


def _admit(engine: Engine, waiting: deque[_Sequence], running: list[_Sequence], free: list[int]) -> None:
    while waiting and _need(engine, waiting[0]) <= len(free):
        sequence = waiting.popleft()
        sequence.pages = [free.pop() for _ in range(_need(engine, sequence))]
        for page in sequence.pages:
            engine.clear(page)
        running.append(sequence)


def _rows(running: list[_Sequence], chunk: int) -> Iterator[tuple[_Sequence, Row]]:
    prefilling = False
    for sequence in running:
        left = len(sequence.tokens) - sequence.computed
        if not sequence.decoding:
            if prefilling:
                continue
            prefilling = True
        count = min(left, chunk)
        last = count == left
        yield (
            sequence,
            Row(
                tokens=sequence.tokens,
                prompt_tokens=sequence.prompt_tokens,
                start=sequence.computed,
                count=count,
                pages=sequence.pages,
                sampling=sequence.sampling if last else None,
            ),
        )


def _append(sequence: _Sequence, drawn: Draw) -> None:
    sequence.tokens.append(drawn.token)
    produced = len(sequence.tokens) - sequence.prompt_tokens
    sequence.done = drawn.is_end or produced >= sequence.sampling.max_tokens
