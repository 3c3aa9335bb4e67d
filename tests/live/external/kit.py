"""A Conductor, a gateway's cluster side and the adapters in one event loop, before fake servers."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from moonpool.core.settings import ConductorConfig
from moonpool.core.vocabulary import PartId, Slo
from moonpool.gateway.cluster import Cluster
from moonpool.gateway.generation import Completed, Ending, Generation, Job, chains_of
from moonpool.gateway.meters import Meters
from moonpool.live.conductor import run_conductor
from moonpool.live.external.config import ExternalConfig, Instance
from moonpool.live.external.run import Instances
from moonpool.wire.link import Link
from moonpool.wire.messages import Sampling, TokenOut

from .fake import MODEL, FakeVllm

SECONDS = 60.0
T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    async def limited() -> T:
        async with asyncio.timeout(SECONDS):
            return await work

    return asyncio.run(limited())


class Answer:
    """What became of a request."""

    def __init__(self, generation: Generation, tokens: list[TokenOut]) -> None:
        self.generation = generation
        self.drawn = tokens
        self.tokens = [token.token for token in tokens]
        self.cached_tokens = generation.cached_tokens

    @property
    def ending(self) -> Ending:
        assert self.generation.ending is not None
        return self.generation.ending

    @property
    def finish(self) -> str:
        assert isinstance(self.ending, Completed), self.ending
        return self.ending.reason


class Front:
    """The gateway's side, without HTTP and text."""

    def __init__(self, cluster: Cluster, instances: Instances, conductor: str) -> None:
        self.conductor = conductor
        """Its address."""
        self.cluster = cluster
        self.instances = instances
        self.label = 0

    def submit(self, prompt: Sequence[int], max_tokens: int, salt: str = "", **sampling: Any) -> Pending:
        self.label += 1
        changed = asyncio.Event()
        now = asyncio.get_running_loop().time()
        job = Job(
            label=f"r{self.label}",
            prompt=tuple(prompt),
            chains=chains_of(prompt, self.cluster.fleet.spaces, salt),
            sampling=Sampling(seed=7, max_tokens=max_tokens, **sampling),
            salt=salt,
            slo=Slo(),
            priority="",
            arrived=now,
            deadline=now + SECONDS,
        )
        return Pending(self.cluster, self.cluster.submit(job, changed.set), changed)

    async def ask(self, prompt: Sequence[int], max_tokens: int, **more: Any) -> Answer:
        return await self.submit(prompt, max_tokens, **more).answer()

    async def state(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads(await self.cluster.describe())
        return state

    async def part(self, id_: str) -> dict[str, Any]:
        """As the Conductor sees it; empty while it does not."""
        return next((part for part in (await self.state())["parts"] if part["id"] == id_), {})

    async def counter(self, part: str, name: str) -> float:
        counters: dict[str, dict[str, float]] = (await self.state())["counters"]
        return counters.get(part, {}).get(name, 0.0)

    async def until(self, is_so: Callable[[dict[str, Any]], bool], what: str) -> None:
        until = time.monotonic() + SECONDS
        while not is_so(await self.state()):
            assert time.monotonic() < until, f"never happened: {what}"
            await asyncio.sleep(0.02)

    async def until_there(self, *ids: str) -> None:
        def is_there(state: dict[str, Any]) -> bool:
            up = {part["id"] for part in state["parts"] if part["health"] == "up"}
            return up.issuperset(ids) and self.cluster.fleet.lacks is None

        await self.until(is_there, f"{ids} are up")

    async def until_gone(self, id_: str) -> None:
        await self.until(lambda state: all(part["id"] != id_ for part in state["parts"]), f"{id_} is gone")


class Pending:
    """A request under way."""

    def __init__(self, cluster: Cluster, generation: Generation, changed: asyncio.Event) -> None:
        self._cluster = cluster
        self.generation = generation
        self._changed = changed

    async def until(self, tokens: int) -> None:
        while len(self.generation.output) < tokens and self.generation.ending is None:
            self._changed.clear()
            await self._changed.wait()

    async def answer(self) -> Answer:
        while self.generation.ending is None:
            self._changed.clear()
            await self._changed.wait()
        return Answer(self.generation, self.generation.take(1 << 20))

    def cancel(self) -> None:
        self._cluster.cancel(self.generation, "nobody waits for it")


def instances(servers: Sequence[FakeVllm], **more: Any) -> list[Instance]:
    return [Instance(id=PartId(f"vllm-{at}"), url=server.url, **more) for at, server in enumerate(servers)]


@asynccontextmanager
async def front(
    served: Sequence[Instance], rules: ConductorConfig | None = None, there: bool = True
) -> AsyncIterator[Front]:
    """`there`: wait until all of them are."""
    links: list[Link] = []

    def link(part: str) -> Link:
        links.append(Link(PartId(part), "127.0.0.1", 0, None))
        return links[-1]

    chief = link("conductor")
    served_from = Instances(ExternalConfig(MODEL, tuple(served), kv_bytes_per_token=1000), chief.me.address, link)
    cluster = Cluster(link("gateway-0"), chief.me.address, MODEL, Meters(MODEL))
    tasks = [
        asyncio.create_task(run_conductor(chief, rules or ConductorConfig(), seed=1)),
        asyncio.create_task(cluster.run()),
        asyncio.create_task(served_from.run()),
    ]
    try:
        made = Front(cluster, served_from, chief.me.address)
        if there:
            ready = asyncio.create_task(made.until_there(*[instance.id for instance in served]))
            await asyncio.wait([ready, *tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
            await ready
        yield made
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for each in links:
            each.close()
