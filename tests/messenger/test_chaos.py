"""Many transfers at once while connections break at random: each ends in time, and what has arrived is right."""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time

import numpy as np

from moonpool.errors import TransferError
from moonpool.messenger.tcp import Priority, TcpMessenger

from .kit import SECONDS, SPACE, MemoryStore, bytes_of, keys_of, serving, write_of
from .proxy import Proxy, proxy

CHAOS_SECONDS = 60.0 if os.environ.get("MOONPOOL_SOAK") else 2.0
BLOCK = 1 << 20
RUNS = 8
KEYS = keys_of("chaos", 12)
KNOWN = 10
"""The nodes have that many of the keys."""


class Caller:
    """Reads and writes until the time is over, in every way there is."""

    def __init__(self, messenger: TcpMessenger, peers: list[tuple[Proxy, MemoryStore]], seed: int, end: float) -> None:
        self.done = self.failed = 0
        self.error: BaseException | None = None
        self._messenger = messenger
        self._peers = peers
        self._random = random.Random(seed)
        self._end = end
        self.thread = threading.Thread(target=self._call)

    def _call(self) -> None:
        try:
            while time.monotonic() < self._end:
                between, store = self._random.choice(self._peers)
                try:
                    (self._read if self._random.random() < 0.6 else self._write)(between.address, store)
                    self.done += 1
                except TransferError:
                    self.failed += 1
        except BaseException as e:
            self.error = e

    def _read(self, address: str, store: MemoryStore) -> None:
        choose = self._random
        count = choose.randint(1, 6)
        first = choose.randint(0, len(KEYS) - count)
        keys = KEYS[first : first + count]
        targets = [np.zeros(BLOCK, np.uint8) for _ in keys]
        seconds, priority = choose.choice([0.02, 0.5, 2]), choose.choice(list(Priority))
        found = self._messenger.read(address, SPACE, keys, targets, seconds, priority=priority).result(SECONDS)
        assert found == max(0, min(count, KNOWN - first))
        for key, target in zip(keys[:found], targets, strict=False):
            assert np.array_equal(target, store.blocks[key][0])

    def _write(self, address: str, store: MemoryStore) -> None:
        block, seconds = self._random.randrange(len(store.rooms)), self._random.choice([0.02, 0.5, 2])
        write = write_of(block, bytes_of(KEYS[block % len(KEYS)], BLOCK), RUNS)
        self._messenger.write(address, [write], seconds).result(SECONDS)


def test_everything_ends_in_time_and_what_has_arrived_is_right() -> None:
    chaos = random.Random(7)
    before = set(threading.enumerate())
    messenger = TcpMessenger(None, connections_per_peer=2, most_connections=4)
    with contextlib.ExitStack() as stack:
        stack.callback(messenger.close)
        peers = []
        for _ in range(3):
            store = MemoryStore(BLOCK, RUNS)
            store.put(KEYS[:KNOWN])
            server = stack.enter_context(serving(store))
            peers.append((stack.enter_context(proxy(server.address)), store))
        end = time.monotonic() + CHAOS_SECONDS
        callers = [Caller(messenger, peers, seed, end) for seed in range(6)]
        for caller in callers:
            caller.thread.start()
        while time.monotonic() < end:
            time.sleep(chaos.random() * 0.1)
            for between, _ in peers:
                between.cut_some(lambda: chaos.random() < 0.3)
        for caller in callers:
            caller.thread.join(SECONDS)
            assert not caller.thread.is_alive(), "a transfer hangs"
            assert caller.error is None, caller.error
        assert sum(caller.done for caller in callers) > 0
        counters = messenger.counters()
        assert (counters["queued"], counters["queued_bytes"]) == (0, 0)
        assert counters["failures"] == sum(caller.failed for caller in callers)
        assert counters["connections"] <= 4
        for _, store in peers:
            for block, (room, complete) in enumerate(zip(store.rooms, store.complete, strict=True)):
                if len(complete) == RUNS:
                    assert np.array_equal(room, bytes_of(KEYS[block % len(KEYS)], BLOCK))
    until = time.monotonic() + SECONDS
    while set(threading.enumerate()) - before:
        assert time.monotonic() < until, "threads are left"
        time.sleep(0.01)
