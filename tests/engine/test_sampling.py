"""Draws against other implementations: transformers' logits processors, and plain loops written here."""

from __future__ import annotations

import math
import random
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from moonpool.engine import sampling as module
from moonpool.engine.engine import Draw, Row
from moonpool.engine.sampling import draw, pick, uniform
from moonpool.wire.messages import Sampling

VOCABULARY = 50
END = frozenset({7})


def logits_of(seed: int, size: int = VOCABULARY) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 3


def row_of(sampling: Sampling, prompt: list[int], output: list[int] | None = None) -> Row:
    tokens = prompt + (output or [])
    return Row(tokens, len(prompt), len(tokens) - 1, 1, [0], sampling)


def one(sampling: Sampling, logits: torch.Tensor, prompt: list[int], output: list[int] | None = None) -> Draw:
    return draw([row_of(sampling, prompt, output)], logits[None], END)[0]


def kept(logits: torch.Tensor, sampling: Sampling) -> dict[int, float]:
    """Token -> probability, from the picks at 2000 even steps of u."""
    counts = Counter(pick(logits.numpy(), sampling, (i + 0.5) / 2000) for i in range(2000))
    return {token: count / 2000 for token, count in counts.items()}


def warped(logits: torch.Tensor, *warpers: object) -> dict[int, float]:
    scores = LogitsProcessorList(warpers)(torch.zeros((1, 1), dtype=torch.long), logits[None].clone())
    probabilities = scores.softmax(-1)[0]
    return {token: float(p) for token, p in enumerate(probabilities) if p > 0}


def assert_same(ours: dict[int, float], theirs: dict[int, float]) -> None:
    for token in ours.keys() | theirs.keys():
        assert abs(ours.get(token, 0) - theirs.get(token, 0)) < 1 / 900, token


@pytest.mark.parametrize("seed", range(4))
def test_filters_leave_the_distribution_of_transformers(seed: int) -> None:
    logits, temperature = logits_of(seed), (0.5, 0.8, 1.0, 1.7)[seed]
    warm = TemperatureLogitsWarper(temperature)

    def ours(**limits: float) -> dict[int, float]:
        return kept(logits, Sampling(seed=0, temperature=temperature, **limits))

    assert_same(ours(), warped(logits, warm))
    assert_same(ours(top_k=5), warped(logits, warm, TopKLogitsWarper(5)))
    assert_same(ours(top_p=0.8), warped(logits, warm, TopPLogitsWarper(0.8)))
    assert_same(ours(min_p=0.05), warped(logits, warm, MinPLogitsWarper(0.05)))
    assert_same(
        ours(min_p=0.01, top_k=12, top_p=0.9),
        warped(logits, warm, MinPLogitsWarper(0.01), TopKLogitsWarper(12), TopPLogitsWarper(0.9)),
    )


def test_limits_that_say_nothing_change_nothing() -> None:
    logits = logits_of(9)
    plain = kept(logits, Sampling(seed=0))
    for neutral in (Sampling(seed=0, top_k=-1), Sampling(seed=0, top_k=VOCABULARY), Sampling(seed=0, top_k=9999)):
        assert kept(logits, neutral) == plain
    best = int(logits.argmax())
    assert kept(logits, Sampling(seed=0, top_k=1)).keys() == {best}
    assert kept(logits, Sampling(seed=0, top_p=1e-9)).keys() == {best}
    assert kept(logits, Sampling(seed=0, min_p=1.0)).keys() == {best}


def test_ties_are_kept_in_favour_of_the_lower_id() -> None:
    flat = torch.zeros(10)
    assert kept(flat, Sampling(seed=0, top_k=3)).keys() == {0, 1, 2}
    assert kept(flat, Sampling(seed=0, top_p=0.35)).keys() == {0, 1, 2, 3}
    assert kept(flat, Sampling(seed=0, top_k=5, top_p=0.5)).keys() == {0, 1, 2}


def test_top_p_of_a_large_vocabulary_equals_a_full_sort() -> None:
    """The nucleus is found among the heavier tokens only; a plain sort of all must give the same."""
    logits = logits_of(3, 49_152).numpy()
    weights = np.exp(logits - logits.max()).astype(np.float64)
    for top_p in (0.1, 0.9, 0.999):
        order, mass, nucleus = np.argsort(-weights, kind="stable"), 0.0, set()
        for token in order:
            nucleus.add(int(token))
            mass += weights[token]
            if mass >= top_p * weights.sum():
                break
        drawn = {pick(logits, Sampling(seed=0, top_p=top_p), (i + 0.5) / 60) for i in range(60)}
        assert drawn <= nucleus
        ends = [pick(logits, Sampling(seed=0, top_p=top_p), u) for u in (0.0, math.nextafter(1, 0))]
        assert ends == [min(nucleus), max(nucleus)]


def test_repetition_penalty_is_that_of_transformers_over_prompt_and_output() -> None:
    prompt, output = [1, 2, 3, 3], [4, 5]
    for seed in range(20):
        logits = logits_of(seed)
        expected = RepetitionPenaltyLogitsProcessor(4.0)(torch.tensor([prompt + output]), logits[None].clone())
        greedy = Sampling(seed=0, temperature=0, repetition_penalty=4.0)
        assert one(greedy, logits, prompt, output).token == int(expected.argmax())


