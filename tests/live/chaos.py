"""What `test_chaos` does to a cluster: clients that leave and clients that read slowly, kills, and a look at memory."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import os
import random
import re
import signal
import socket
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec
from msgspec import Struct

from moonpool.bench.cluster import RunningCluster
from moonpool.bench.endpoint import Endpoint, Reply, _Reading, base_of
from moonpool.bench.process import anonymous_bytes
from moonpool.core.vocabulary import RejectReason
from moonpool.engine.timed import reference_tokens
from moonpool.gateway.exchange import DRAIN_SECONDS
from tests.live.kit import BLOCK, pids, random_prompt
from tests.live.supervised import CONDUCTOR

DEADLINE = 40.0
"""`request-timeout`."""
MODEL = "m" * 200
GRACE = 10.0
"""What a busy machine adds to it."""
HANG_UP, READ_SLOWLY = 0.15, 0.04
"""Shares of the requests."""
PATIENCE = (0.02, 8.0)
"""Seconds until a client hangs up: while it is queued, computed, or in the middle of its stream."""
SLOW_FIELDS = {"max_tokens": 300, "min_tokens": 300, "logprobs": 1}
"""Of a slow reader's request: some 600 bytes a token with MODEL, more in all than may be unread on their way to it."""
SLOW_RATE = (100.0, 20_000.0)
"""Bytes a second: from far too slow to faster than they come."""
SLOW_BUFFER, SLOW_SEGMENT = 2048, 200
"""Of a slow reader's socket: the gateway's kernel then keeps 80 KB for it. Usually it keeps megabytes: any answer."""
CLEAN = {reason.value for reason in RejectReason}
BACK_SECONDS = 60.0
BUSY_SECONDS = 4.0
LOOK_SECONDS = 1.0
POLL_SECONDS = 0.1


class Asked(Struct):
    prompt: list[int]
    max_tokens: int


class Clients(Endpoint):
    """As the endpoint of a replay: each of its requests is some client's, and each answer is held to its reference."""

    def __init__(self, url: str, seed: int) -> None:
        super().__init__(base_of(url), timeout=DEADLINE + DRAIN_SECONDS + GRACE)
        self._address = urlsplit(url).hostname, urlsplit(url).port
        self._rng = random.Random(seed)
        self._checking = ThreadPoolExecutor(1)
        self.ends: Counter[str] = Counter()
        """What became of the requests."""
        self.faults: list[str] = []
        """Each answer that must not have been."""

    async def stream(
        self, path: str, body: bytes, headers: Mapping[str, str] | None = None, ids: list[int] | None = None
    ) -> Reply:
        loop = asyncio.get_running_loop()
        sent, got, kind = loop.time(), list[int](), self._rng.random()
        if kind < HANG_UP:
            client = "an impatient client"
            reply = await self._hang_up(path, body, got)
        elif kind < HANG_UP + READ_SLOWLY:
            client = "a slow reader"
            wanted: dict[str, Any] = msgspec.json.decode(body)
            body = msgspec.json.encode(wanted | SLOW_FIELDS)
            reply = await self._read_slowly(path, body, got)
        else:
            client = "a client"
            reply = await super().stream(path, body, headers, got)
        asked = msgspec.json.decode(body, type=Asked)
        right = await loop.run_in_executor(self._checking, reference_tokens, asked.prompt, len(got))
        seconds = reply.ended - sent
        fault = ""
        if got != right:
            at = next(i for i, pair in enumerate(zip(got, right, strict=True)) if pair[0] != pair[1])
            fault = f"token {at} of {len(got)} is wrong"
        elif seconds > DEADLINE + DRAIN_SECONDS + GRACE:
            fault = "it ended too late"
        elif reply.completed:
            fault = "" if len(got) == asked.max_tokens else f"complete with {len(got)} of {asked.max_tokens} tokens"
        elif reply.reason not in ("hung up", "cut off") and reply.reason.replace("_", "-") not in CLEAN:
            fault = "not a clean end"
        self.ends["finished" if reply.completed else reply.reason] += 1
        if fault:
            self.faults.append(f"{client}, {seconds:.1f} s: {fault} ({reply.status} {reply.reason} {reply.message})")
        return reply

    async def _hang_up(self, path: str, body: bytes, ids: list[int]) -> Reply:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(math.exp(self._rng.uniform(*map(math.log, PATIENCE)))):
                return await super().stream(path, body, None, ids)
        except TimeoutError:
            return Reply(loop.time(), reason="hung up")

    async def _read_slowly(self, path: str, body: bytes, ids: list[int]) -> Reply:
        """Once the gateway must have given it up it reads what is left, at once."""
        loop = asyncio.get_running_loop()
        rate = math.exp(self._rng.uniform(*map(math.log, SLOW_RATE)))
        sent, status, reading = loop.time(), 0, _Reading(ids)
        refusal = b""
        given_up = sent + DEADLINE + DRAIN_SECONDS + GRACE / 2
        head = (
            f"POST {urlsplit(self.base).path}{path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        with socket.socket() as connection:
            connection.setblocking(False)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SLOW_BUFFER)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SLOW_SEGMENT)
            try:
                async with asyncio.timeout_at(given_up + GRACE):
                    await loop.sock_connect(connection, self._address)
                    await loop.sock_sendall(connection, head.encode() + body)
                    while data := await loop.sock_recv(connection, SLOW_BUFFER):
                        status = status or int(data.split(b" ", 2)[1])
                        if status != 200:
                            refusal += data
                        reading.take(data, loop.time())
                        await asyncio.sleep(min(len(data) / rate, max(given_up - loop.time(), 0.0)))
            except OSError as e:
                reading.message = str(e)
        if named := re.search(rb"x-moonpool-reason: (\S+)", refusal):
            reading.reason = named[1].decode()
        if not reading.completed and not reading.reason:
            reading.reason = "cut off" if loop.time() - sent > DEADLINE else "connection lost"
        return reading.reply(loop.time(), status)


