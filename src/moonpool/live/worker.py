"""What prefill and decode workers share: finding their node, and remembering which attempts are over."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import ParamSpec, TypeVar

from msgspec.structs import replace

from moonpool.core.events import DecodeRefused, Event, Finished, Preempted, PrefillFailed, Registered, Reported
from moonpool.core.vocabulary import Capacity, NodePeer, PartId, PartKind, Peer, RequestId
from moonpool.engine.engine import Engine
from moonpool.errors import ConfigError, MoonpoolError, PoolError
from moonpool.store.client import NodeClient
from moonpool.wire.link import Link
from moonpool.wire.membership import Absences, Membership
from moonpool.wire.messages import Envelope

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

NODE_SECONDS = 60.0
REMEMBERED_ENDINGS = 10_000
WATCH_SECONDS = 1.0
REPEATED_ENDINGS = 1024
REPEAT_SECONDS = 60.0
"""How long ago an ending may have been told that a new Conductor hears of, because the old one may not have."""


class Endings:
    """The newest attempt of each request that is over here: an order that comes late must not start it again."""

    def __init__(self) -> None:
        self._newest: OrderedDict[RequestId, int] = OrderedDict()

    def add(self, request: RequestId, attempt: int) -> None:
        self._newest[request] = max(attempt, self._newest.pop(request, 0))
        if len(self._newest) > REMEMBERED_ENDINGS:
            self._newest.popitem(last=False)

    def has(self, request: RequestId, attempt: int) -> bool:
        return attempt <= self._newest.get(request, 0)


async def attach_to_node(
    membership: Membership, link: Link, wanted: PartId | None, timeout: float = NODE_SECONDS
) -> tuple[NodePeer, NodeClient]:
    """Connect to the node named `wanted`, or to the only one whose socket is on this host.

    Raises ConfigError when there is none within `timeout`.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout
    while True:
        nodes = membership.fleet.nodes if membership.fleet is not None else ()
        here = [n for n in nodes if (wanted is None or n.id == wanted) and _is_here(n)]
        if len(here) > 1:
            names = ", ".join(n.id for n in here)
            raise ConfigError(f"several nodes are on this host ({names}): say which with --node")
        if here:
            try:
                client = await asyncio.to_thread(
                    NodeClient.connect, here[0].socket_path, name=link.me.id, incarnation=link.me.incarnation
                )
            except (OSError, PoolError) as e:
                log.info("node %s does not take this client yet: %s", here[0].id, e)
            else:
                return here[0], client
        if loop.time() > deadline:
            raise ConfigError(
                f"no node {wanted or 'on this host'} in the cluster within {timeout:g} s: start one first"
            )
        await asyncio.sleep(0.1)


