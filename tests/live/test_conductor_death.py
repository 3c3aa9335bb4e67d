"""`kill -9` of a Conductor that is a process of its own: streams go on, and placement comes back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from moonpool.engine.timed import reference_tokens
from tests.live.kit import BLOCK, HANG, Stream, audit, cached_tokens, complete, eventually, output_ids, random_prompt
from tests.live.parts import Parts, separate_parts

pytestmark = pytest.mark.live

BACK_SECONDS = 5.0
STREAMS = 20
OUTPUT = 110
PREFIX = random_prompt(2 * BLOCK, seed=1)


@pytest.fixture
def parts(smollm2: Path) -> Iterator[Parts]:
    with separate_parts({"engine": "timed", "dram-per-node": "64MiB", "max-batch": 32}) as cluster:
        for part in ("node-0", "node-1"):
            cluster.start_node(part)
        cluster.start_worker("prefill", "prefill-0", "node-0")
        cluster.start_worker("decode", "decode-0", "node-0")
        cluster.start_worker("decode", "decode-1", "node-1")
        cluster.wait_ready()
        eventually(lambda: len(state_of(cluster)) == 6, "all parts are in the cluster")
        yield cluster


def state_of(cluster: Parts) -> dict[str, dict[str, Any]]:
    """The Conductor's view of each part; empty while there is no Conductor."""
    try:
        described: Any = cluster.describe()
    except OSError:
        return {}
    return {part["id"]: part for part in described["parts"]}


def directory_of(cluster: Parts) -> dict[str, int]:
    """Blocks in the directory, by node; empty until it is exact for both nodes."""
    nodes = {id_: part for id_, part in state_of(cluster).items() if part["kind"] == "node"}
    if len(nodes) < 2 or any(node["index"] != "exact" for node in nodes.values()):
        return {}
    return {id_: sum(node["blocks"].values()) for id_, node in nodes.items()}


def test_streams_outlive_the_conductor_and_their_worker_after_it(
    parts: Parts, record_property: Callable[[str, object], None]
) -> None:
    complete(parts, [*PREFIX, 7], 2)
    prompts = [[*PREFIX, *random_prompt(10, seed=100 + n)] for n in range(STREAMS)]
    streams = [Stream(parts, prompt, OUTPUT) for prompt in prompts]
    eventually(lambda: all(len(s.ids) >= 5 for s in streams), "all streams run")
    known = directory_of(parts)
    assert all(known.values()), known

    parts.kill("conductor")
    seen = [len(s.ids) for s in streams]
    newcomer: list[dict[str, Any]] = []
    asking = threading.Thread(target=lambda: newcomer.append(complete(parts, [*PREFIX, 8], 3)))
    asking.start()
    eventually(lambda: all(len(s.ids) > n + 3 for s, n in zip(streams, seen, strict=True)), "streams need no Conductor")
    assert not newcomer, "placed without a Conductor"

    # What counts is the time from the moment at which the new one listens; starting Python is not our matter.
    listening = parts.log().count("conductor at tcp://")
    parts.start_conductor()
    eventually(lambda: parts.log().count("conductor at tcp://") > listening, "the Conductor is there again")
    began = time.monotonic()
    asking.join(HANG)
    placed = time.monotonic() - began
    eventually(lambda: bool(directory_of(parts)), "the directory is exact")
    rebuilt = time.monotonic() - began
    record_property("placement_back_seconds", placed)
    print(f"placement was back after {placed:.2f} s, the directory after {rebuilt:.2f} s at most")
    assert placed < 5 * BACK_SECONDS
    assert rebuilt < 5 * BACK_SECONDS
    assert output_ids(newcomer[0]) == reference_tokens([*PREFIX, 8], 3)
    again = directory_of(parts)
    assert all(again[node] >= blocks for node, blocks in known.items()), (known, again)
    assert cached_tokens(complete(parts, [*PREFIX, 9], 2)) == len(PREFIX)

    # The streams are known to it again: it notices the death of the worker of half of them.
    eventually(lambda: state_of(parts)["decode-1"]["assigned"] >= STREAMS / 4, "it knows of the streams")
    assert any(len(s.ids) < OUTPUT for s in streams), "make them longer"
    lost = state_of(parts)["decode-1"]["assigned"]
    parts.kill("decode-1")
    parts.report_lost("decode-1")
    parts.start_worker("decode", "decode-1", "node-1")
    assert [s.result() for s in streams] == [reference_tokens(prompt, OUTPUT) for prompt in prompts]
    assert [s.error for s in streams] == [None] * STREAMS
    resubmitted: Any = parts.describe()["decisions"]
    assert resubmitted["resubmitted"] == {"lost": lost}
    audit(parts)
