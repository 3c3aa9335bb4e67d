"""GET /cluster/live: what the dashboard shows, one snapshot a second for all who look, and none while nobody does."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import Mapping

import msgspec
from msgspec import Raw, Struct
from starlette.requests import Request
from starlette.responses import Response

from moonpool.core.vocabulary import Slo
from moonpool.errors import PeerUnavailableError
from moonpool.gateway.completions import Desk
from moonpool.gateway.meters import Meters
from moonpool.gateway.outcomes import Window
from moonpool.gateway.problem import invalid

FRESH_SECONDS = 0.9
"""Whoever asks within that gets the same snapshot: pages ask once a second."""
WINDOW_SECONDS = 60.0
"""Of percentiles and attainment."""
RATE_SECONDS = 10.0
"""Of requests a second."""
SAMPLES = 600
"""Kept for the charts of a page that comes later: ten minutes, while somebody looks."""
COUNTED = frozenset(
    {
        *("hit_blocks", "missed_blocks", "bytes_in", "bytes_out", "evictions", "integrity_failures"),
        *("ssd_capacity_bytes", "ssd_used_bytes", "ssd_promotions", "ssd_lost_volumes"),
        *("computed_tokens", "cached_tokens", "generated_tokens", "preempted"),
    }
)
"""Of what parts count."""


class Capacity(Struct, omit_defaults=True):
    pages: int = 0
    slots: int = 0
    dram_bytes: int = 0


class LivePart(Struct, omit_defaults=True):
    """The fields of `core.state.PartState` that are shown, and what the part counts."""

    id: str
    kind: str
    health: str = ""
    silent_seconds: float = 0.0
    node: str = ""
    capacity: Capacity = msgspec.field(default_factory=Capacity)
    queued: int | None = None
    running: int | None = None
    pages_free: int | None = None
    used_bytes: int | None = None
    assigned: int | None = None
    queue_seconds: float | None = None
    step_seconds: float | None = None
    rooms: int | None = None
    blocks: dict[str, int] | None = None
    index: str | None = None
    counters: dict[str, float] = {}


class _Class(Struct):
    name: str
    slo: Slo = Slo()
    queued: int = 0


class _State(Struct):
    """Of the Conductor's description what is read here; the rest goes on as it is."""

    placement: str = ""
    admission: str = ""
    context_tokens: int = 0
    parts: list[LivePart] = []
    requests: dict[str, int] = {}
    decisions: Raw = Raw(b"{}")
    classes: list[_Class] = []
    counters: dict[str, dict[str, float]] = {}
    decided: Raw = Raw(b"[]")
    prefixes: Raw = Raw(b"[]")


class LiveClass(Struct):
    name: str
    slo: Slo
    queued: int
    window: Window


class Sample(Struct, array_like=True):
    """A point of the charts. None: not known at that moment."""

    number: int
    at: float
    """Unix time."""
    attained: float
    completed: float
    refused: float
    """A second, over RATE_SECONDS."""
    ttft_p50: float | None
    ttft_p90: float | None
    ttft_p99: float | None
    tbt_p50: float | None
    tbt_p90: float | None
    tbt_p99: float | None
    """Seconds, over WINDOW_SECONDS."""
    held: int | None
    prefill: int | None
    decoding: int | None
    """Requests: waiting for a place; placed and without their first token; at a decode instance."""
    prompt_tokens: float
    cached_tokens: float
    output_tokens: float
    moved_bytes: float | None
    """Since the start: of this gateway's requests; into nodes, from others."""


class GatewayNow(Struct):
    running: int
    waiting: int
    intake: int
    seats_taken: int
    seats: int
    longest_first: float
    longest_next: float
    """Seconds that some request has waited for its first token, or for its next one."""
    totals: dict[str, int]
    answers: dict[str, float]
    """HTTP answers by status."""
    refused: dict[str, float]
    """By reason. These three since the start."""
    window: Window
    lately: Window
    """Over RATE_SECONDS."""


class Now(Struct):
    """The newest snapshot."""

    number: int
    at: float
    life: str
    """Drawn at the start of this gateway: with another one numbers begin again."""
    model: str
    problem: str
    """Why there is nothing of the Conductor, or empty."""
    lacks: str | None
    """What keeps the fleet from serving."""
    gateway: GatewayNow
    placement: str
    admission: str
    context_tokens: int
    requests: dict[str, int]
    parts: list[LivePart]
    decisions: Raw
    classes: list[LiveClass]
    decided: Raw
    prefixes: Raw


class Live(Struct):
    """What is answered."""

    samples: list[Sample]
    now: Now


