"""One probe of `make bench-goodput`: a slice at one rate to a live cluster, and whether the machine could carry it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct, structs

from moonpool.bench.cluster import RunningCluster
from moonpool.bench.dialect import Dialect
from moonpool.bench.endpoint import Endpoint, base_of
from moonpool.bench.processors import OTHERS, Meter, Used
from moonpool.bench.prompts import Prompts, ids_below
from moonpool.bench.replay import Replay, Rules
from moonpool.bench.turns import Pace, turns
from moonpool.core.cost import DecodeCoefficients, DecodeCost, PrefillCoefficients, PrefillCost
from moonpool.core.vocabulary import RejectReason, Slo
from moonpool.errors import MoonpoolError
from moonpool.report.outcomes import total
from moonpool.report.run import Run, live_run
from moonpool.trace.request import TraceRequest

MODEL = "smollm2"
"""As all of them serve it. Not asked beforehand what they take: a cluster that refuses is a finding, too."""
ANSWER_SECONDS = 600.0
REST_SECONDS = 120.0
REST_POLL_SECONDS = 0.2
DECODE_REASONS = (RejectReason.TBT_SLO.value, RejectReason.KV_ROOM.value, RejectReason.NEVER_FITS.value)
FULL = 0.9
"""Share of a core, or of all, from which on nothing is left."""
BATCH = 4
"""Of which decode steps are compared: every system has batches near it, so that nothing is extrapolated far."""


class Costs(Struct, frozen=True):
    """Of the hardware that the cluster is to be."""

    prefill: PrefillCoefficients
    decode: DecodeCoefficients


class Probe(Struct, frozen=True):
    run: Run
    used: Used
    """Of the machine's processors."""
    late: int
    """Requests taken whose first token did not come in time, or not at all."""
    slow: int
    """Requests whose first token did, and whose others did not."""
    steps: float | None = None
    """Seconds of prefill and decode steps as the Conductor has measured them over the profile's; the worst instance.
    None: nobody tells."""

    @property
    def idle(self) -> float:
        return self.used.idle

    @property
    def busiest(self) -> tuple[str, float]:
        """Of the system's processes, and its share of a core."""
        own = [(name, share) for name, share in self.used.shares.items() if name != OTHERS]
        return max(own, key=lambda each: each[1], default=("", 0.0))

    @property
    def limited_by(self) -> str:
        """The resource of which nothing is left, if there is one."""
        name, share = self.busiest
        if share >= FULL:
            return f"{name}: {share:.0%} of a core"
        return f"the cores: {self.idle:.0%} idle" if self.idle <= 1 - FULL else f"none ({name}: {share:.0%} of a core)"

    @property
    def lacks(self) -> str:
        """The pool whose lack fails most of those that do not attain; empty where all attain."""
        refused = self.run.summary.refused
        by_decode = sum(count for reason, count in refused.items() if reason in DECODE_REASONS)
        decode, prefill = self.slow + by_decode, self.late + sum(refused.values()) - by_decode
        return "decode" if decode > prefill else "prefill" if prefill else ""

    @property
    def share(self) -> float:
        summary = self.run.summary
        return summary.attained / summary.requests

    @property
    def lag(self) -> float:
        """Seconds that requests were sent late, P99."""
        return 0.0 if self.run.live is None else self.run.live.client.lag.p99


async def probe(
    name: str,
    url: str,
    requests: Sequence[TraceRequest],
    slo: Slo,
    seed: int,
    block_tokens: int,
    pids: Mapping[str, int],
) -> Probe:
    """Open loop, each request when it is due. `seed`: of the prompts; one that was there before finds them cached.

    `pids`: the system's processes by name, whose children count with them.
    """
    async with Endpoint(base_of(url), timeout=ANSWER_SECONDS) as endpoint:
        dialect = Dialect(MODEL)
        prompts = Prompts(ids_below(), block_tokens, seed, dialect.extra_tokens)
        replay = Replay(endpoint, dialect, prompts, Rules())
        meter = Meter(pids)
        tally = await replay.run(turns(requests, Pace(), block_tokens, seed))
        used = meter.read()
    outcomes = tally.outcomes
    in_time = outcomes.attain(Slo(slo.ttft, None))
    return Probe(
        live_run(name, seed, slo, outcomes, tally.live(endpoint.base, dialect)),
        used,
        late=total(~in_time & ~outcomes.refused),
        slow=total(in_time & ~outcomes.attain(slo)),
    )


async def probe_cluster(
    name: str,
    cluster: RunningCluster,
    requests: Sequence[TraceRequest],
    slo: Slo,
    seed: int,
    block_tokens: int,
    costs: Costs,
) -> Probe:
    """As `probe`. Raises MoonpoolError where the cluster does not come to rest afterwards."""
    pids = {"supervisor": cluster.process.pid}
    found = await probe(name, cluster.url, requests, slo, seed, block_tokens, pids)
    await at_rest(cluster)
    return structs.replace(found, steps=_steps(cluster, requests, costs))


async def at_rest(cluster: RunningCluster) -> None:
    """Until the Conductor has no request left. Raises MoonpoolError."""
    until = time.monotonic() + REST_SECONDS
    while True:
        state = await asyncio.to_thread(cluster.describe)
        requests: dict[str, int] = state["requests"]  # type: ignore[assignment]
        if not any(requests.values()):
            return
        if time.monotonic() > until:
            raise MoonpoolError(f"{REST_SECONDS:g} s after the last answer the cluster still has {requests}")
        await asyncio.sleep(REST_POLL_SECONDS)


def _steps(cluster: RunningCluster, requests: Sequence[TraceRequest], costs: Costs) -> float:
    """Compared where the instances were: at the mean prompt, and at a small batch of those.

    Of coupled workers only steps that decode alone: no other is told apart.
    """
    tokens = sum(request.input_tokens for request in requests) // len(requests)
    parts: list[dict[str, Any]] = cluster.describe()["parts"]  # type: ignore[assignment]
    ratios = []
    for part in parts:
        measured = part.get("cost")
        if measured and part["kind"] == "prefill":
            found, wanted = PrefillCost(PrefillCoefficients(*measured)), PrefillCost(costs.prefill)
            ratios.append(found.seconds(tokens, 0) / wanted.seconds(tokens, 0))
        elif measured:
            batch, wanted_step = DecodeCost(DecodeCoefficients(*measured[-3:])), DecodeCost(costs.decode)
            ratios.append(batch.seconds(BATCH, BATCH * tokens) / wanted_step.seconds(BATCH, BATCH * tokens))
    return max(ratios, default=1.0)
