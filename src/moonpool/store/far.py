"""A home node that is reached over the network: blocks are copied, and verified where they arrive."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from moonpool.core.vocabulary import BlockKey, BlockMeta, KeySpace, PartId
from moonpool.errors import MoonpoolError, NodeUnreachableError, PoolError, TransferError
from moonpool.messenger import asking
from moonpool.messenger.channel import Channel, greet
from moonpool.messenger.questions import (
    DAMAGED,
    YES,
    Enter,
    Entered,
    GetBlocks,
    Given,
    PutBlocks,
    Question,
    Reply,
    packed,
)
from moonpool.messenger.transfer import Bytes
from moonpool.messenger.waiting import RefusedError
from moonpool.store.buffers import part_of, private_bytes
from moonpool.store.forks import Maker, forget_in_children
from moonpool.store.home import Held, Layers, Wait
from moonpool.store.spread import LANES, Spread
from moonpool.wire.security import data_key

T = TypeVar("T")

CONNECTIONS = 16
"""At most; they come with the work. More than Messenger has to a peer: a call that waits for a writer has one to itself
for as long, and whatever it waits for may be this client's own next call."""
SPREAD_BYTES = 4 << 20
"""What is worth more than one connection."""
GROUP_BYTES = 128 << 20
"""Of a larger transfer so much is moved before it is decided anew over how many connections."""
IDLE_SECONDS = 60.0
"""The node closes a connection that was idle for longer than that."""
RETRY_SECONDS = 0.05
SLACK_SECONDS = 5.0
"""What an answer may come after the time that the node was given for it."""


