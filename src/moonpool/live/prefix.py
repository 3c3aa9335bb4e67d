"""A prompt's cached prefix on its way into the engine's pages, layer after layer, while others or it are computed.

One thread of the worker copies for all prompts, a layer of one at a time, as soon as the node has it. The engine's
thread asks before it attends (`has`). What does not come is given up (`cut`), and computed.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from typing import Protocol

from moonpool.core.arrival import may_begin
from moonpool.engine.engine import Bytes, Engine
from moonpool.store.copying import copy

log = logging.getLogger(__name__)


class Coming(Protocol):
    """Blocks that come layer by layer: `store.views.Stream`."""

    @property
    def views(self) -> Sequence[Bytes]: ...

    @property
    def runs(self) -> int: ...

    @property
    def whole(self) -> int: ...

    @property
    def is_over(self) -> bool: ...

    def tell(self, on_change: Callable[[], None]) -> None: ...

    def close(self) -> None: ...


class Prefix:
    """Made on the event loop, where everything but `has` is called."""

    def __init__(
        self,
        engine: Engine,
        thread: Executor,
        coming: Coming,
        pages: Sequence[int],
        on_layer: Callable[[int, int], None],
    ) -> None:
        """`thread`: one that copies. It calls `on_layer(layer, blocks)` when that layer of the prefix is in the pages.

        Closes `coming` when all of it is there, or is given up.
        """
        self.blocks = len(coming.views)
        """So many, or fewer once some are given up."""
        self._engine = engine
        self._thread = thread
        self._coming = coming
        self._pages = pages
        self._on_layer = on_layer
        self._layers = engine.layers
        self._next = self._layers.start
        """The layer to be copied next."""
        self._is_copying = False
        self._is_broken = False
        """Copying failed: the pages hold anything."""
        self._is_over = not self.blocks
        self._began = time.monotonic()
        self._changed = threading.Condition()
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        if self._is_over:
            coming.close()
        else:
            coming.tell(self._go_on)

    @property
    def is_complete(self) -> bool:
        """All layers are in the pages, of as many blocks as there are (still)."""
        return not self.blocks or self._next == self._layers.stop

    def has(self, layer: int, until: float) -> bool:
        """Whether this layer is in the pages, before `until` (monotonic). On the engine's thread."""
        if self._next > layer or not self.blocks:
            return True
        with self._changed:
            self._changed.wait_for(lambda: self._next > layer or self._is_over, max(0.0, until - time.monotonic()))
            return self._next > layer

    async def enough(self, compute_seconds: float, until: float) -> bool:
        """Wait until computing may begin, which takes so many seconds a chunk; False if that is not before `until`.

        So it is where what is lacking will not come.
        """
        while True:
            self._news.clear()
            there, seconds = self._next - self._layers.start, time.monotonic() - self._began
            if not self.blocks or may_begin(there, len(self._layers), seconds, compute_seconds):
                return True
            if self._is_hopeless() or not await self._news_before(until):
                return False

    async def complete(self, until: float) -> bool:
        """Wait until all of it is there; False if that is not before `until`."""
        while True:
            self._news.clear()
            if self.is_complete:
                return True
            if self._is_hopeless() or not await self._news_before(until):
                return False

    async def cut(self) -> None:
        """Give up all but the blocks that are whole now. Afterwards nothing writes into the pages of the others."""
        with self._changed:
            if not self.is_complete:
                self.blocks = 0 if self._is_broken else min(self.blocks, self._coming.whole)
        self._go_on()
        while True:
            self._news.clear()
            with self._changed:
                if self._is_over:
                    return
            await self._news.wait()

    async def stop(self) -> None:
        """Nobody wants it any more. Afterwards nothing writes into the pages."""
        with self._changed:
            if not self.is_complete:
                self.blocks = 0
        await self.cut()

    def _is_hopeless(self) -> bool:
        """What is lacking will not come, but for what the thread is about to copy."""
        return self._is_broken or (self._coming.is_over and self.blocks > self._coming.whole)

    async def _news_before(self, until: float) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, until - time.monotonic())):
                await self._news.wait()
                return True
        return False

    def _go_on(self) -> None:
        """On any thread: copy what is there by now, or end it."""
        copies = False
        with self._changed:
            if self._is_copying or self._is_over:
                return
            if self.is_complete:
                self._is_over = True
            elif self._next < self._available():
                self._is_copying = copies = True
            is_over = self._is_over
        if copies:
            try:
                self._thread.submit(self._copy_layer)
            except RuntimeError:  # the worker is being ended, and its copying thread is already
                log.debug("the rest of a prefix is not copied any more")
        elif is_over:
            self._coming.close()
        self._tell()

    def _available(self) -> int:
        """Layers of the blocks that are still wanted."""
        coming = self._coming
        if self._is_broken:
            return self._next
        return self._layers.stop if self.blocks <= coming.whole else min(coming.runs, self._layers.stop)

    def _copy_layer(self) -> None:
        """On the copying thread."""
        layer, blocks = self._next, self.blocks
        size = self._engine.space.run_bytes
        start = layer * size
        try:
            for view, page in zip(self._coming.views[:blocks], self._pages, strict=False):
                copy(self._engine.run(layer, page), view[start : start + size])
            if blocks:
                self._on_layer(layer, blocks)
        except Exception:
            log.exception("layer %d of a prefix could not be copied", layer)
            self._is_broken = True
        with self._changed:
            self._next += not self._is_broken
            self._is_copying = False
        self._go_on()

    def _tell(self) -> None:
        with self._changed:
            self._changed.notify_all()
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(self._news.set)
