"""`moonpool replay` and `record` with a real cluster on the timed engine: what it sends is what the trace says."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from moonpool.bench.cluster import RunningCluster, running_cluster
from moonpool.command.record import record
from moonpool.command.replay import Wanted, replay
from moonpool.command.workload import Workload
from moonpool.engine.model import resolve
from moonpool.trace.read import TraceFile
from moonpool.trace.request import TraceRequest
from tests.live.kit import BLOCK, wait_at_rest

pytestmark = pytest.mark.live

TALKS, TURNS = 10, 4
PROBES = 2
PAUSE_SECONDS = 0.05
"""That a percentile of the client's may lie below the gateway's: tokens that the network brings together."""
AGREE_SECONDS = 0.25
"""Between client and gateway, means: connecting, and a machine that has other things to do."""


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("replay") / "journal"


@pytest.fixture(scope="module")
def cluster(smollm2: Path, journal: Path) -> Iterator[RunningCluster]:
    with running_cluster("--engine", "timed", "--journal", str(journal)) as running:
        yield running


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Conversations of some turns, each prompt its predecessor and 40 tokens more; they all begin alike."""
    file = tmp_path / "trace.jsonl"
    lines = [
        {
            "timestamp": 1500 * turn + 120 * talk,
            "input_length": 150 + 40 * turn + talk,
            "output_length": 4 + turn,
            "hash_ids": [0, *range(100 * talk + 1, 100 * talk + 1 + (150 + 40 * turn + talk) // BLOCK)],
        }
        for turn in range(TURNS)
        for talk in range(TALKS)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def measured(cluster: RunningCluster, trace: Path, out: Path, turns: int, **changes: Any) -> dict[str, Any]:
    """The run of so many turns of each conversation, of which each request attains."""
    workload = Workload(str(trace), block_size=BLOCK, first=TALKS * turns)
    wanted = Wanted(**({"workload": workload, "url": cluster.url, "out": out, "ttft": 60.0, "tbt": 10.0} | changes))
    assert replay(wanted, resolve) == 0
    (run,) = json.loads(out.read_text())["runs"]
    assert run["summary"]["attained"] == TALKS * turns
    assert run["live"]["wrong_prompts"] == run["live"]["short_answers"] == 0
    assert run["live"]["output_tokens"] == TALKS * sum(4 + turn for turn in range(turns))
    return dict(run)


def gateway(cluster: RunningCluster) -> dict[str, float]:
    """Its counters and the sums and counts of its histograms, by name without labels."""
    text = cluster.get("/metrics").decode()
    found = re.findall(r"^moonpool:(\w+)(?:\{[^}]*\})? (\S+)$", text, re.MULTILINE)
    return {name: float(value) for name, value in found if not name.endswith("_bucket")}


Buckets = dict[str, list[tuple[float, float]]]


def histograms(cluster: RunningCluster) -> Buckets:
    """Of the gateway: for each its buckets' upper bounds and how many are no larger, in rising order."""
    found: Buckets = {}
    text = cluster.get("/metrics").decode()
    for name, bound, count in re.findall(r'^moonpool:(\w+)_bucket\{.*le="([^"]+)".*\} (\S+)$', text, re.MULTILINE):
        found.setdefault(name, []).append((float(bound), float(count)))
    return found


def between(before: Buckets, after: Buckets, name: str, share: float, spare: float) -> tuple[float, float]:
    """The bounds between which this quantile lies of what came meanwhile; `spare`: a share that may be of others."""
    known = dict(before.get(name, ()))
    counts = [(bound, count - known.get(bound, 0.0)) for bound, count in after[name]]
    every = counts[-1][1]
    lower = max((bound for bound, count in counts if count < (share - spare) * every), default=0.0)
    return lower, next(bound for bound, count in counts if count >= (share + spare) * every)


def whole_blocks(requests: Sequence[TraceRequest]) -> list[tuple[int, ...]]:
    """Of each prompt, numbered as they come up: the same for traces that share alike."""
    numbers: dict[int, int] = {}
    return [
        tuple([numbers.setdefault(id_, len(numbers)) for id_ in r.blocks[: r.input_tokens // BLOCK]]) for r in requests
    ]


def test_what_is_replayed_is_recorded_and_the_gateway_measures_the_same(
    cluster: RunningCluster, journal: Path, trace: Path, tmp_path: Path
) -> None:
    before, shapes = gateway(cluster), histograms(cluster)
    run = measured(cluster, trace, tmp_path / "a.json", TURNS)
    wait_at_rest(cluster)
    after = {name: value - before.get(name, 0.0) for name, value in gateway(cluster).items()}

    assert after["time_to_first_token_seconds_count"] == TALKS * TURNS + PROBES
    assert after["generation_tokens_total"] == run["live"]["output_tokens"] + 4 * PROBES
    mean = after["time_to_first_token_seconds_sum"] / after["time_to_first_token_seconds_count"]
    probes = PROBES / (TALKS * TURNS) * run["summary"]["ttft"]["most"]
    assert abs(run["summary"]["ttft"]["mean"] - mean) < AGREE_SECONDS + probes
    pause = after["inter_token_latency_seconds_sum"] / after["inter_token_latency_seconds_count"]
    assert abs(run["live"]["intervals"]["mean"] - pause) < AGREE_SECONDS
    spare = PROBES / (TALKS * TURNS)
    for name, seen in (
        ("time_to_first_token_seconds", run["summary"]["ttft"]),
        ("inter_token_latency_seconds", run["live"]["intervals"]),
    ):
        for share, percentile in ((0.5, "p50"), (0.9, "p90")):
            low, high = between(shapes, histograms(cluster), name, share, spare)
            assert low - PAUSE_SECONDS <= seen[percentile] <= high + AGREE_SECONDS, (name, percentile)
    assert run["summary"]["cached_share"] > 0.2, "turns find what was there before them"

    recorded = tmp_path / "recorded.jsonl"
    assert record(recorded, journal, None, None) == 0
    sent, heard = list(TraceFile(trace)), list(TraceFile(recorded))[PROBES:]
    assert [r.output_tokens for r in heard] == [r.output_tokens for r in sent]
    assert [r.input_tokens for r in heard] == [r.input_tokens for r in sent]
    assert whole_blocks(heard) == whole_blocks(sent)
    assert heard[-1].arrival - heard[0].arrival == pytest.approx(sent[-1].arrival, abs=2.0)


def test_text_has_the_same_lengths(cluster: RunningCluster, trace: Path, tmp_path: Path) -> None:
    text = measured(cluster, trace, tmp_path / "a.json", 2, prompts="text", tokenizer="smollm2", seed=1, sessions=True)
    assert text["summary"]["cached_share"] > 0.2
    chat = measured(cluster, trace, tmp_path / "b.json", 1, api="chat", tokenizer="smollm2", seed=2, rate=20.0)
    assert any("tokens before each prompt" in note for note in chat["live"]["notes"])
