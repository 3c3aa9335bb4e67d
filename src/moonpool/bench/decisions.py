"""How long the Conductor takes for a request, from its arrival to its `Place`: a fleet under way, without processes.

The fleet is half prefill and half decode instances of one model, a node beside each. Requests of the traffic arrive one
after another; what their parts would report (room, prefill, decode, blocks that came and went) is fed in between, so
that queues, batches and directory are as full as in a cluster that serves them. Timed are the calls of `handle` for
`RequestArrived` and for `RoomConfirmed`, which answers with `Place`; beside them one lookup of the same prompt in a
directory with the same content.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import NamedTuple

from moonpool.core import actions as act
from moonpool.core import events as ev
from moonpool.core.conductor import Conductor, ConductorConfig
from moonpool.core.cost import DecodeCoefficients, PrefillCoefficients, TransferCost
from moonpool.core.directory import Directory
from moonpool.core.vocabulary import (
    BlockKey,
    Capacity,
    Chain,
    Incarnation,
    KeySpace,
    KeySpaceId,
    PartId,
    PartKind,
    Peer,
    RequestId,
    Slo,
    Tier,
)
from moonpool.trace.request import TraceRequest

BLOCK_TOKENS = 512
SPACE = KeySpace(KeySpaceId("51" * 16), BLOCK_TOKENS, 80, 2 << 20)
MODEL = "bench"
NODE_BLOCKS = 3_000_000 // BLOCK_TOKENS
CONTEXT_TOKENS = 131_072
BATCH = 8
"""Requests in decode for each decode instance."""
ARRIVALS_A_SECOND = 0.4
"""For each prefill instance."""
LIFE = Incarnation("1")
GATEWAY = Peer(PartId("gateway-0"), LIFE, "")
CONFIG = ConductorConfig(
    slo=Slo(30.0, 0.1),
    queue_bound=1 << 20,
    heartbeat_limit=1e9,
    prefill_cost=PrefillCoefficients(0.001, 1.1458e-4, 9.002e-10),
    decode_cost=DecodeCoefficients(0.019, 1e-6, 4.52e-8),
    transfer_cost=TransferCost(0.001, 1e11),
)
"""Policies are the defaults; the costs are those of eight A800s with a 70B model."""


class Timing(NamedTuple):
    """Microseconds."""

    mean: float
    p99: float
    longest: float


class Decided(NamedTuple):
    instances: int
    requests: int
    refused: int
    blocks: int
    """In the directory, at the end."""
    decision: Timing
    lookup: Timing


def measure(instances: int, traffic: Iterator[TraceRequest], requests: int) -> Decided:
    """`traffic`: endless, or long enough. The first requests, which fill the fleet, are not counted."""
    fleet = _Fleet(instances)
    for trace in islice(traffic, fleet.batch + fleet.half):
        fleet.serve(trace)
    fleet.decisions.clear()
    fleet.lookups.clear()
    fleet.refused = 0
    for trace in islice(traffic, requests):
        fleet.serve(trace)
    decision, lookup = _timing(fleet.decisions), _timing(fleet.lookups)
    return Decided(instances, requests, fleet.refused, fleet.blocks, decision, lookup)


def index(traffic: Iterable[TraceRequest], workers: int) -> tuple[float, float]:
    """Mean µs of a lookup of each prompt, and of storing what the worker whose turn it is lacks: as `peer_dynamo.py`
    has it."""
    directory, nodes = Directory(), [PartId(f"node-{number}") for number in range(workers)]
    for node in nodes:
        directory.join(node)
        directory.replace(node, 0, ())
    held: list[set[BlockKey]] = [set() for _ in nodes]
    prompts = [_keys_of(trace) for trace in traffic]
    clock, finding, storing = time.perf_counter, 0.0, 0.0
    for number, keys in enumerate(prompts):
        chain, worker = Chain(SPACE.id, keys), number % workers
        began = clock()
        directory.match(chain)
        finding += clock() - began
        first = next((at for at, key in enumerate(keys) if key not in held[worker]), len(keys))
        held[worker].update(keys)
        began = clock()
        directory.stored(nodes[worker], number // workers + 1, SPACE.id, Tier.DRAM, keys[first:])
        storing += clock() - began
    return finding / len(prompts) * 1e6, storing / len(prompts) * 1e6


class _Placed(NamedTuple):
    place: act.Place
    keys: tuple[BlockKey, ...]
    tokens: int
    output: int


class _Fleet:
    def __init__(self, instances: int) -> None:
        self.half = instances // 2
        self.batch = BATCH * self.half
        self.decisions: list[float] = []
        self.lookups: list[float] = []
        self.refused = 0
        self._now = 0.0
        self._number = 0
        self._conductor = Conductor(CONFIG, 0)
        self._directory = Directory()
        self._seq: dict[PartId, int] = {}
        self._stored: dict[PartId, dict[BlockKey, None]] = {}
        self._computing: deque[_Placed] = deque()
        self._decoding: deque[_Placed] = deque()
        self._tell(ev.Registered(PartKind.GATEWAY, GATEWAY))
        for number in range(instances):
            self._register(number)

    @property
    def blocks(self) -> int:
        return sum(map(len, self._stored.values()))

    def _register(self, number: int) -> None:
        kind = PartKind.PREFILL if number < self.half else PartKind.DECODE
        node, id_ = PartId(f"node-{number}"), PartId(f"{kind.value}-{number}")
        dram = Capacity(dram_bytes=NODE_BLOCKS * SPACE.block_bytes)
        self._tell(ev.Registered(PartKind.NODE, Peer(node, LIFE, ""), dram))
        self._tell(ev.Snapshot(node, LIFE, 0, ()))
        slots = 1 << 20 if kind is PartKind.PREFILL else 256
        capacity = Capacity(1_400_000 // BLOCK_TOKENS, slots, CONTEXT_TOKENS)
        self._tell(ev.Registered(kind, Peer(id_, LIFE, ""), capacity, SPACE, node=node, model=MODEL))
        self._directory.join(node)
        self._directory.replace(node, 0, ())
        self._seq[node], self._stored[node] = 0, {}

    def _tell(self, event: ev.Event) -> tuple[act.Action, ...]:
        return self._conductor.handle(event, self._now)

    def serve(self, trace: TraceRequest) -> None:
        """One more arrives; then the oldest ones move on."""
        self._number += 1
        self._now += 1 / (ARRIVALS_A_SECOND * self.half)
        id_, tokens = RequestId(f"r{self._number}"), trace.input_tokens
        chain = Chain(SPACE.id, _keys_of(trace)[: tokens // BLOCK_TOKENS])
        arrived = ev.RequestArrived(id_, 1, GATEWAY, MODEL, tokens, 0, 2048, (chain,), 600.0)
        clock = time.perf_counter
        began = clock()
        self._directory.match(chain)
        looked_up = clock()
        actions = self._tell(arrived)
        seconds = clock() - looked_up
        self.lookups.append(looked_up - began)
        room = next((action for action in actions if isinstance(action, act.ReserveRoom)), None)
        if room is None:
            self.refused += 1
            self.decisions.append(seconds)
            return
        confirmed = ev.RoomConfirmed(room.node.id, LIFE, id_, 1, tuple(range(len(chain.keys))))
        began = clock()
        actions = self._tell(confirmed)
        self.decisions.append(seconds + clock() - began)
        place = next(action for action in actions if isinstance(action, act.Place))
        self._computing.append(_Placed(place, chain.keys, tokens, trace.output_tokens))
        self._move_on()

    def _move_on(self) -> None:
        while len(self._computing) > self.half:
            placed = self._computing.popleft()
            place, cached = placed.place, placed.place.hit_blocks * BLOCK_TOKENS
            seconds = 0.001 + 1.1458e-4 * (placed.tokens - cached) + 9.002e-10 * (placed.tokens**2 - cached**2)
            done = ev.PrefillDone(
                place.request, 1, place.prefill.id, placed.tokens - cached, cached, 0.0, max(seconds, 1e-3)
            )
            self._tell(done)
            self._store(place.prefill_node.id, placed.keys)
            self._tell(ev.DecodeJoined(place.request, 1, place.decode.id))
            self._store(place.decode_node.id, placed.keys)
            self._decoding.append(placed)
        while len(self._decoding) > self.batch:
            placed = self._decoding.popleft()
            place = placed.place
            self._tell(ev.Finished(place.request, 1, place.decode.id, max(placed.output, 1), "length"))

    def _store(self, node: PartId, keys: tuple[BlockKey, ...]) -> None:
        """What is lacking comes, what came first goes."""
        stored = self._stored[node]
        new = tuple([key for key in keys if key not in stored])
        if not new:
            return
        stored.update(dict.fromkeys(new))
        self._seq[node] += 1
        self._tell(ev.BlocksStored(node, LIFE, self._seq[node], SPACE.id, Tier.DRAM, new))
        self._directory.stored(node, self._seq[node], SPACE.id, Tier.DRAM, new)
        gone = tuple(islice(stored, max(len(stored) - NODE_BLOCKS, 0)))
        if gone:
            for key in gone:
                del stored[key]
            self._seq[node] += 1
            self._tell(ev.BlocksRemoved(node, LIFE, self._seq[node], SPACE.id, Tier.DRAM, gone))
            self._directory.removed(node, self._seq[node], SPACE.id, Tier.DRAM, gone)


def _keys_of(trace: TraceRequest) -> tuple[BlockKey, ...]:
    return tuple([BlockKey(block.to_bytes(16, "big", signed=True)) for block in trace.blocks or ()])


def _timing(seconds: list[float]) -> Timing:
    ordered = sorted(seconds)
    mean = sum(ordered) / len(ordered)
    return Timing(mean * 1e6, ordered[len(ordered) * 99 // 100] * 1e6, ordered[-1] * 1e6)
