"""The half in vLLM's worker: blocks from the pool into vLLM's KVCache, and back as layers are computed.

vLLM's own thread only hands jobs over, but for `end_step`: it waits until this step's blocks have been read, at most
`save_seconds`. Loads are done by one thread, stores by another.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as LateError
from functools import partial
from typing import TypeVar

from moonpool.connectors.counters import Counters
from moonpool.connectors.link import NodeLink
from moonpool.connectors.pages import Pages
from moonpool.connectors.plan import Load, Save, StepPlan
from moonpool.connectors.settings import ConnectorSettings
from moonpool.core.vocabulary import RequestId
from moonpool.errors import PoolError
from moonpool.messenger.transfer import checksum
from moonpool.store.client import NodeClient
from moonpool.store.copying import copy
from moonpool.store.views import Room

T = TypeVar("T")

LEASE_BYTES = 64 << 20
"""Of the pool's memory, the most that a load holds at a time, if that is more than one block."""
JOIN_PAUSE_SECONDS = 0.001


class _Storing:
    """What is stored of one step."""

    def __init__(self, client: NodeClient, saves: Sequence[Save]) -> None:
        self.client = client
        self.saves = saves
        self.rooms: list[tuple[Save, Room]] = []
        self.lock = threading.Lock()
        self.is_given_up = False
        """vLLM may be writing into the blocks again: what is read of them now is nothing."""


