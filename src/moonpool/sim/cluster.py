"""A simulated cluster: the real Conductor and the real instances' state machines on simulated time.

Messages take no time; what takes time is computing, links and copies (`profile.py`). One seed drives everything that is
drawn, so equal inputs give equal bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import repeat
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

from moonpool.core import actions as act
from moonpool.core.conductor import Conductor, ConductorConfig, Decisions
from moonpool.core.cost import TransferCost
from moonpool.core.events import (
    Event,
    Finished,
    Registered,
    RequestArrived,
    Woke,
)
from moonpool.core.eviction import EvictionPolicy
from moonpool.core.state import ConductorState
from moonpool.core.vocabulary import (
    BlockKey,
    Capacity,
    Chain,
    Incarnation,
    KeySpace,
    KeySpaceId,
    NodePeer,
    PartId,
    PartKind,
    Peer,
)
from moonpool.sim.clock import Clock, Link
from moonpool.sim.decode import SimDecode
from moonpool.sim.flow import Flow, Told, nobody
from moonpool.sim.node import SimNode
from moonpool.sim.pipeline import of_group
from moonpool.sim.prefill import Order, SimPrefill
from moonpool.sim.profile import Profile
from moonpool.sim.request import SimRequest, own_keys
from moonpool.sim.shelf import SimShelf
from moonpool.trace.request import TraceRequest

MODEL = "simulated"
GATEWAY = Peer(PartId("gateway-0"), Incarnation("1"), "gateway-0")
REPORT_SECONDS = 2.0
LONGEST_ANSWER = 2048
"""What a client allows of output where the trace's own is shorter: the Conductor must not know it beforehand."""
DEADLINE_SECONDS = 600.0
CLASS_DRAWS = 1
"""Beside the seed: other draws do not move when requests get classes."""
DRAWN_AT_ONCE = 1024
"""Classes; the draws are the same, however many at once."""


class Setup(Struct, frozen=True, tag=True):
    """What is simulated. All machines' DRAM is part of the pool."""

    profile: Profile
    prefill: int = 8
    """Machines; each is an instance unless they form pipelines."""
    decode: int = 8
    conductor: ConductorConfig = ConductorConfig()
    """Its costs and its heartbeat limit are replaced by the profile's."""
    eviction: EvictionPolicy = "lru"
    seed: int = 0
    deadline: float = DEADLINE_SECONDS
    mix: tuple[tuple[str, float], ...] = ()
    """Priority classes that requests ask for, and the share of each; the seed draws which."""
    pipeline: int = 1
    """So many prefill machines form one instance (`pipeline.py`)."""