async def cache_contexts(url: str, seconds: float, rng: random.Random, ends: Counter[str]) -> None:
    """One after another is cached, stays for a while, in which its node may die, and is deleted."""
    until = asyncio.get_running_loop().time() + seconds
    async with httpx.AsyncClient(timeout=DEADLINE + GRACE, base_url=url) as client:
        while asyncio.get_running_loop().time() < until:
            prompt = random_prompt(3 * BLOCK + 1, seed=rng.randrange(1 << 30))
            made = await client.post("/v1/caching", json={"prompt": prompt, "ttl": 3600})
            ends[f"caching {made.status_code}"] += 1
            await asyncio.sleep(rng.uniform(0.5, 8.0))
            if made.status_code == 200:
                (await client.delete(f"/v1/caching/{made.json()['id']}")).raise_for_status()


class Killer:
    """`kill -9`, over and over. Of the parts on the node `spared` none is killed: in them memory shows."""

    def __init__(self, cluster: RunningCluster, seed: int, spared: str) -> None:
        self._cluster = cluster
        self._rng = random.Random(seed)
        self._spared = spared
        self.kills: Counter[str] = Counter()
        self.slowest = 0.0
        """Seconds until all parts were there again."""

    async def run(self, count: int, period: float) -> None:
        """One worker or node each period, by turns the busiest and any one; after each third one the Conductor too,
        by turns half a period later and at the same moment."""
        loop = asyncio.get_running_loop()
        begin = loop.time()
        order = itertools.cycle(itertools.product((True, False), ("decode", "node", "prefill")))
        for number, (busiest, kind) in zip(range(1, count + 1), order, strict=False):
            await asyncio.sleep(begin + number * period - loop.time())
            with_conductor = number % 3 == 0
            victim, parts = await self._choose(kind, busiest)
            at_once = [CONDUCTOR] if with_conductor and number % 2 == 0 else []
            await self._kill([victim, *at_once], parts)
            if with_conductor and not at_once:
                await asyncio.sleep(begin + (number + 0.5) * period - loop.time())
                await self._kill([CONDUCTOR], await self._parts())

    async def _choose(self, kind: str, busiest: bool) -> tuple[str, dict[str, dict[str, Any]]]:
        """A victim, and all parts at that moment. The busiest: the one with most requests, once any has one."""
        until = asyncio.get_running_loop().time() + BUSY_SECONDS
        while True:
            parts = await self._parts()
            possible = [p for p in parts.values() if p["kind"] == kind and self._spared not in (p["id"], p.get("node"))]
            if not busiest:
                return str(self._rng.choice(possible)["id"]), parts
            found = max(possible, key=_busy)
            if any(_busy(found)) or asyncio.get_running_loop().time() > until:
                return str(found["id"]), parts
            await asyncio.sleep(POLL_SECONDS)

    async def _kill(self, victims: list[str], before: dict[str, dict[str, Any]]) -> None:
        """Returns when all parts are there again."""
        loop = asyncio.get_running_loop()
        began, running = loop.time(), pids(self._cluster)
        gone = {p["id"]: p["incarnation"] for p in before.values() if victims[0] in (p["id"], p.get("node"))}
        for victim in victims:
            os.kill(running[victim], signal.SIGKILL)
            self.kills[victim] += 1
        async with asyncio.timeout(BACK_SECONDS):
            while True:
                await asyncio.sleep(POLL_SECONDS)
                now = await self._parts()
                if len(now) == len(before) and all(now[id_]["incarnation"] != life for id_, life in gone.items()):
                    break
        self.slowest = max(self.slowest, loop.time() - began)

    async def _parts(self) -> dict[str, dict[str, Any]]:
        """By id, as soon as there is a Conductor that says so."""
        async with asyncio.timeout(BACK_SECONDS):
            while True:
                with contextlib.suppress(OSError):
                    state: Any = await asyncio.to_thread(self._cluster.describe)
                    return {part["id"]: part for part in state["parts"]}
                await asyncio.sleep(POLL_SECONDS)