class WorkerHalf:
    """The methods without an underscore are called on vLLM's thread."""

    def __init__(self, settings: ConnectorSettings, link: NodeLink, counters: Counters, rank: int, ranks: int) -> None:
        """`rank` of `ranks`: tensor parallel, each of which fills its runs of every block."""
        self.pages: Pages | None = None
        self._settings = settings
        self._link = link
        self._counters = counters
        self._rank = rank
        self._ranks = ranks
        self._lock = threading.Lock()
        self._arrived: set[str] = set()
        self._invalid: set[int] = set()
        self._plan = StepPlan()
        self._storing: _Storing | None = None
        self._last: Future[None] | None = None
        """Of the step before, on the storing thread."""
        self._loader = ThreadPoolExecutor(1, "pool load")
        self._storer = ThreadPoolExecutor(1, "pool store")

    def begin_step(self, plan: StepPlan) -> None:
        self._plan = plan
        self._storing = None
        if not plan.saves:
            return
        client = self._link.client
        if self.pages is None or client is None or (self._last is not None and not self._last.done()):
            self._counters.add("dropped_blocks", sum(save.fresh for save in plan.saves))
            return
        self._storing = _Storing(client, plan.saves)
        self._later(self._open, self._storing)

    def start_loads(self) -> None:
        until = time.monotonic() + self._settings.load_seconds
        loads, self._plan = self._plan.loads, StepPlan(saves=self._plan.saves)
        for load in loads:
            self._loader.submit(self._load, load, until)

    def layer_done(self, name: str) -> None:
        """The step has computed this layer."""
        if self._storing is not None and self.pages is not None:
            layer = self.pages.number(name)
            if layer is not None:
                self._later(partial(self._store_layer, layer=layer), self._storing)

    def end_step(self) -> None:
        storing, self._storing = self._storing, None
        if storing is None:
            return
        began = time.monotonic()
        self._last = self._later(self._close, storing)
        try:
            self._last.result(self._settings.save_seconds)
        except LateError:
            with storing.lock:
                storing.is_given_up = True
            self._counters.say("save", f"blocks not stored within {self._settings.save_seconds:g} s are given up")
        self._counters.add("save_wait_seconds", time.monotonic() - began)

    def take_arrived(self) -> set[str]:
        """Requests whose loads are over, however they ended."""
        with self._lock:
            arrived, self._arrived = self._arrived, set()
            return arrived

    def take_invalid(self) -> set[int]:
        """Blocks that did not come."""
        with self._lock:
            invalid, self._invalid = self._invalid, set()
            return invalid

    def close(self) -> None:
        self._loader.shutdown(cancel_futures=True)
        self._storer.shutdown(cancel_futures=True)

    # On the loading thread

    def _load(self, load: Load, until: float) -> None:
        """Whatever happens, vLLM hears that it is over, and nothing is written into its blocks afterwards."""
        began, lacking = time.monotonic(), set(load.blocks)
        try:
            self._bring(load, until, lacking.discard)
        except (PoolError, LateError) as e:
            self._counters.say("load", f"blocks did not come from the pool, and are computed: {e or 'too late'}")
        except Exception:
            self._counters.add("faults")
            self._counters.say("load fault", "a load failed; its blocks are computed", is_fault=True)
        with self._lock:
            self._invalid |= lacking
            self._arrived.add(load.request)
        self._counters.add("load_seconds", time.monotonic() - began)
        self._counters.add("loaded_blocks", len(load.blocks) - len(lacking))
        self._counters.add("failed_blocks", len(lacking))

    def _bring(self, load: Load, until: float, on_block: Callable[[int], None]) -> None:
        client, pages = self._link.client, self.pages
        if client is None or pages is None:
            raise PoolError("the node is away")
        step = max(1, LEASE_BYTES // load.space.block_bytes)
        first_run = self._rank * len(pages)
        for start in range(0, len(load.keys), step):
            part = slice(start, start + step)
            with _in_time(client.lease_each(load.space, load.keys[part], until - time.monotonic()), until) as found:
                for view, block in zip(found.views, load.blocks[part], strict=True):
                    if view is None:
                        raise PoolError("a block left the pool, or did not come from where it is, in time")
                    if time.monotonic() > until:
                        raise LateError
                    for layer in range(len(pages)):
                        at = (first_run + layer) * pages.run_bytes
                        copy(pages.run(layer, block), view[at : at + pages.run_bytes])
                    on_block(block)

    # On the storing thread

    def _later(self, job: Callable[[_Storing], None], storing: _Storing) -> Future[None]:
        def run() -> None:
            try:
                job(storing)
            except Exception:
                storing.is_given_up = True
                self._counters.add("faults")
                self._counters.say("store fault", "storing blocks failed; vLLM goes on without", is_fault=True)

        return self._storer.submit(run)

    def _open(self, storing: _Storing) -> None:
        until = time.monotonic() + self._settings.save_seconds
        for save in storing.saves:
            try:
                room = self._room(storing.client, save, until)
                storing.rooms.append((save, room))
                if self._rank == 0:
                    storing.client.tell_tokens(room, save.tokens)
            except (PoolError, LateError) as e:
                self._counters.add("dropped_blocks", save.fresh)
                self._counters.say("room", f"blocks are not stored: {e or 'the node does not answer in time'}")

    def _room(self, client: NodeClient, save: Save, until: float) -> Room:
        """As many of its blocks as the node lacks and has space for."""
        if self._ranks == 1:
            return _in_time(client.open_room(save.space, save.keys), until)
        name = RequestId(f"{self._settings.name}/{save.request}")
        if self._rank == 0:
            return _in_time(client.open_room(save.space, save.keys, name=(name, save.step)), until)
        while True:
            try:
                return _in_time(client.join_room(name, save.step), until)
            except PoolError:
                # The first rank may be a moment behind.
                if client.is_gone or time.monotonic() > until:
                    raise
                time.sleep(JOIN_PAUSE_SECONDS)

    def _store_layer(self, storing: _Storing, layer: int) -> None:
        pages = self.pages
        assert pages is not None
        run = self._rank * len(pages) + layer
        for save, room in storing.rooms:
            written, sums = [], []
            for index, block in enumerate(save.blocks):
                view = None if storing.is_given_up else room.run(index, run)
                if view is not None:
                    copy(view, pages.run(layer, block))
                    written.append((index, run, 1))
                    sums.append(checksum(view))
            with storing.lock:
                # What was read while vLLM still waited is what the step has computed.
                if storing.is_given_up:
                    return
                try:
                    storing.client.complete(room, written, sums)
                except PoolError:
                    storing.is_given_up = True

    def _close(self, storing: _Storing) -> None:
        for save, room in storing.rooms:
            new = sum(room.view(index) is not None for index in range(len(save.keys)))
            is_lost = storing.is_given_up or room.ended
            self._counters.add("dropped_blocks" if is_lost else "saved_blocks", new)
            room.close()


def _in_time(future: Future[T], until: float) -> T:
    """Raises LateError; what still comes then is closed by the client. Raises PoolError."""
    try:
        return future.result(max(0.0, until - time.monotonic()))
    except LateError:
        if future.cancel():
            raise
        # It came in this moment.
        return future.result(1.0)