def test_presence_and_frequency_penalties_count_output_only() -> None:
    logits = torch.zeros(VOCABULARY)
    logits[3], logits[4], logits[5], logits[6] = 10.0, 9.5, 9.0, 8.0
    prompt, output = [3, 3, 3], [4, 5, 5]

    def best(**penalties: float) -> int:
        return one(Sampling(seed=0, temperature=0, **penalties), logits, prompt, output).token

    assert best(presence_penalty=5.0, frequency_penalty=5.0) == 3, "the prompt's tokens are not penalized"
    logits[3] = 0.0
    assert best() == 4
    assert best(presence_penalty=1.2) == 4, "4 and 5 lose the same"
    assert best(frequency_penalty=1.6) == 6, "4 falls to 7.9, 5 to 5.8"
    assert best(presence_penalty=1.6) == 6, "4 falls to 7.9, 5 to 7.4"
    assert best(presence_penalty=-1.0) == 4


def test_end_tokens_wait_for_min_tokens_and_can_be_ignored() -> None:
    logits = torch.zeros(VOCABULARY)
    logits[7], logits[8], logits[9] = 9.0, 8.0, 7.0
    greedy = Sampling(seed=0, temperature=0)

    def drawn(sampling: Sampling, output: list[int]) -> tuple[int, bool]:
        result = one(sampling, logits, [1], output)
        return result.token, result.is_end

    assert drawn(greedy, []) == (7, True)
    assert drawn(Sampling(seed=0, temperature=0, min_tokens=2), [5]) == (8, False)
    assert drawn(Sampling(seed=0, temperature=0, min_tokens=2), [5, 5]) == (7, True)
    assert drawn(Sampling(seed=0, temperature=0, ignore_eos=True), []) == (7, False)
    both = Sampling(seed=0, temperature=0, min_tokens=1, stop_token_ids=(8,))
    assert drawn(both, []) == (9, False)
    logits[7] = 0.0
    assert drawn(both, [5]) == (8, True)
    sampled = Sampling(seed=0, temperature=0.01, min_tokens=1)
    logits[7] = 20.0
    assert drawn(sampled, []) == (8, False)
    assert drawn(sampled, [5]) == (7, True)
    logits[7] = 0.0
    ignoring = Sampling(seed=0, temperature=0, ignore_eos=True, stop_token_ids=(8,))
    assert drawn(ignoring, []) == (8, True), "the request's own stop tokens are not ignored"


def test_logprobs_are_of_the_raw_distribution() -> None:
    logits = logits_of(5)
    raw = logits.log_softmax(-1)
    sampling = Sampling(seed=3, temperature=0.3, top_k=2, repetition_penalty=3.0, logprobs=4)
    result = one(sampling, logits, [1, 2])
    assert result.logprob == pytest.approx(float(raw[result.token]))
    best = raw.sort(descending=True)
    assert [token for token, _ in result.top] == best.indices[:4].tolist()
    assert [value for _, value in result.top] == pytest.approx(best.values[:4].tolist())
    assert one(Sampling(seed=0, logprobs=0), logits, [1]).top == []
    assert one(Sampling(seed=0), logits, [1]).logprob is None
    assert len(one(Sampling(seed=0, logprobs=VOCABULARY + 9), logits, [1]).top) == VOCABULARY


def test_a_row_does_not_depend_on_its_batch_and_logits_stay_as_they_are() -> None:
    samplings = [
        Sampling(seed=1, temperature=0.9),
        Sampling(seed=2, temperature=0),
        Sampling(seed=3, top_p=0.7, repetition_penalty=1.3, min_tokens=9),
        Sampling(seed=1, choice=1, temperature=0.9),
    ]
    logits = torch.stack([logits_of(seed) for seed in range(4)])
    before = logits.clone()
    rows = [row_of(sampling, [1, 2], [3]) for sampling in samplings]
    together = draw(rows, logits, END)
    assert torch.equal(before, logits)
    for index in (3, 1, 0, 2):
        assert draw([rows[index]], logits[index : index + 1], END) == [together[index]]
    assert draw([], logits[:0], END) == []


def philox(key: tuple[int, int], counter: list[int]) -> float:
    """The first double of Philox4x64-10 (Salmon et al., 2011) after numpy's increment of the counter."""
    mask = (1 << 64) - 1
    words, (k0, k1) = [counter[0] + 1, *counter[1:]], key
    for _ in range(10):
        high0, low0 = divmod(words[0] * 0xD2E7470EE14C6C93, 1 << 64)
        high1, low1 = divmod(words[2] * 0xCA5A826395121157, 1 << 64)
        words = [high1 ^ words[1] ^ k0, low1, high0 ^ words[3] ^ k1, low0]
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & mask, (k1 + 0xBB67AE8584CAA73B) & mask
    return (words[0] >> 11) / (1 << 53)