class Simulation:
    """`run` once."""

    def __init__(
        self, setup: Setup, trace: Iterable[TraceRequest], on_come: Told = nobody, on_over: Told = nobody
    ) -> None:
        """`trace`: in order of arrival, times from 0; it is read as time goes on. `on_come`: a request has come.
        `on_over`: it is complete or refused, and no worker has it any more.

        Raises ValueError for machines that form no whole pipelines.
        """
        if setup.pipeline < 1 or setup.prefill % setup.pipeline:
            raise ValueError(f"{setup.prefill} prefill machines form no pipelines of {setup.pipeline}")
        self.setup = setup
        profile = setup.profile
        self.clock = Clock()
        self._space = KeySpace(KeySpaceId("51"), profile.block_tokens, 1, profile.block_bytes)
        config = msgspec.structs.replace(
            setup.conductor,
            prefill_cost=of_group(profile, setup.pipeline).prefill,
            decode_cost=profile.decode,
            transfer_cost=TransferCost(
                profile.link_latency, profile.link_bytes_per_second, profile.ssd_read_bytes_per_second
            ),
            heartbeat_limit=1e9,
        )
        self._conductor = Conductor(config, setup.seed, explains=False)
        # At the same time, but after what happens now: nothing is told in the middle of something else.
        self._tell: Callable[[Event], None] = partial(self.clock.soon, self._handle)
        self._perform: dict[type[act.Action], Callable[[Any], None]] = {
            act.Place: self._placed,
            act.ReserveRoom: self._reserve,
            act.ReleaseRoom: self._release,
            act.Reject: self._refused,
            act.Resubmit: self._resubmit,
            act.Cancel: self._cancel,
            act.Replicate: self._replicate,
            act.Demote: lambda order: self.nodes[order.node.id].demote(order.keys),
            act.DropReplica: lambda order: self.nodes[order.node.id].drop(order.keys),
            act.SendSnapshot: lambda order: self.nodes[order.node.id].snapshot(),
            act.WakeAt: self._wake_then,
        }
        """What else the Conductor orders concerns nobody here."""
        self._wake_at = -1.0
        self.nodes: dict[PartId, SimNode] = {}
        self.prefill: dict[PartId, SimPrefill] = {}
        self.decode: dict[PartId, SimDecode] = {}
        for number in range(setup.prefill // setup.pipeline):
            id_ = PartId(f"prefill-{number}")
            node = self._node(f"node-p{number}", setup.pipeline)
            self.prefill[id_] = SimPrefill(
                id_,
                node,
                profile,
                self.clock,
                self.nodes,
                config.queue_bound,
                self._tell,
                self._hand_over,
                self._finished_early,
                setup.pipeline,
            )
        for number in range(setup.decode):
            id_ = PartId(f"decode-{number}")
            node = self._node(f"node-d{number}")
            self.decode[id_] = SimDecode(id_, node, profile, self.clock, self._tell, self._finished)
        self._flow = Flow(self.clock, trace, profile.block_tokens, _draw_classes(setup), on_come)
        self._open = self._flow.open
        self._on_over = on_over
        self._leaving: list[SimRequest] = []
        """They are over, but a worker may still have them."""

    def run(self, on_progress: Callable[[int], None] = lambda over: None) -> None:
        """Until every request is over. `on_progress`: how many are, now and then."""
        self._register()
        self.clock.after(REPORT_SECONDS, self._report)
        self._flow.run(self._arrive, on_progress)
        for request in self._leaving:
            self._on_over(request)

    @property
    def decisions(self) -> Decisions:
        return self.describe().decisions

    def describe(self) -> ConductorState:
        """What the Conductor knows now."""
        return self._conductor.describe(self.clock.now)

    def holders(self, keys: Sequence[BlockKey]) -> list[tuple[NodePeer, ...]]:
        """Of each block the nodes that have it."""
        return self._conductor.holders(self._space.id, keys)

    # Building

    def _node(self, name: str, machines: int = 1) -> SimNode:
        profile = of_group(self.setup.profile, machines)
        link = Link(profile.link_bytes_per_second, profile.link_latency)
        dram = profile.dram_tokens * profile.kv_bytes_per_token
        shelf = None
        if profile.ssd_bytes:
            shelf = SimShelf(profile.ssd_bytes, profile.block_bytes, profile.ssd_read_bytes_per_second)
        node = SimNode(name, self._space, dram, self.setup.eviction, link, self._tell, shelf)
        self.nodes[node.id] = node
        return node

    def _register(self) -> None:
        profile = self.setup.profile
        pages = profile.vram_tokens // profile.block_tokens
        self._handle(Registered(PartKind.GATEWAY, GATEWAY))
        for node in self.nodes.values():
            self._handle(node.register())
        bound = self.setup.conductor.queue_bound
        for kind, slots, workers in (
            (PartKind.PREFILL, bound, self.prefill),
            (PartKind.DECODE, profile.slots, self.decode),
        ):
            for id_, worker in workers.items():
                capacity = Capacity(pages, slots, profile.context_tokens)
                peer = Peer(id_, Incarnation("1"), id_)
                self._handle(Registered(kind, peer, capacity, self._space, node=worker.node.id, model=MODEL))

    # The gateway

    def _arrive(self, request: SimRequest) -> None:
        tokens = request.trace.input_tokens + request.output
        allowed = max(request.output_tokens, LONGEST_ANSWER)
        left = max(min(allowed, self.setup.profile.context_tokens - request.trace.input_tokens) - request.output, 1)
        self._tell(
            RequestArrived(
                request=request.id,
                attempt=request.attempt,
                gateway=GATEWAY,
                model=MODEL,
                prompt_tokens=tokens,
                output_tokens=request.output,
                max_output_tokens=left,
                chains=(Chain(self._space.id, request.keys),),
                time_left=request.arrived + self.setup.deadline - self.clock.now,
                priority=request.priority,
            )
        )

    def _placed(self, place: act.Place) -> None:
        request = self._open[place.request]
        request.placed = True
        tokens = request.trace.input_tokens + request.output
        order = Order(request, place, tokens, self.nodes[place.decode_node.id], self.clock.now)
        self.prefill[place.prefill.id].order(order)

    def _refused(self, action: act.Reject) -> None:
        request = self._open.get(action.request)
        if request is not None:
            request.refused, request.retry_after = action.reason, action.retry_after
            self._over(request)

    def _resubmit(self, action: act.Resubmit) -> None:
        """What it has produced so far is prompt now; those blocks are nobody else's."""
        request = self._open.get(action.request)
        if request is None or action.attempt != request.attempt:
            return
        request.attempt += 1
        whole = (request.trace.input_tokens + request.output) // self._space.block_tokens
        request.keys += own_keys(request.number, len(request.keys), whole)
        self._arrive(request)

    def _over(self, request: SimRequest) -> None:
        self._flow.end(request)
        if request.placed and (request.attempt > 1 or request.finished is None):
            self._leaving.append(request)
        else:
            self._on_over(request)

    def _let_go(self) -> None:
        """Those of the leaving that no worker has any more: nothing changes in them from now on."""
        leaving, self._leaving = self._leaving, []
        for request in leaving:
            id_ = request.id
            if any(each.has(id_) for each in self.prefill.values()) or any(d.has(id_) for d in self.decode.values()):
                self._leaving.append(request)
            else:
                self._on_over(request)

    # The workers

    def _hand_over(self, order: Order, arrives: float) -> None:
        place = order.place
        self.decode[place.decode.id].hand_over(order.request, place, order.tokens + 1, arrives)

    def _finished_early(self, order: Order, instance: PartId) -> None:
        """Its first token was its last."""
        request = order.request
        self._tell(Finished(request.id, order.place.attempt, instance, request.output, "length"))
        self._finished(request)

    def _finished(self, request: SimRequest) -> None:
        """Unless it was refused meanwhile: its last step was under way."""
        if request.refused is None:
            request.finished = self.clock.now
            self._over(request)

    def _report(self) -> None:
        for worker in self.decode.values():
            worker.report()
        for node in self.nodes.values():
            node.report()
        self._let_go()
        if self._flow.is_open:
            self.clock.after(REPORT_SECONDS, self._report)

    # The Conductor

    def _handle(self, event: Event) -> None:
        perform = self._perform
        for action in self._conductor.handle(event, self.clock.now):
            if (performed := perform.get(type(action))) is not None:
                performed(action)

    def _reserve(self, order: act.ReserveRoom) -> None:
        self.nodes[order.node.id].reserve(order)

    def _release(self, order: act.ReleaseRoom) -> None:
        self.nodes[order.node.id].close(order.request, order.attempt, arrived=False)

    def _cancel(self, order: act.Cancel) -> None:
        worker = self.prefill.get(order.to.id) or self.decode[order.to.id]
        worker.cancel(order.request, order.attempt)

    def _replicate(self, order: act.Replicate) -> None:
        self.nodes[order.node.id].fetch(self.nodes[order.source.id], order.keys, self.clock.now)

    def _wake_then(self, order: act.WakeAt) -> None:
        self._wake_at = order.at
        self.clock.at(order.at, self._wake, order.at)

    def _wake(self, at: float) -> None:
        if at == self._wake_at and self._flow.is_open:
            self._wake_at = -1.0
            self._handle(Woke())


def _draw_classes(setup: Setup) -> Iterator[str]:
    """Of one request after another, without end."""
    if not setup.mix:
        yield from repeat("")
    shares = np.array([share for _, share in setup.mix])
    rng = np.random.Generator(np.random.PCG64([setup.seed, CLASS_DRAWS]))
    while True:
        for at in rng.choice(len(shares), size=DRAWN_AT_ONCE, p=shares / shares.sum()).tolist():
            yield setup.mix[at][0]