async def in_thread(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """`asyncio.to_thread`, but a cancellation waits for the thread: it still reads or writes the arena."""
    running = asyncio.ensure_future(asyncio.to_thread(call, *args, **kwargs))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise


def describe(
    link: Link, kind: PartKind, engine: Engine, slots: int, model: str, step_tokens: int = 0, stages: int = 1
) -> Registered:
    """What a worker says of itself; its node is named once it has found it. `stages`: of the pipeline that it leads."""
    capacity = Capacity(
        pages=engine.page_count, slots=slots, context_tokens=engine.context_tokens, step_tokens=step_tokens
    )
    layers = engine.layers if kind is PartKind.STAGE else range(engine.space.runs)
    return Registered(
        kind,
        link.me,
        capacity,
        space=engine.space,
        first_layer=layers.start,
        last_layer=layers.stop,
        model=model,
        stages=stages,
    )


def _is_here(node: NodePeer) -> bool:
    return Path(node.socket_path).exists()


class WorkerLife:
    """A worker's process in the cluster: membership, node, background tasks; ends when any of them breaks."""

    def __init__(
        self,
        link: Link,
        conductor: str,
        wanted_node: PartId | None,
        describe: Registered,
        report: Callable[[], Reported],
        counters: Callable[[], dict[str, float]],
        prepare: Callable[[], Coroutine[object, object, None]] | None = None,
    ) -> None:
        """`describe` names a node where the worker maps no arena: then it attaches to none.

        `prepare` says `enter` when orders may come; without it they may as soon as the node is found."""
        self.link = link
        self._prepare = prepare
        self._wanted_node = wanted_node
        self._description = describe
        self._here: NodePeer | None = None
        self._node: NodeClient | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._told: deque[tuple[float, Event]] = deque(maxlen=REPEATED_ENDINGS)
        self._membership = Membership(link, conductor, lambda: self._description, report, counters)
        self._membership.on_joined = self._tell_again

    @property
    def here(self) -> NodePeer:
        assert self._here is not None, "orders come only after the worker has named its node"
        return self._here

    @property
    def node(self) -> NodeClient:
        assert self._node is not None, "orders come only after the worker has named its node"
        return self._node

    async def run(
        self,
        hear: Callable[[Envelope], None],
        gateways: Callable[[], set[Peer]],
        drop: Callable[[Peer], None],
        quiesce: Callable[[], None],
    ) -> None:
        """Join, attach to the node, feed messages to `hear` until something breaks or this is cancelled.

        Of the gateways that requests here came from, those that left the fleet are given to `drop`: nobody reads
        their tokens, and a Conductor that came up after them does not know whom to cancel. `quiesce` (blocking) ends
        the worker's threads; only then is the node told that this client has left, because it will give the arena
        that they read and write to others.
        """
        loop = asyncio.get_running_loop()

        async def listen() -> None:
            while True:
                envelope = await self.link.receive()
                if not self._membership.heard(envelope):
                    hear(envelope)

        async def watch() -> None:
            absences = Absences()
            while True:
                await asyncio.sleep(WATCH_SECONDS)
                for gateway in absences.over(gateways() - self._membership.there(), loop.time()):
                    log.warning("%s (%s) is gone: its requests are dropped", gateway.id, gateway.incarnation)
                    drop(gateway)

        ears, eyes = asyncio.create_task(listen()), asyncio.create_task(watch())
        heart: asyncio.Task[None] | None = None
        try:
            await self._membership.join()
            # Before the node is waited for: that may take longer than a silence after which this part is lost.
            heart = asyncio.create_task(self._membership.run())
            if self._description.node is None:
                await self._attach(loop)
            if self._prepare is None:
                if self._node is not None:
                    self.enter()
            else:
                self.spawn(self._prepare())
            done, _ = await asyncio.wait((ears, eyes, heart, self._broken), return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            ending = [task for task in (ears, eyes, heart, *self._tasks) if task is not None]
            for task in ending:
                task.cancel()
            await asyncio.wait(ending)
            await asyncio.to_thread(quiesce)
            if self._node is not None:
                self._node.on_lost = None
                self._node.close()

    async def _attach(self, loop: asyncio.AbstractEventLoop) -> None:
        self._here, self._node = await attach_to_node(self._membership, self.link, self._wanted_node)

        def node_lost() -> None:
            loop.call_soon_threadsafe(self._break, MoonpoolError("the node is gone, and this worker's arena with it"))

        self._node.on_lost = node_lost

    def enter(self) -> None:
        """Name the node to the Conductor: from now on orders come."""
        self._description = replace(self._description, node=self.here.id)
        self._membership.register_again()
        log.info("ready on %s", self.here.id)

    @property
    def membership(self) -> Membership:
        return self._membership

    def spawn(self, coroutine: Coroutine[object, object, None]) -> asyncio.Task[None]:
        """Run in the background; an exception in it ends the worker, because its state can no longer be trusted."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def tell(self, event: Event) -> None:
        """A fact for the Conductor."""
        if isinstance(event, PrefillFailed | DecodeRefused | Preempted | Finished):
            self._told.append((asyncio.get_running_loop().time(), event))
        self.link.post(self._membership.conductor, event)

    def _tell_again(self) -> None:
        since = asyncio.get_running_loop().time() - REPEAT_SECONDS
        for at, event in self._told:
            if at > since:
                self.link.post(self._membership.conductor, event)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._break(error)

    def _break(self, error: BaseException) -> None:
        if not self._broken.done():
            self._broken.set_exception(error)