def _busy(part: dict[str, Any]) -> tuple[int, int]:
    """Requests: of a worker those placed there, of a node those with room there."""
    return part.get("assigned", 0), part.get("rooms", 0)


class Life(Struct):
    """Of one process: what it held at each look, and when that was."""

    part: str
    times: list[float] = []
    held: list[int] = []
    """Bytes of anonymous memory."""

    @property
    def seconds(self) -> float:
        return self.times[-1] - self.times[0]

    def around(self, share: float) -> int:
        """Median around this share of its life."""
        found = [b for t, b in zip(self.times, self.held, strict=True) if abs(self._share(t) - share) <= 0.05]
        return int(statistics.median(found or self.held[-1:]))

    def _share(self, time: float) -> float:
        return (time - self.times[0]) / max(self.seconds, 1e-9)


class Memory:
    """Of every process of a cluster, its supervisor included, while it lives."""

    def __init__(self, cluster: RunningCluster) -> None:
        self._cluster = cluster
        self._lives: dict[int, Life] = {}

    async def watch(self) -> None:
        """Until it is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            for part, pid, held in await asyncio.to_thread(lambda: list(self._look())):
                life = self._lives.setdefault(pid, Life(part))
                life.times.append(loop.time())
                life.held.append(held)
            await asyncio.sleep(LOOK_SECONDS)

    def lives(self, seconds: float) -> list[Life]:
        """Those that lasted so long, by part."""
        return sorted((life for life in self._lives.values() if life.seconds >= seconds), key=lambda life: life.part)

    def _look(self) -> Iterator[tuple[str, int, int]]:
        running = {**pids(self._cluster), "supervisor": self._cluster.process.pid}
        for part, pid in running.items():
            with contextlib.suppress(OSError, ValueError):  # it has just ended
                yield part, pid, anonymous_bytes(pid)