class Board:
    """Snapshots for everybody who looks."""

    def __init__(self, desk: Desk, meters: Meters) -> None:
        self._desk = desk
        self._meters = meters
        self._samples: deque[tuple[int, bytes]] = deque(maxlen=SAMPLES)
        self._now = b"null"
        self._life = secrets.token_hex(8)
        self._number = 0
        self._made_at = float("-inf")
        self._making: asyncio.Task[None] | None = None

    async def page(self, request: Request) -> Response:
        """The endpoint. `after`: the number of the newest sample that the page has."""
        after = request.query_params.get("after", "0")
        if not (after.isascii() and after.isdecimal() and len(after) <= 12):
            raise invalid("after", f"after must be the number of a sample, not {after[:64]!r}")
        body = await self.look(int(after))
        return Response(body, media_type="application/json", headers={"cache-control": "no-store"})

    async def look(self, after: int) -> bytes:
        """`Live` as JSON: the samples since number `after`, all where that was another life's."""
        now = asyncio.get_running_loop().time()
        if self._making is None and now - self._made_at >= FRESH_SECONDS:
            self._made_at = now
            self._making = asyncio.create_task(self._make())
            self._making.add_done_callback(self._made)
        if self._making is not None:
            # Who leaves takes it from nobody else.
            await asyncio.shield(self._making)
        first = after if after <= self._number else 0
        newer = b",".join(sample for number, sample in self._samples if number > first)
        return b'{"samples":[' + newer + b'],"now":' + self._now + b"}"

    def _made(self, task: asyncio.Task[None]) -> None:
        self._making = None

    async def _make(self) -> None:
        state, problem = _State(), ""
        try:
            state = msgspec.json.decode(await self._desk.cluster.describe(live=True), type=_State)
        except PeerUnavailableError as e:
            problem = str(e)
        self._number += 1
        now = self._snapshot(state, problem)
        self._now = msgspec.json.encode(now)
        self._samples.append((now.number, msgspec.json.encode(_sample(now, state))))

    def _snapshot(self, state: _State, problem: str) -> Now:
        desk, cluster = self._desk, self._desk.cluster
        for part in state.parts:
            counters = state.counters.get(part.id, {})
            part.counters = {name: n for name, n in counters.items() if name in COUNTED}
        now, limits = asyncio.get_running_loop().time(), {c.name: c.slo for c in state.classes}
        longest_first, longest_next = cluster.waits()

        def window(seconds: float, only: str | None = None) -> Window:
            return cluster.outcomes.window(seconds, now, limits, only)

        return Now(
            number=self._number,
            at=time.time(),
            life=self._life,
            model=desk.config.served_model_name,
            problem=problem,
            lacks=cluster.fleet.lacks,
            gateway=GatewayNow(
                running=cluster.running,
                waiting=cluster.waiting,
                intake=desk.intake.waiting,
                seats_taken=desk.seats.taken,
                seats=desk.config.max_requests,
                longest_first=longest_first,
                longest_next=longest_next,
                totals=cluster.totals,
                answers=self._meters.statuses(),
                refused=self._meters.refusals(),
                window=window(WINDOW_SECONDS),
                lately=window(RATE_SECONDS),
            ),
            placement=state.placement,
            admission=state.admission,
            context_tokens=state.context_tokens,
            requests=state.requests,
            parts=state.parts,
            decisions=state.decisions,
            classes=[LiveClass(c.name, c.slo, c.queued, window(WINDOW_SECONDS, c.name)) for c in state.classes],
            decided=state.decided,
            prefixes=state.prefixes,
        )


def _sample(now: Now, state: _State) -> Sample:
    lately, window, phases = now.gateway.lately, now.gateway.window, state.requests
    totals, is_known = now.gateway.totals, not now.problem
    seconds = max(lately.seconds, 1.0)
    return Sample(
        number=now.number,
        at=now.at,
        attained=lately.attained / seconds,
        completed=lately.completed / seconds,
        refused=sum(lately.refused.values()) / seconds,
        ttft_p50=window.ttft.p50,
        ttft_p90=window.ttft.p90,
        ttft_p99=window.ttft.p99,
        tbt_p50=window.tbt.p50,
        tbt_p90=window.tbt.p90,
        tbt_p99=window.tbt.p99,
        held=_sum(phases, "held", "room", "resubmitted") if is_known else None,
        prefill=_sum(phases, "prefill") if is_known else None,
        decoding=_sum(phases, "moving", "decoding") if is_known else None,
        prompt_tokens=totals["prompt_tokens"],
        cached_tokens=totals["cached_tokens"],
        output_tokens=totals["tokens"],
        moved_bytes=sum(part.counters.get("bytes_in", 0.0) for part in now.parts) if is_known else None,
    )


def _sum(counts: Mapping[str, int], *names: str) -> int:
    return sum(counts.get(name, 0) for name in names)
