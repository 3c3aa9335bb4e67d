"""`make bench-int8`: the torch engine with int8 weights beside the same engine in float32, and what it costs.

Steps of both engines take turns, so what else the machine does meets both alike. Decoding is of sequences that have a
short context: what is measured is the weights, not attention.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from moonpool.bench.result import Bar, bar, print_result
from moonpool.engine.accuracy import AGREEMENT_LIMIT, PERPLEXITY_LIMIT, Accuracy, compare, passages
from moonpool.engine.engine import Row
from moonpool.engine.model import resolve
from moonpool.engine.runner import TorchEngine
from moonpool.wire.messages import Sampling

STREAMS = (1, 8)
PREFILL_TOKENS = 512
CONTEXT_TOKENS = 100
STEPS = 12
"""In each of `rounds` turns."""
DECODE_SPEEDUP = 1.5
GREEDY = Sampling(seed=0, temperature=0, max_tokens=1)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=1024, help="of the text that accuracy is measured on")
    given = parser.parse_args(arguments)
    path = resolve(given.model)
    tokens = passages(path)
    began = time.perf_counter()
    exact = TorchEngine(path, page_count=48, threads=given.threads)
    loaded = time.perf_counter()
    quantized = TorchEngine(path, page_count=48, threads=given.threads, quantize="int8")
    load_seconds = loaded - began, time.perf_counter() - loaded
    engines = exact, quantized
    rates = {f"decode, {streams} streams": _decode(engines, tokens, streams, given.rounds) for streams in STREAMS}
    rates[f"prefill of {PREFILL_TOKENS}"] = _prefill(engines, tokens, given.rounds)
    accuracy = compare(exact, quantized, tokens[: given.tokens])
    _show(rates, accuracy, load_seconds, given.threads)
    print_result(_bars(rates, accuracy), threads=given.threads, rounds=given.rounds, model=given.model)
    return 0


def _decode(
    engines: tuple[TorchEngine, TorchEngine], tokens: Sequence[int], streams: int, rounds: int
) -> tuple[list[float], list[float]]:
    """Tokens a second of each engine in each round."""
    rates: tuple[list[float], list[float]] = ([], [])
    span = engines[0].space.block_tokens
    pages = -(-(CONTEXT_TOKENS + STEPS * (rounds + 1)) // span)
    for engine in engines:
        rows = [
            Row(tokens, CONTEXT_TOKENS, 0, CONTEXT_TOKENS, list(range(stream * pages, (stream + 1) * pages)))
            for stream in range(streams)
        ]
        for page in range(streams * pages):
            engine.clear(page)
        engine.step(rows)
    at = CONTEXT_TOKENS
    for turn in range(rounds + 1):
        for engine, found in zip(engines, rates, strict=True):
            began = time.perf_counter()
            for step in range(STEPS):
                engine.step(
                    [
                        Row(tokens, CONTEXT_TOKENS, at + step, 1, list(range(s * pages, (s + 1) * pages)), GREEDY)
                        for s in range(streams)
                    ]
                )
            if turn:  # the first turn warms up
                found.append(streams * STEPS / (time.perf_counter() - began))
        at += STEPS
    return rates


def _prefill(
    engines: tuple[TorchEngine, TorchEngine], tokens: Sequence[int], rounds: int
) -> tuple[list[float], list[float]]:
    rates: tuple[list[float], list[float]] = ([], [])
    pages = list(range(-(-PREFILL_TOKENS // engines[0].space.block_tokens)))
    row = Row(tokens, PREFILL_TOKENS, 0, PREFILL_TOKENS, pages, GREEDY)
    for turn in range(rounds + 1):
        for engine, found in zip(engines, rates, strict=True):
            began = time.perf_counter()
            engine.step([row])
            if turn:
                found.append(PREFILL_TOKENS / (time.perf_counter() - began))
    return rates


def _ratios(rates: tuple[list[float], list[float]]) -> list[float]:
    """int8 over float32, each turn by itself."""
    return [fast / slow for slow, fast in zip(*rates, strict=True)]


def _bars(rates: dict[str, tuple[list[float], list[float]]], accuracy: Accuracy) -> list[Bar]:
    speeds = [
        bar(f"{name}: int8 / float32", statistics.median(_ratios(found)), DECODE_SPEEDUP)
        for name, found in rates.items()
        if name.startswith("decode")
    ]
    return [
        *speeds,
        bar("perplexity: int8 / float32", accuracy.ratio, PERPLEXITY_LIMIT, at_most=True),
        bar("same most likely next token", accuracy.agreement, AGREEMENT_LIMIT),
        bar("same greedy tokens after prompts", accuracy.greedy, AGREEMENT_LIMIT),
    ]


def _show(
    rates: dict[str, tuple[list[float], list[float]]],
    accuracy: Accuracy,
    load_seconds: tuple[float, float],
    threads: int,
) -> None:
    console = Console(highlight=False)
    table = Table("tokens a second", "float32", "int8", "int8 / float32", title=f"{threads} threads")
    for name, (slow, fast) in rates.items():
        ratios = _ratios((slow, fast))
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        table.add_row(name, f"{statistics.median(slow):.1f}", f"{statistics.median(fast):.1f}", spread)
    console.print(table)
    console.print(
        f"perplexity of {accuracy.tokens} tokens {accuracy.perplexity:.2f}, int8 {accuracy.quantized_perplexity:.2f} "
        f"({accuracy.ratio:.3f}x); the same next token at {accuracy.agreement:.1%} of positions, {accuracy.greedy:.1%} "
        f"after prompts; loaded in {load_seconds[0]:.1f} s, int8 in {load_seconds[1]:.1f} s",
        soft_wrap=True,
    )


if __name__ == "__main__":
    raise SystemExit(main())