class FarHome:
    """A `Home`."""

    copies = True

    def __init__(self, address: str, token: str | None, name: str, timeout: float, start_timeout: float) -> None:
        """Raises NodeUnreachableError if no node answers at `address` (`host:port`), where nothing listens after
        `start_timeout` seconds; PoolError if it is one of another cluster token.
        """
        self._address = address
        self._key = data_key(token)
        self._timeout = timeout
        # Entered as a lock and not as a condition, as `calls.Caller` enters its own.
        self._lock = threading.Lock()
        self._free = threading.Condition(self._lock)
        self._idle: list[tuple[float, Channel]] = []
        self._open: set[Channel] = set()
        self._taken: set[object] = set()
        """A token for each call under way: to take one away twice does no harm, wherever an exception comes from."""
        self._closed = False
        self._maker = Maker()
        self._threads = ThreadPoolExecutor(LANES, thread_name_prefix=f"{name} of {address}")
        self.node = PartId(address)
        is_near = self._await_node(time.monotonic() + timeout, time.monotonic() + start_timeout)
        self._puts, self._gets = Spread(is_near), Spread(is_near)
        entered = self.ask(Enter())
        assert isinstance(entered, Entered)
        self.node, self.batch_bytes = entered.node, entered.batch_bytes
        forget_in_children(self)

    def ask(self, question: Question) -> Reply:
        self._maker.check()
        until = time.monotonic() + self._timeout + SLACK_SECONDS
        return self._carry(lambda channel: asking.ask(channel, question, until), until)

    def put(
        self,
        space: KeySpace,
        keys: Sequence[BlockKey],
        sources: Sequence[Sequence[Bytes]],
        metas: Sequence[BlockMeta],
    ) -> list[bool]:
        self._maker.check()
        until = time.monotonic() + self._timeout

        def part(chosen: slice) -> list[bool]:
            def work(channel: Channel) -> bytes:
                request = PutBlocks(space, packed(keys[chosen]), tuple(metas[chosen]), asking.seconds_left(until))
                return asking.put(channel, request, sources[chosen], until + SLACK_SECONDS)

            marks = self._carry(work, until)
            if DAMAGED in marks:
                # Once more; whoever corrupts every transfer is to be looked for, not waited for.
                again = self._carry(work, until)
                marks = bytes(new if old == DAMAGED else old for old, new in zip(marks, again, strict=True))
            if DAMAGED in marks:
                raise PoolError(f"{marks.count(DAMAGED)} blocks did not arrive at {self.node} as they were sent")
            return [mark == YES for mark in marks]

        return self._spread(self._puts, len(keys), space.block_bytes, part)

    def get(self, space: KeySpace, keys: Sequence[BlockKey], layers: Layers, wait: Wait) -> Held:
        nbytes = layers[1] * space.run_bytes
        copies: list[Bytes | None] = [None] * len(keys)

        def target(position: int) -> Sequence[Bytes]:
            copies[position] = copy = private_bytes(nbytes)
            return [copy]

        found = self._get(space, keys, target, layers, wait)
        for copy in copies:
            if copy is not None:
                copy.flags.writeable = False
        return Held([copy if is_there else None for copy, is_there in zip(copies, found, strict=True)])

    def get_into(
        self,
        space: KeySpace,
        keys: Sequence[BlockKey],
        targets: Sequence[Sequence[Bytes]],
        layers: Layers,
        wait: Wait,
    ) -> list[bool]:
        return self._get(space, keys, lambda position: targets[position], layers, wait)

    def forget(self) -> None:
        """Close the connections only: another process goes on using them."""
        for channel in list(self._open):
            channel.close()

    def close(self) -> None:
        """Calls that run fail at once."""
        if self._maker.is_other:
            # What a child may close is closed (`forks`); the locks may be held by threads that it has not got.
            return
        with self._lock:
            self._closed = True
            for channel in self._open:
                channel.shut()
            for _, channel in self._idle:
                self._open.discard(channel)
                channel.close()
            self._idle.clear()
            self._free.notify_all()
        self._threads.shutdown()

    def _get(
        self,
        space: KeySpace,
        keys: Sequence[BlockKey],
        target: Callable[[int], Sequence[Bytes]],
        layers: Layers,
        wait: Wait,
    ) -> list[bool]:
        self._maker.check()
        until = time.monotonic() + wait.seconds
        nbytes = layers[1] * space.run_bytes
        part = partial(self._get_part, space, wait, until)
        spread = partial(self._spread, None if wait.is_for_writers else self._gets)
        if len(keys) == 1 and nbytes >= SPREAD_BYTES:
            # Its layers in parts, unless they turn out to be of two copies.
            pieces = target(0)

            def some(at: slice) -> list[int | None]:
                return part(keys, (layers[0] + at.start, at.stop - at.start), partial(_run_part, pieces, space, at))

            found = set(spread(layers[1], space.run_bytes, some))
            if None in found or len(found) == 1:
                return [None not in found]
            return [copy is not None for copy in part(keys, layers, lambda position: pieces)]

        def several(at: slice) -> list[int | None]:
            return part(keys[at], layers, lambda position: target(at.start + position))

        return [copy is not None for copy in spread(len(keys), nbytes, several)]

    def _get_part(
        self,
        space: KeySpace,
        wait: Wait,
        until: float,
        keys: Sequence[BlockKey],
        layers: Layers,
        target: Callable[[int], Sequence[Bytes]],
    ) -> list[int | None]:
        def place(given: Given) -> list[Sequence[Bytes] | None]:
            return [target(position) for position, mark in enumerate(given.marks) if mark == YES]

        def work(channel: Channel) -> list[int | None]:
            request = GetBlocks(space, packed(keys), *layers, asking.seconds_left(until), wait.is_for_writers)
            return asking.get(channel, request, place, lambda number, sums: None, until + SLACK_SECONDS)

        return self._carry(work, until + SLACK_SECONDS)

    def _spread(self, spread: Spread | None, count: int, nbytes: int, work: Callable[[slice], list[T]]) -> list[T]:
        """`work` on all of so many things of so many bytes each, in parts beside each other where they gain by it.

        None: it waits for others, so that the time it takes tells nothing.
        """
        if spread is None or count == 1 or count * nbytes < SPREAD_BYTES:
            return work(slice(0, count))
        results: list[T] = []
        for group in _parts(slice(0, count), -(-count * nbytes // GROUP_BYTES)):
            lanes = spread.choose()
            began = time.perf_counter()
            found = self._beside([partial(work, part) for part in _parts(group, lanes)])
            took = time.perf_counter() - began
            came = [result for some in found for result in some]
            if not any(result is None or result is False for result in came):
                spread.note(lanes, (group.stop - group.start) * nbytes, took)
            results += came
        return results

    def _beside(self, work: Sequence[Callable[[], T]]) -> list[T]:
        """All of it, the first in this thread; the results in order."""
        later: list[Future[T]] = []
        try:
            try:
                later += [self._threads.submit(each) for each in work[1:]]
            except RuntimeError:
                raise self._was_closed() from None
            return [work[0](), *(future.result() for future in later)]
        finally:
            # Nothing may be written into the caller's buffers any more when this returns.
            _await_all(later)

    def _carry(self, work: Callable[[Channel], T], until: float) -> T:
        """Once more on a new connection where one broke: all that clients ask may be asked twice."""
        is_last = False
        while True:
            token, channel, is_good = object(), None, False
            try:
                channel = self._take(token, until, is_fresh=is_last)
                result = work(channel)
                is_good = True
                return result
            except RefusedError as e:
                is_good = True
                raise PoolError(str(e)) from None
            except TimeoutError:
                raise self._late() from None
            except (OSError, EOFError, TransferError) as e:
                if self._closed:
                    raise self._was_closed() from None
                if is_last or isinstance(e, TransferError):
                    raise PoolError(f"the node at {self._address}: {e or 'it closed the connection'}") from None
                is_last = True
            finally:
                self._give_back(token, channel, is_good)

    def _take(self, token: object, until: float, is_fresh: bool) -> Channel:
        """Needs `_give_back`, whatever it raises."""
        with self._lock:
            while len(self._taken) >= CONNECTIONS and not self._closed:
                if not self._free.wait(until - time.monotonic()):
                    raise PoolError(f"{CONNECTIONS} calls to the node at {self._address} run already")
            if self._closed:
                raise self._was_closed()
            self._taken.add(token)
            stale = [channel for at, channel in self._idle if is_fresh or at < time.monotonic() - IDLE_SECONDS]
            self._idle = [(at, channel) for at, channel in self._idle if channel not in stale]
            found = self._idle.pop()[1] if self._idle else None
            self._open.difference_update(stale)
        for channel in stale:
            channel.close()
        return found or self._connect(until)

    def _await_node(self, until: float, started_by: float) -> bool:
        """One whose process only starts is waited for, as on its own host. Whether it is on this one."""
        while True:
            token, channel = object(), None
            try:
                channel = self._take(token, until, is_fresh=False)
                return channel.is_near
            except NodeUnreachableError as e:
                if not e.is_starting or time.monotonic() >= started_by:
                    raise
            finally:
                self._give_back(token, channel, is_good=True)
            time.sleep(RETRY_SECONDS)

    def _connect(self, until: float) -> Channel:
        channel: Channel | None = None
        is_greeted = False
        try:
            host, _, port = self._address.rpartition(":")
            seconds = min(self._timeout, max(0.01, until - time.monotonic()))
            channel = Channel(socket.create_connection((host.strip("[]"), int(port)), seconds))
            greet(channel, self._key, time.monotonic() + seconds)
            is_greeted = True
        except (OSError, ValueError, MoonpoolError) as e:
            if isinstance(e, TimeoutError):
                raise NodeUnreachableError(str(self._late())) from None
            if isinstance(e, ConnectionRefusedError):
                message = f"no node at {self._address}: nothing listens there; start it, or see its log for its address"
                raise NodeUnreachableError(message, is_starting=True) from None
            kind = NodeUnreachableError if isinstance(e, OSError) else PoolError
            raise kind(f"no node at {self._address}: {e}") from None
        finally:
            if channel is not None and not is_greeted:
                channel.close()
        with self._lock:
            self._open.add(channel)
        return channel

    def _was_closed(self) -> PoolError:
        return PoolError(f"this client of the node at {self._address} was closed")

    def _late(self) -> PoolError:
        return PoolError(
            f"the node at {self._address} did not answer in time: it is stopped, overloaded or cut off, or this is no "
            "node's data address"
        )

    def _give_back(self, token: object, channel: Channel | None, is_good: bool) -> None:
        with self._lock:
            self._taken.discard(token)
            self._free.notify()
            if channel is None:
                return
            is_kept = is_good and not self._closed
            if is_kept:
                self._idle.append((time.monotonic(), channel))
            else:
                self._open.discard(channel)
        if not is_kept:
            channel.close()


def _parts(whole: slice, parts: int) -> list[slice]:
    """As many as there are things for, of about one size."""
    count = whole.stop - whole.start
    parts = min(parts, count)
    return [slice(whole.start + count * at // parts, whole.start + count * (at + 1) // parts) for at in range(parts)]


def _run_part(pieces: Sequence[Bytes], space: KeySpace, runs: slice, position: int) -> list[Bytes]:
    return part_of(pieces, runs.start * space.run_bytes, runs.stop * space.run_bytes)


def _await_all(futures: Sequence[Future[T]]) -> None:
    for future in futures:
        if not future.cancel():
            future.exception()
