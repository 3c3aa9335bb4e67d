"""Timing does not tell a tenant what another has cached.

The cluster is real, with its gateway, keys, Conductor, nodes and transfers; its engine is the timed one, which takes a
fixed time for each token that is not cached, so that a hit would show in the time to first token as it does on a GPU,
and far more clearly than through the noise of a small model that computes.

A probe is asked with the prompt that another tenant has just prompted, and with one of the same length that nobody has;
which comes first is drawn. Keys of one group, which do share, are the proof that a difference would be found.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from scipy.stats import mannwhitneyu

from moonpool.bench.cluster import running_cluster
from tests.keys import bearer, make_key
from tests.live.kit import HANG, eventually, random_prompt
from tests.live.tenants import Tenants

pytestmark = pytest.mark.live

BLOCK = 16
WHOLE = 2 * BLOCK
PROMPT_TOKENS = WHOLE + 3
PAIRS = 50
LEVEL = 0.01
BATCHES = 3
"""Where nothing differs one batch is below LEVEL once in a hundred times, and all of three once in a million."""


@pytest.fixture(scope="module")
def tenants(smollm2: object, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tenants]:
    folder = tmp_path_factory.mktemp("timing")
    file = folder / "keys.json"
    admin = make_key(file, "operator", admin=True)
    flags = ("--engine", "timed", "--nodes", "2", "--block-size", str(BLOCK), "--keys", str(file))
    with running_cluster(*flags, "--admission", "none", "--journal", "off") as cluster:
        yield Tenants(cluster, file, Path(folder), admin)


@dataclass
class Probes:
    """Of one batch, in pairs: what the other tenant had prompted, and what nobody had."""

    known: list[float] = field(default_factory=list)
    fresh: list[float] = field(default_factory=list)
    """Seconds to first token."""
    cached_known: list[int] = field(default_factory=list)
    cached_fresh: list[int] = field(default_factory=list)
    """Tokens."""

    @property
    def p(self) -> float:
        """How likely times are that differ so much if all come from the same distribution."""
        return float(mannwhitneyu(self.known, self.fresh).pvalue)


class Tenant:
    """One key, and one connection."""

    def __init__(self, url: str, key: str) -> None:
        self._client = httpx.Client(base_url=url, headers=bearer(key), timeout=HANG)
        self.computed = 0
        """Tokens of prompts that were not cached, in all."""

    def ask(self, prompt: list[int], tokens: int) -> tuple[float, int]:
        """Seconds to the first token, and how many tokens of the prompt were cached."""
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}
        body["stream_options"] = {"include_usage": True}
        first, usage = 0.0, {}
        began = time.perf_counter()
        with self._client.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200, answer.read()
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    first = first or time.perf_counter() - began
                    usage = json.loads(line[6:]).get("usage") or usage
        assert usage["prompt_tokens"] == PROMPT_TOKENS
        cached: int = usage["prompt_tokens_details"]["cached_tokens"]
        self.computed += PROMPT_TOKENS - cached
        return first, cached

    def close(self) -> None:
        self._client.close()


def probe(other: Tenant, prober: Tenant, seed: int) -> Probes:
    """One batch; as often the known prompt comes first as the fresh one."""
    rng, found = random.Random(seed), Probes()
    orders = [n % 2 == 0 for n in range(PAIRS)]
    rng.shuffle(orders)
    for known_first in orders:
        known, fresh = (random_prompt(PROMPT_TOKENS, rng.randrange(1 << 40)) for _ in range(2))
        other.ask(known, tokens=2)
        for is_known in (known_first, not known_first):
            seconds, cached = prober.ask(known if is_known else fresh, tokens=1)
            (found.known if is_known else found.fresh).append(seconds)
            (found.cached_known if is_known else found.cached_fresh).append(cached)
    return found


def computed(tenants: Tenants) -> float:
    """Prompt tokens that the workers have computed, as they count them."""
    counted: dict[str, dict[str, float]] = tenants.look("/cluster")["counters"]
    return sum(of.get("computed_tokens", 0.0) for of in counted.values())


@pytest.fixture
def pair(tenants: Tenants, request: pytest.FixtureRequest) -> Iterator[tuple[Tenant, Tenant]]:
    """Two keys: of two tenants, or of one group."""
    group: str | None = request.param
    asking = [Tenant(tenants.cluster.url, tenants.key(name, group=group)) for name in ("acme", "umbrella")]
    yield asking[0], asking[1]
    for tenant in asking:
        tenant.close()


@pytest.mark.parametrize("pair", [None], indirect=True, ids=["two tenants"])
def test_what_another_tenant_prompted_shows_in_no_count_and_no_time(
    tenants: Tenants, pair: tuple[Tenant, Tenant]
) -> None:
    before = computed(tenants)
    values = []
    while len(values) < BATCHES and all(p <= LEVEL for p in values):
        found = probe(*pair, seed=1 + len(values))
        assert found.cached_known == found.cached_fresh == [0] * PAIRS
        values.append(found.p)
    assert values[-1] > LEVEL, f"each of {BATCHES} batches of {PAIRS} pairs tells them apart: {values}"
    asked = sum(tenant.computed for tenant in pair)
    assert asked == len(values) * 3 * PAIRS * PROMPT_TOKENS
    eventually(lambda: computed(tenants) - before == asked, "the workers have computed all of it")


@pytest.mark.parametrize("pair", ["ours"], indirect=True, ids=["one group"])
def test_the_same_test_tells_a_hit_of_ones_own_group(tenants: Tenants, pair: tuple[Tenant, Tenant]) -> None:
    found = probe(*pair, seed=9)
    assert found.cached_known == [WHOLE] * PAIRS
    assert found.cached_fresh == [0] * PAIRS
    assert found.p < LEVEL**BATCHES, "a difference would not be seen"
    assert sum(found.known) < sum(found.fresh)
