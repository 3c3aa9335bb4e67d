"""Traffic for `make bench-core`: a trace file's, over and over, or synthetic sessions in the shape of one."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from moonpool.trace.request import TraceRequest

BLOCK_TOKENS = 512
DAY_SECONDS = 86_400.0
LONGEST = 126_000
"""Tokens of a prompt."""
SESSIONS = 512
"""Open at a time."""


def repeated(requests: Sequence[TraceRequest]) -> Iterator[TraceRequest]:
    """From the beginning again when it is over, with other blocks: nothing of the last pass is hit."""
    blocks = 1 + max((block for request in requests for block in request.blocks or ()), default=0)
    shift = 0
    while True:
        for each in requests:
            ids = tuple([block + shift for block in each.blocks or ()])
            yield TraceRequest(each.arrival, each.input_tokens, each.output_tokens, ids)
        shift += blocks


def sessions(requests_a_second: float, seed: int = 0) -> Iterator[TraceRequest]:
    """Without end: Poisson arrivals; each is the next turn of one of `SESSIONS` conversations, or begins a new one.

    A turn's prompt is all before it and some more: lognormal, mostly some thousand tokens, at times LONGEST at once.
    """
    rng = random.Random(seed)
    now, next_block = 0.0, 0
    open_: list[tuple[int, list[int]]] = [(0, []) for _ in range(SESSIONS)]
    while True:
        now += rng.expovariate(requests_a_second)
        at = rng.randrange(SESSIONS)
        tokens, blocks = open_[at]
        if rng.random() < 0.3 or tokens > LONGEST // 2:
            tokens, blocks = 0, []
        long = rng.random() < 0.005
        more = LONGEST if long else min(int(rng.lognormvariate(math.log(4000), 1.0)) + 64, LONGEST)
        tokens = min(tokens + more, LONGEST)
        lacking = -(-tokens // BLOCK_TOKENS) - len(blocks)
        blocks = [*blocks, *range(next_block, next_block + lacking)]
        next_block += lacking
        output = min(int(rng.lognormvariate(math.log(200), 0.8)) + 1, 2000)
        open_[at] = tokens // BLOCK_TOKENS * BLOCK_TOKENS, blocks[: tokens // BLOCK_TOKENS]
        yield TraceRequest(now, tokens, output, tuple(blocks))


def write(path: Path, requests: Iterable[TraceRequest]) -> None:
    """As Mooncake's JSON lines."""
    with path.open("w") as file:
        for each in requests:
            line = {
                "timestamp": int(each.arrival * 1e3),
                "input_length": each.input_tokens,
                "output_length": each.output_tokens,
                "hash_ids": list(each.blocks or ()),
            }
            file.write(json.dumps(line) + "\n")
