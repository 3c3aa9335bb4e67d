"""A slice of a trace for two vLLM servers on CPUs: every so many-th conversation of it, whole, an eighth as long.

A run of consecutive requests would hold few second turns: those come minutes later. So conversations are drawn, not
requests, and what is left comes as much faster as there is time for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from msgspec import structs

from moonpool.bench.dialect import Wish, find_dialect
from moonpool.bench.endpoint import Endpoint, base_of
from moonpool.bench.prompts import Prompts, ids_below
from moonpool.bench.replay import Replay, Rules
from moonpool.bench.turns import Pace, turns
from moonpool.bench.vllm_server import VOCABULARY
from moonpool.core.vocabulary import Slo
from moonpool.report.run import Run, live_run
from moonpool.trace.kinds import parse_kind
from moonpool.trace.read import TraceFile
from moonpool.trace.request import TraceRequest
from moonpool.trace.synthesize import synthesize

TRACE_BLOCK = 512
SHORTER = 8
"""Times, prompts and answers alike: what prompts share stays the same part of them."""
BLOCK_TOKENS = TRACE_BLOCK // SHORTER
LONGEST = 3800
"""Tokens of a prompt: with its answer it fits the servers' context."""
SHORTEST_ANSWER = 4
SYNTHETIC = "poisson?n=12000&rate=3.4&input=6500&output=340&turns=1.6&pause=200&added=2500"
"""Where no trace is given: lengths and turns about as in the conversation trace."""
ANSWER_SECONDS = 300.0
SEED = 7


def slice_of(trace: Path | None, one_in: int) -> list[TraceRequest]:
    """Every `one_in`-th conversation, in order of arrival, from time 0. Raises TraceError."""
    whole = TraceFile(trace) if trace is not None else synthesize(parse_kind(SYNTHETIC))
    taken = [_shorter(request) for request in conversations(whole, one_in)]
    fitting = [request for request in taken if request.input_tokens <= LONGEST]
    return [structs.replace(request, arrival=request.arrival - fitting[0].arrival) for request in fitting]


def conversations(requests: Iterable[TraceRequest], one_in: int) -> list[TraceRequest]:
    """A request belongs to the conversation that one of its whole blocks came with first; a block that very many
    prompts begin with, which is their first one, makes none."""
    began: dict[int, int] = {}
    count, taken = 0, []
    for request in requests:
        whole = request.blocks[1 : request.input_tokens // TRACE_BLOCK]
        known = next((began[block] for block in reversed(whole) if block in began), None)
        number = count if known is None else known
        count += known is None
        for block in whole:
            began.setdefault(block, number)
        if number % one_in == 0:
            taken.append(request)
    return taken


def at_rate(requests: Sequence[TraceRequest], rate: float) -> list[TraceRequest]:
    """So much faster or slower that `rate` come a second, on average."""
    factor = len(requests) / rate / max(requests[-1].arrival, 1.0)
    return [structs.replace(request, arrival=request.arrival * factor) for request in requests]


async def offer(name: str, url: str, requests: Sequence[TraceRequest], slo: Slo) -> Run:
    """All of them, open loop, a turn not before the answer to the one before it; as `moonpool replay` measures.

    `slo`: sent with each request, too, for an endpoint that heeds it. Raises MoonpoolError where it takes none.
    """
    words = ids_below(VOCABULARY)
    async with Endpoint(base_of(url), timeout=ANSWER_SECONDS) as endpoint:
        dialect = await find_dialect(endpoint, Wish("", "completions", words, None))
        prompts = Prompts(words, BLOCK_TOKENS, SEED, dialect.extra_tokens)
        replay = Replay(endpoint, dialect, prompts, Rules(slo=slo))
        tally = await replay.run(turns(requests, Pace(sessions=True), BLOCK_TOKENS, SEED))
    return live_run(name, SEED, slo, tally.outcomes, tally.live(endpoint.base, dialect))


def _shorter(request: TraceRequest) -> TraceRequest:
    """Its ids are of blocks of BLOCK_TOKENS now."""
    prompt = max(-(-request.input_tokens // SHORTER), 1)
    answer = max(-(-request.output_tokens // SHORTER), SHORTEST_ANSWER)
    return structs.replace(request, input_tokens=prompt, output_tokens=answer)
