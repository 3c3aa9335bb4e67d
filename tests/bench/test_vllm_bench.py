"""`make bench-vllm` without vLLM: what it sends, through which front, and what its bars say of what came back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moonpool.bench.vllm import OURS, ROUND_ROBIN, Results, bars, first_error
from moonpool.bench.vllm_first_token import COLD, POOL, limits
from moonpool.bench.vllm_front import Way, front
from moonpool.bench.vllm_traffic import BLOCK_TOKENS, LONGEST, SHORTER, at_rate, conversations, offer, slice_of
from moonpool.core.vocabulary import Slo
from moonpool.report.run import Run
from moonpool.trace.request import TraceRequest
from tests.bench.fake_endpoint import FakeEndpoint, fake_endpoint_beside

SLO = Slo(60.0, 60.0)


def turn(arrival: float, *blocks: int) -> TraceRequest:
    return TraceRequest(arrival, len(blocks) * 512, 80, blocks)


FIRST, SECOND, THIRD = turn(0.0, 0, 1, 2), turn(1.0, 0, 10, 11), turn(2.0, 0, 1, 2, 3)


def test_conversations_are_drawn_whole_and_a_common_beginning_makes_none() -> None:
    assert conversations([FIRST, SECOND, THIRD], 2) == [FIRST, THIRD]
    assert conversations([FIRST, SECOND, THIRD], 1) == [FIRST, SECOND, THIRD]


def test_a_slice_is_shorter_and_shares_as_much(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    long = TraceRequest(3.0, (LONGEST + 100) * SHORTER, 80, (0, 1, 2, 3, 4))
    lines = [
        {"timestamp": r.arrival * 1e3, "input_length": r.input_tokens, "output_length": 80, "hash_ids": r.blocks}
        for r in (turn(5.0, 0, 1, 2), turn(6.0, 0, 10, 11), turn(7.0, 0, 1, 2, 3), long)
    ]
    trace.write_text("\n".join(map(json.dumps, lines)))
    first, third = slice_of(trace, 2)
    assert (first.arrival, first.input_tokens, first.output_tokens) == (0.0, 3 * BLOCK_TOKENS, 80 // SHORTER)
    assert (third.arrival, third.blocks[:3]) == (2.0, first.blocks)
    assert [r.arrival for r in at_rate([first, third], 0.25)] == [0.0, 8.0]


def test_without_a_trace_there_are_conversations_too() -> None:
    made = slice_of(None, 400)
    assert len(made) > 15
    assert any(len(set(a.blocks[1:]) & set(b.blocks[1:])) > 1 for a in made for b in made if a is not b)


@pytest.fixture
def servers() -> Iterator[list[FakeEndpoint]]:
    with fake_endpoint_beside() as one, fake_endpoint_beside() as other:
        yield [one, other]


def through(way: Way, servers: list[FakeEndpoint], folder: Path, requests: int) -> Run:
    sent = [turn(at * 0.01, at) for at in range(requests)]
    with front(way, [server.url for server in servers], folder) as url:
        run = asyncio.run(offer("x", url, sent, SLO))
    assert run.summary.attained == run.summary.requests == requests
    return run


def measured(servers: list[FakeEndpoint]) -> list[list[dict[str, Any]]]:
    """Bodies that each server got, without those that find out what it takes."""
    return [[body for body in server.bodies if len(body["prompt"]) > 100] for server in servers]


def test_round_robin_gives_each_server_as_many(servers: list[FakeEndpoint], tmp_path: Path) -> None:
    through("round-robin", servers, tmp_path, 6)
    assert [len(bodies) for bodies in measured(servers)] == [3, 3]


def test_a_pair_asks_the_first_for_one_token_and_the_second_for_all(
    servers: list[FakeEndpoint], tmp_path: Path
) -> None:
    through("pair", servers, tmp_path, 2)
    prefills, decodes = measured(servers)
    assert [body["prompt"] for body in prefills] == [body["prompt"] for body in decodes]
    assert [(body["max_tokens"], body["stream"]) for body in prefills] == [(1, False)] * 2
    assert [(body["max_tokens"], body["stream"]) for body in decodes] == [(80, True)] * 2


def test_bars_hold_only_what_was_measured(servers: list[FakeEndpoint], tmp_path: Path) -> None:
    assert [b["holds"] for b in bars(Results(), "no vLLM")] == [None, None]
    run = through("round-robin", servers, tmp_path, 4)
    results = Results(first={COLD: [2.0, 2.0, 9.0], POOL: [1.0, 0.5, 1.0]}, runs={OURS: run, ROUND_ROBIN: run})
    assert [(b["value"], b["holds"]) for b in bars(results)] == [(0.5, True), (1.0, True)]
    assert bars(Results(first={COLD: [1.0], POOL: [1.5]}))[0]["holds"] is False


def test_limits_are_multiples_of_an_idle_server() -> None:
    assert limits(0.5, 0.02) == Slo(5.0, 0.1)


def test_what_went_wrong_in_vllm_is_found_in_its_log(tmp_path: Path) -> None:
    (tmp_path / "a-0.log").write_text("INFO 0 errors\n(EngineCore pid=1) ERROR  KeyError: 'x'\nValueError: later\n")
    assert first_error(tmp_path) == "a-0: KeyError: 'x'"
