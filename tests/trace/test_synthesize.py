"""Synthetic requests: what was asked for, the same for each seed, and what the paper says of its data sets."""

from __future__ import annotations

import tracemalloc
from itertools import islice, pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moonpool.errors import ConfigError
from moonpool.trace.describe import describe
from moonpool.trace.hits import hit_ratios, load
from moonpool.trace.kinds import COMMON, KINDS, OF_ONE_FAMILY, parse_kind
from moonpool.trace.request import TraceRequest
from moonpool.trace.synthesize import LONGEST_PROMPT, Lengths, synthesize


def made(text: str) -> list[TraceRequest]:
    return list(synthesize(parse_kind(text)))


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_a_trace_of_so_many_requests_at_that_rate(kind: str) -> None:
    requests = made(f"{kind}?n=400&rate=4")
    assert len(requests) == 400
    assert requests[-1].arrival == pytest.approx(100.0, rel=0.2)
    for before, after in pairwise(requests):
        assert before.arrival <= after.arrival
    for request in requests:
        assert len(set(request.blocks)) == len(request.blocks) == -(-request.input_tokens // 512)
        assert request.input_tokens + request.output_tokens <= 131_072
    assert requests == made(f"{kind}?rate=4&n=400"), "equal parameters, equal requests"
    assert requests != made(f"{kind}?n=400&rate=4&seed=1")


PARAMETERS = st.fixed_dictionaries(
    {"n": st.just(60)},
    optional={
        "batch": st.sampled_from([0, 0.5, 7]),
        "seed": st.integers(0, 2**63),
        "input": st.integers(1, LONGEST_PROMPT),
        "input-spread": st.floats(0, 3),
        "output": st.integers(1, 4000),
        "output-spread": st.floats(0, 3),
        "shared": st.floats(0, 1),
        "documents": st.integers(1, 9),
        "uses": st.floats(0, 20),
        "turns": st.floats(1, 20),
        "pause": st.floats(0.01, 100),
        "added": st.integers(1, 3000),
    },
)


@settings(max_examples=40)
@given(PARAMETERS)
@example(
    {
        "n": 60,
        "batch": 0,
        "input": 113_493,
        "input-spread": 0.25,
        "output-spread": 0,
        "documents": 1,
        "uses": 0,
        "turns": 3,
        "pause": 0.25,
        "added": 684,
        "seed": 0,
    }
)
def test_whatever_is_asked_for_prompts_are_prefixes_of_one_tree(parameters: dict[str, float]) -> None:
    """Equal ids mean an equal prefix up to there."""
    parent: dict[int, int | None] = {}
    arrival = 0.0
    for request in made("poisson?" + "&".join(f"{name}={value}" for name, value in parameters.items())):
        assert 1 <= request.input_tokens <= LONGEST_PROMPT
        assert len(request.blocks) == -(-request.input_tokens // 512)
        assert request.arrival >= arrival
        arrival = request.arrival
        last: int | None = None
        for block in request.blocks:
            assert parent.setdefault(block, last) == last
            last = block


def test_shared_parts_and_turns_are_what_was_asked_for() -> None:
    shared = load(made("poisson?n=2000&input=10240&input-spread=0&shared=.5&documents=4"))
    assert hit_ratios(shared, [("lru", None)])[0].by_token == pytest.approx(0.5 * (1 - 4 / 2000), abs=1e-3)
    replaced = load(made("poisson?n=2000&input=10240&input-spread=0&shared=.5&documents=4&uses=5"))
    assert hit_ratios(replaced, [("lru", None)])[0].by_token == pytest.approx(0.5 * (1 - 1 / 5), abs=0.02)

    requests = made("poisson?n=3000&input=1024&input-spread=0&turns=4&pause=5&added=512&output=1")
    first = sum(request.input_tokens == 1024 for request in requests)
    assert 3000 / first == pytest.approx(4, rel=0.1)


def test_batches_arrive_at_equal_distances() -> None:
    times = sorted({request.arrival for request in made("poisson?n=2000&rate=10&batch=3")})
    assert np.diff(times) == pytest.approx(3.0)
    assert len(times) == pytest.approx(2000 / 30, abs=8)


@pytest.mark.parametrize(("thousands", "cached"), [(16, 15 * 512 / 16_000), (128, 125 * 512 / 128_000)])
def test_the_papers_simulated_data(thousands: int, cached: float) -> None:
    requests = made(f"paper-{thousands}k")
    assert {(request.input_tokens, request.output_tokens) for request in requests} == {(1000 * thousands, 512)}
    ratio = hit_ratios(load(requests), [("lru", None)])[0].by_token
    assert ratio == pytest.approx(cached * (1 - 16 / 2000))
    assert ratio == pytest.approx(0.5, abs=0.03)


def test_the_papers_public_data_sets() -> None:
    arxiv, l_eval = describe(made("arxiv-summarization")), describe(made("l-eval"))
    assert arxiv.input_tokens.mean == pytest.approx(8088, rel=0.03)
    assert arxiv.output_tokens.mean == pytest.approx(229, rel=0.03)
    assert arxiv.distinct_blocks == arxiv.blocks
    assert l_eval.input_tokens.mean == pytest.approx(19_019, rel=0.03)
    assert l_eval.output_tokens.mean == pytest.approx(72, rel=0.05)
    assert hit_ratios(load(made("l-eval")), [("lru", None)])[0].by_token > 0.8


def test_the_tool_and_agent_trace_has_the_papers_statistics() -> None:
    requests = made("tool-and-agent")
    found = describe(requests)
    assert found.requests == 23_608
    assert found.seconds == pytest.approx(3600, rel=0.02)
    assert found.input_tokens.mean == pytest.approx(7590, rel=0.02)
    assert found.output_tokens.mean == pytest.approx(182, rel=0.02)
    assert found.gap_seconds == pytest.approx(3.0, rel=0.02)
    assert found.blocks_used_once > found.distinct_blocks / 2
    assert found.most_uses_of_a_block > 10_000
    for family, share, shared, output in zip(found.families, (0.46, 0.39, 0.15), (1, 12, 5), (382, 3, 20), strict=True):
        assert family.requests / found.requests == pytest.approx(share, abs=0.01)
        assert family.shared_blocks == shared
        assert family.median_output == pytest.approx(output, rel=0.02)
    # PAPER §2's table; 1,000 blocks hold all that families share, .38 of all blocks, where the paper has .30.
    paper = {None: 0.51, 50_000: 0.50, 30_000: 0.48, 10_000: 0.40}
    ratios = hit_ratios(load(requests), [("lru", capacity) for capacity in paper])
    for ratio, expected in zip(ratios, paper.values(), strict=True):
        assert ratio.by_block == pytest.approx(expected, abs=0.01)


def test_a_long_trace_takes_no_more_memory_than_a_short_one() -> None:
    def peak(count: int) -> int:
        tracemalloc.start()
        for _ in islice(synthesize(parse_kind("tool-and-agent?n=1000000")), count):
            pass
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most

    # Conversations that wait for their next turn are there after some pauses (420 s, 2,800 requests, on average).
    assert peak(18_000) < 1.4 * peak(9_000)


@settings(max_examples=50)
@given(st.floats(1, 1e5), st.floats(0, 5), st.sampled_from(["lognormal", "normal"]), st.integers(0, 2**32))
def test_lengths_stay_between_least_and_most(mean: float, deviation: float, shape: str, seed: int) -> None:
    assert shape in ("lognormal", "normal")
    lengths = Lengths(
        mean, deviation, least=mean / 2, most=2 * mean, shape="normal" if shape == "normal" else "lognormal"
    )
    rng = np.random.default_rng(seed)
    assert all(mean / 2 <= lengths.draw(rng) <= 2 * mean for _ in range(20))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("agents", "no synthetic traffic 'agents'; choose one of poisson, "),
        ("", "no synthetic traffic ''"),
        ("poisson?rate", "must be poisson\\?name=value"),
        ("poisson?ratte=1", "poisson has no parameter 'ratte'; it has n, rate, "),
        ("tool-and-agent?input=5", "tool-and-agent has no parameter 'input'; it has n, rate, batch, seed$"),
        ("poisson?n=1.5", "poisson\\?n=1.5: must be a whole number from 1 to 1e\\+09"),
        ("poisson?rate=0", "poisson\\?rate=0: must be a number from 1e-06"),
        ("poisson?rate=nan", "must be a number from"),
        ("poisson?seed=", "must be a whole number from 0"),
    ],
)
def test_mistakes_are_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_kind(text)


def test_every_parameter_changes_something() -> None:
    base = "poisson?n=300&rate=2&shared=.5&turns=2"
    other = {"n": 299, "rate": 3, "batch": 4, "seed": 5, "shared": 0.2, "turns": 3, "documents": 3, "uses": 2}
    other |= {"input": 900, "input-spread": 2, "output": 7, "output-spread": 3, "pause": 1, "added": 999}
    assert set(other) == COMMON.keys() | OF_ONE_FAMILY.keys()
    before = made(base)
    for name, value in other.items():
        assert made(f"{base}&{name}={value}") != before, name
