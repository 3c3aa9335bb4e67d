"""A replay while parts are killed, clients leave and others read slowly: every stream right, and nothing left behind.

Half a minute; half an hour and a kill a minute in `make soak`, or as long as MOONPOOL_CHAOS_SECONDS says.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moonpool.bench.cluster import RunningCluster
from moonpool.bench.dialect import Dialect
from moonpool.bench.prompts import Prompts, ids_below
from moonpool.bench.replay import Replay, Rules
from moonpool.bench.tally import Tally
from moonpool.bench.turns import Pace, turns
from moonpool.trace.request import TraceRequest
from moonpool.trace.synthesize import Family, Lengths, Synthetic, synthesize
from tests.live.chaos import DEADLINE, MODEL, Clients, Killer, Memory, cache_contexts
from tests.live.kit import BLOCK, audit, counters, eventually, total
from tests.live.supervised import supervised_cluster
from tests.soak import SOAK

pytestmark = pytest.mark.live

SECONDS = float(os.environ.get("MOONPOOL_CHAOS_SECONDS", "1800" if SOAK else "36"))
PERIOD = 60.0 if SECONDS >= 600 else 9.0
"""From a kill to the next."""
NODES = 3
SPARED = "node-2"
RATE = 3.0
"""Requests a second: half of what the cluster can do while all of it is up."""
CONTEXTS = 2
"""Cached at one time."""
SEED = int(os.environ.get("MOONPOOL_SEED", "1"))
MOST_UNSERVED = 0.01
"""Share of requests that may be refused or end at their deadline: a kill costs a request its time, not its answer."""
GROWTH, GROWTH_BYTES = 0.10, 8 << 20
"""Of a process's anonymous memory, at most, from a third of its life to its end."""
LEAST_LIFE = max(SECONDS / 10, 20.0)
"""Shorter ones say nothing of memory."""
COUNTERS_SECONDS = 2.5
"""In which every part has told its counters again."""
CONFIG = {
    "engine": "timed",
    "served-model-name": MODEL,
    "block-size": BLOCK,
    "dram-per-node": "3MiB",
    "ssd-per-node": "64MiB",
    "request-timeout": f"{DEADLINE:g}s",
    "caching-dir": "off",
}
"""A block of the timed engine is 32 KiB: DRAM has 96, and much of what is asked for again comes from SSD."""


def requests() -> Iterator[TraceRequest]:
    """Conversations that grow, and questions about a few documents."""
    chats = Family(
        prompt=Lengths(260, 0.5, 100, 900),
        answer=Lengths(60, 0.8, 4, 300),
        share=2.0,
        preamble_blocks=2,
        going_on=0.7,
        pause=Lengths(3.0),
        added=Lengths(40),
    )
    questions = Family(
        prompt=Lengths(600, 0.3, 300, 1500),
        answer=Lengths(40, 0.5, 4, 200),
        documents=6,
        document_part=0.7,
        document_uses=20.0,
    )
    return synthesize(
        Synthetic((chats, questions), requests=int(RATE * SECONDS), rate=RATE, seed=SEED, block_tokens=BLOCK)
    )


async def replay(cluster: RunningCluster, clients: Clients, killer: Killer, memory: Memory) -> Tally:
    """Until all requests are over."""
    watching = asyncio.create_task(memory.watch())
    async with clients, asyncio.TaskGroup() as others:
        others.create_task(killer.run(int(SECONDS / PERIOD - 0.75), PERIOD))
        for number in range(CONTEXTS):
            rng = random.Random(SEED + number)
            others.create_task(cache_contexts(cluster.url, SECONDS, rng, clients.ends))
        prompts = Prompts(ids_below(), BLOCK, SEED)
        run = Replay(clients, Dialect(MODEL), prompts, Rules())
        tally = await run.run(turns(requests(), Pace(sessions=True, think=1.0), BLOCK, SEED))
    watching.cancel()
    return tally


@pytest.mark.timeout(SECONDS + 300)
def test_a_replay_under_kills_ends_right_and_leaves_nothing(smollm2: Path, tmp_path: Path) -> None:
    with supervised_cluster(tmp_path, NODES, CONFIG | {"ssd-dir": str(tmp_path / "ssd")}) as cluster:
        eventually(lambda: parts_up(cluster) == 1 + 3 * NODES, "all parts are in the cluster")
        clients, memory = Clients(cluster.url, SEED), Memory(cluster)
        killer = Killer(cluster, SEED, SPARED)
        tally = asyncio.run(replay(cluster, clients, killer, memory))
        time.sleep(COUNTERS_SECONDS)
        lives = memory.lives(LEAST_LIFE)
        print(f"\n{tally.sent} requests in {SECONDS:g} s: {dict(sorted(clients.ends.items()))}")
        print(f"killed: {dict(sorted(killer.kills.items()))}; all was there again after {killer.slowest:.1f} s at most")
        for life in lives:
            print(
                f"  {life.part:12} {life.seconds:6.0f} s, MiB of anonymous memory: {life.around(1 / 3) / 2**20:.1f} "
                f"after a third of them, {life.around(1.0) / 2**20:.1f} at the end"
            )
        for fault in clients.faults[:20]:
            print("  wrong:", fault)

        errors = [line for line in cluster.log().splitlines() if re.match(r"[0-9:.]+ error", line)]
        assert not errors, errors[:20]
        audit(cluster)
        assert total(cluster, "pins") == 0
        state: Any = cluster.describe()
        assert not any(state["requests"].values()), state["requests"]
        assert not any(part.get("rooms") for part in state["parts"]), state["parts"]
        gateway = {name: state["gateway"][name] for name in ("seats_taken", "running", "waiting", "cached_contexts")}
        assert not any(gateway.values()), gateway
        assert len(counters(cluster)) == 2 + 3 * NODES

        assert not clients.faults, f"{len(clients.faults)} of {tally.sent}: {clients.faults[0]}"
        assert tally.sent == int(RATE * SECONDS)
        expected = clients.ends["finished"] + clients.ends["hung up"] + clients.ends["cut off"]
        assert tally.sent - expected <= MOST_UNSERVED * tally.sent, clients.ends
        assert clients.ends["hung up"] > 0.03 * tally.sent
        assert clients.ends["caching 200"] > 0
        assert total(cluster, "ssd_promotions") > 0
        grown = {
            f"{life.part} {life.seconds:.0f} s": (life.around(1 / 3), life.around(1.0))
            for life in lives
            if life.around(1.0) > (1 + GROWTH) * life.around(1 / 3) + GROWTH_BYTES
        }
        assert not grown, f"bytes of anonymous memory that grew: {grown}"
        assert {"supervisor", "gateway-0", SPARED} <= {life.part for life in lives}


def parts_up(cluster: RunningCluster) -> int:
    parts: Any = cluster.describe()["parts"]
    return len(parts)