@pytest.mark.parametrize("seed", [0, 1, 2**63 + 5, 2**64 - 1])
def test_uniforms_are_philox_of_seed_choice_and_position(seed: int) -> None:
    """A change of these numbers would change the answers of every request with a seed."""
    for choice, position in ((0, 0), (0, 1), (2, 8000)):
        assert uniform(seed, choice, position) == philox((seed, choice), [0, position, 0, 0])
    assert uniform(-1, 2, 3) == uniform(2**64 - 1, 2, 3), "a negative seed is its two's complement"


def test_draws_of_one_request_follow_its_distribution() -> None:
    """Chi-squared over positions: 9 degrees of freedom, 33.7 is one in 10 000."""
    rng = random.Random(4)
    logits = torch.tensor([rng.uniform(-1, 1) for _ in range(10)])
    expected = logits.softmax(-1)
    output: list[int] = []
    counts = [0] * 10
    for _ in range(3000):
        counts[one(Sampling(seed=11, ignore_eos=True), logits, [1], output).token] += 1
        output.append(0)
    statistic = sum((counts[i] - 3000 * float(expected[i])) ** 2 / (3000 * float(expected[i])) for i in range(10))
    assert statistic < 33.7


def test_a_temperature_near_zero_is_greedy() -> None:
    logits = logits_of(2)
    assert one(Sampling(seed=5, temperature=1e-9), logits, [1]).token == int(logits.argmax())
    assert one(Sampling(seed=5, temperature=1e-4), logits, [1]).token == int(logits.argmax())


EXTREMES = (0.0, -0.0, 1e-45, -1e-30, 1.0, -1.0, 1e30, -1e30, 3.4e38, -3.4e38, math.inf, -math.inf, math.nan)
PENALTIES = (1e-320, 1e-45, 1e-40, 1e-9, 1.0, 1e9, 1e38, 1e300)

any_logits = st.lists(st.sampled_from(EXTREMES) | st.floats(width=32), min_size=10, max_size=10)
any_sampling = st.builds(
    Sampling,
    seed=st.integers(0, 2**63),
    temperature=st.sampled_from((0.0, 5e-324, 1e-5, 1.1e-5, 1.0, 2.0, 1e300)) | st.floats(0, 2),
    top_p=st.sampled_from((5e-324, 1e-9, 0.9, 1.0)) | st.floats(0, 1),
    top_k=st.integers(-1, 12) | st.just(2**62),
    min_p=st.sampled_from((0.0, 5e-324, 1.0)) | st.floats(0, 1),
    repetition_penalty=st.sampled_from(PENALTIES) | st.floats(0, exclude_min=True, allow_infinity=False),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    min_tokens=st.integers(0, 3),
    stop_token_ids=st.just(()) | st.just(tuple(range(10))) | st.lists(st.integers(0, 20), max_size=4).map(tuple),
    logprobs=st.none() | st.integers(0, 12),
)


@given(any_logits, any_sampling, st.lists(st.integers(0, 9), min_size=1, max_size=5))
@example([0.5, -1.0] * 5, Sampling(seed=0, top_p=0.9, repetition_penalty=1e-40), [0, 1])
@example([math.nan] * 10, Sampling(seed=0, top_p=0.9, min_p=0.1), [0])
@settings(max_examples=400)
def test_whatever_the_logits_and_parameters_some_token_is_drawn(
    logits: list[float], sampling: Sampling, output: list[int]
) -> None:
    result = one(sampling, torch.tensor(logits, dtype=torch.float32), [0, 1, 9], output)
    assert result.error is None
    assert 0 <= result.token < 10
    values = np.array(logits, np.float32)
    for u in (0.0, 0.5, math.nextafter(1, 0)):
        assert 0 <= pick(values, sampling, u) < 10


def test_infinities_are_the_ends_of_the_order_and_nan_is_never_chosen() -> None:
    logits = torch.tensor([math.nan, -math.inf, 1.0, math.inf, math.inf])
    assert kept(logits, Sampling(seed=0, temperature=2)).keys() == {3, 4}
    assert kept(logits[:3], Sampling(seed=0, temperature=2)).keys() == {2}
    barred = Sampling(seed=0, min_tokens=9, stop_token_ids=(2,), repetition_penalty=1e-40)
    assert one(barred, torch.tensor([1.0, -1.0, 5.0]), [2]).token in (0, 1), "a penalty lifts no bar"


def test_a_row_that_cannot_be_drawn_leaves_the_others_their_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row_of(Sampling(seed=seed, top_p=0.9), [1, 2], [3]) for seed in range(3)]
    logits = torch.stack([logits_of(seed) for seed in range(3)])
    good = draw(rows, logits, END)

    def uniform_but_for_one(seed: int, choice: int, position: int) -> float:
        if seed == 1:
            raise RuntimeError("no luck")
        return uniform(seed, choice, position)

    monkeypatch.setattr(module, "uniform", uniform_but_for_one)
    first, failed, last = draw(rows, logits, END)
    assert [first, last] == [good[0], good[2]]
    assert failed.error is not None
    assert "no luck" in failed.error
