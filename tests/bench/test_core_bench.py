"""What `make bench-core` measures, on a small scale."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from moonpool.bench import core
from moonpool.bench.decisions import index, measure
from moonpool.bench.traffic import LONGEST, repeated, sessions, write
from moonpool.errors import MoonpoolError
from moonpool.trace.read import TraceFile
from moonpool.trace.request import TraceRequest


def test_sessions_continue_what_came_before_and_arrive_at_the_rate_asked_for() -> None:
    found = list(islice(sessions(10.0, seed=1), 4000))
    assert 9.0 < len(found) / found[-1].arrival < 11.0
    assert all(each.input_tokens > (len(each.blocks) - 1) * 512 for each in found)
    assert max(each.input_tokens for each in found) == LONGEST
    seen: set[int] = set()
    hits = 0
    for each in found:
        hits += each.blocks[0] in seen
        seen.update(each.blocks)
    assert hits > len(found) / 3


def test_a_repeated_trace_hits_nothing_of_the_time_before() -> None:
    first, second = islice(repeated([TraceRequest(0.0, 1024, 5, (0, 1))]), 2)
    assert set(first.blocks).isdisjoint(second.blocks)


def test_decisions_of_a_small_fleet_are_timed() -> None:
    decided = measure(4, sessions(2.0), 50)
    assert (decided.requests, decided.refused) == (50, 0)
    assert decided.blocks > 0
    assert 0 < decided.lookup.mean < decided.decision.mean <= decided.decision.longest


def test_finding_and_storing_prompts_is_timed() -> None:
    find, store = index(islice(sessions(2.0), 50), 4)
    assert 0 < find < find + store < 1e5


def test_a_written_trace_is_simulated_in_a_process_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    write(file, islice(sessions(2.0), 20))
    assert len(list(TraceFile(file))) == 20
    done = core.simulated(file, 1, 1, 20)
    assert done.seconds > 0
    assert done.peak_bytes > 10 << 20
    with pytest.raises(MoonpoolError, match="simulate failed"):
        core.simulated(tmp_path / "none.jsonl", 1, 1, 20)
