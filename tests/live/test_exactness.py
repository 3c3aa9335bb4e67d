"""The same tokens as transformers' `generate`, through the whole cluster, cold and warm, on one node and across two."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from moonpool.bench.cluster import RunningCluster, running_cluster
from moonpool.core.blocks import block_keys
from tests.exactness import Reference
from tests.live.kit import (
    BLOCK,
    HANG,
    audit,
    cached_tokens,
    complete,
    key_space_of,
    node_client,
    output_ids,
    random_prompt,
)

CHUNK = 128
TOKENS = 12
BORDERS = [n + d for n in (BLOCK, 2 * BLOCK, 4 * BLOCK) for d in (-1, 0, 1)]
LENGTHS = [1, 2, 17, *BORDERS, 2 * CHUNK + 37, 3 * CHUNK, 700]
AT_ONCE = [5, 63, 64, 65, 129, 200, 300, 411]
MAX_TIES_SHARE = 0.02

pytestmark = pytest.mark.live


@pytest.fixture(scope="module", params=[1, 2], ids=["one-node", "two-nodes"])
def cluster(request: pytest.FixtureRequest, smollm2: Path) -> Iterator[RunningCluster]:
    with running_cluster("--nodes", str(request.param), "--prefill-chunk", str(CHUNK)) as c:
        yield c
        audit(c)


@pytest.fixture(scope="module")
def reference(smollm2: Path) -> Reference:
    return Reference(smollm2)


@pytest.mark.timeout(900)
def test_greedy_tokens_equal_generate_cold_and_warm(cluster: RunningCluster, reference: Reference) -> None:
    ties = compared = 0
    for n, length in enumerate(LENGTHS):
        prompt = random_prompt(length, seed=n)
        for warm in (False, True):
            answer = complete(cluster, prompt, TOKENS, ignore_eos=True)
            ids = output_ids(answer)
            assert len(ids) == TOKENS
            ties += reference.check(prompt, ids).ties
            compared += len(ids)
            if warm:
                assert cached_tokens(answer) == (length - 1) // BLOCK * BLOCK
    assert ties <= MAX_TIES_SHARE * compared, f"{ties} ties in {compared} tokens"


@pytest.mark.timeout(900)
def test_eight_at_once_in_mixed_lengths(cluster: RunningCluster, reference: Reference) -> None:
    prompts = [random_prompt(length, seed=1000 + n) for n, length in enumerate(AT_ONCE)]
    with ThreadPoolExecutor(8) as pool:
        for _ in ("cold", "warm"):
            answers = list(pool.map(lambda p: complete(cluster, p, 16, ignore_eos=True), prompts))
            ties = sum(reference.check(p, output_ids(a)).ties for p, a in zip(prompts, answers, strict=True))
            assert ties <= 1 + MAX_TIES_SHARE * 16 * len(prompts)


def test_turns_of_one_conversation(cluster: RunningCluster, reference: Reference) -> None:
    """Each turn's prompt is the whole history: prompt and answer are hits up to the last whole block."""
    history = random_prompt(100, seed=77)
    known = 0
    for turn in range(4):
        answer = complete(cluster, history, 30, ignore_eos=True)
        ids = output_ids(answer)
        reference.check(history, ids)
        assert cached_tokens(answer) >= known // BLOCK * BLOCK, f"turn {turn}"
        known = len(history) + len(ids) - 1
        history = [*history, *ids, *random_prompt(40, seed=turn)]


def test_a_block_corrupted_in_dram_changes_the_logits(smollm2: Path) -> None:
    """The control of all of the above: what is read from the pool really is what attention sees.

    A local read trusts the bytes (their checksum was taken when they were put), so a flipped block must show.
    """
    with running_cluster() as c:
        prompt = random_prompt(3 * BLOCK + 5, seed=9)
        fields = {"ignore_eos": True, "logprobs": 5}
        complete(c, prompt, 2, **fields)
        warm = complete(c, prompt, 2, **fields)
        again = complete(c, prompt, 2, **fields)
        assert logprobs(warm) == logprobs(again), "the same bytes give the same logits"
        space = key_space_of(c)
        with node_client(c, "node-0") as client, client.lease(space, block_keys(prompt, space)).result(HANG) as lease:
            assert lease.count == 3
            start = lease.offsets[1]
            block = client.arena[start : start + space.block_bytes].view("float32")
            block[:] = block[::-1].copy()
            corrupted = complete(c, prompt, 2, **fields)
        assert cached_tokens(corrupted) == 3 * BLOCK
        assert logprobs(corrupted) != logprobs(warm)


def logprobs(answer: dict[str, Any]) -> list[dict[str, float]]:
    top: list[dict[str, float]] = answer["choices"][0]["logprobs"]["top_logprobs"]
    return top
