"""Messenger's connecting side over tcp: write into rooms of other nodes, read blocks from them.

The transport on one host is the arena itself (`store.client`): a write there is a copy into a view. The two have no
interface in common beyond the bytes they move, so there is no transport Protocol; one contract suite tests both.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

from moonpool.core.vocabulary import BlockKey, KeySpaceId
from moonpool.errors import TransferError
from moonpool.messenger.asking import tell_damaged
from moonpool.messenger.calling import Calling
from moonpool.messenger.channel import Channel
from moonpool.messenger.connections import Connections
from moonpool.messenger.lanes import Lanes
from moonpool.messenger.receiving import OnBlock, ReadGroup, Reading
from moonpool.messenger.sending import pieces_to_send
from moonpool.messenger.transfer import Bytes, RoomWrite
from moonpool.messenger.waiting import Priority, Transfer
from moonpool.wire.security import data_key

__all__ = ["Priority", "TcpMessenger"]

T = TypeVar("T")

SPLIT_BYTES = 2 << 20
"""Transfers of at least this size use all connections to the peer."""
PIECE_BYTES = 4 << 20
"""Of an urgent transfer: at most about this much goes over one connection before others may."""
BACKGROUND_BYTES = 1 << 20
"""Of a background one: an urgent transfer waits for at most one of these (why: see `lanes`)."""
MAX_CONNECTIONS = 64
"""To all peers together."""
LONGEST_SECONDS = 3600.0
TELL_SECONDS = 5.0
"""To tell a peer that a block of it is damaged."""
_COUNTERS = (
    "bytes_sent",
    "bytes_received",
    "transfers",
    "failures",
    "checksum_failures",
    "refused_transfers",
    "resubmissions",
)


class TcpMessenger:
    """Moves bytes to and from other nodes, on threads of its own; one per process.

    Every transfer is over, one way or the other, when its future is: from then on nothing reads or writes its buffers.
    Futures fail with TransferError. No call blocks: what a peer's queue has no room for is refused.
    """

    def __init__(
        self, token: str | None, connections_per_peer: int = 2, most_connections: int = MAX_CONNECTIONS
    ) -> None:
        self.connections_per_peer = connections_per_peer
        self._key = data_key(token)
        self._connections = Connections(most_connections)
        self._lock = self._connections.lock
        self._peers: dict[str, Lanes] = {}
        self._counting = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._closed = False

    def write(
        self,
        address: str,
        writes: Sequence[RoomWrite],
        time_left: float,
        priority: Priority = Priority.URGENT,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> Future[None]:
        """Put runs into rooms of the node at `address` (`host:port`); done when the node has verified all of them.

        `is_wanted` is asked often, from any thread: False ends the write, whatever of it the node has by then.
        """
        return self._submit(address, self._writing(writes, time_left, priority, is_wanted))

    def read(
        self,
        address: str,
        space: KeySpaceId,
        keys: Sequence[BlockKey],
        destinations: Sequence[Bytes],
        time_left: float,
        on_block: OnBlock | None = None,
        layers: tuple[int, int] | None = None,
        priority: Priority = Priority.URGENT,
        group: ReadGroup | None = None,
    ) -> Future[int]:
        """Get blocks from the node at `address`: the number of leading keys that were read whole and verified.

        `layers`: first run and number of runs, where only a part of each block is wanted; destinations are as large.
        `on_block(index, checksums of its runs)` is called on a Messenger thread for each block that is complete, in
        any order; blocks of a transfer that fails later have been read all the same. `group`: what this read has in
        common with others.
        """
        reading = self._reading(space, keys, destinations, time_left, on_block, layers, group)
        most = self._piece_bytes(sum(destination.nbytes for destination in destinations), priority)
        transfer = Transfer(reading.pieces(most), reading.until, priority, reading.leading)
        # When it is over its peer has let go of these blocks, or is about to.
        transfer.future.add_done_callback(lambda _: self._tell_damaged(address, reading))
        return self._submit(address, transfer)

    def carry(
        self,
        address: str,
        work: Callable[[Channel], T],
        time_left: float,
        nbytes: int = 0,
        priority: Priority = Priority.URGENT,
    ) -> Future[T]:
        """Do `work` over a connection that nothing else is under way on; again, on a new one, where it breaks.

        `work` keeps within `time_left` by itself. After a RefusedError the connection is used again, after any other
        error it is closed.
        """
        return self._submit(address, self._calling(work, time_left, nbytes, priority))

    def counters(self) -> dict[str, float]:
        """Since the start: bytes_sent, bytes_received, transfers, failures, checksum_failures, refused_transfers (by
        a full queue), resubmissions (pieces that went on over another connection), evicted_endpoints. Now: queued and
        queued_bytes (what waits for a connection), connections, endpoints.
        """
        with self._counting:
            counts = {name: float(self._counts[name]) for name in _COUNTERS}
        with self._lock:
            queues = [lanes.waiting for lanes in self._peers.values()]
            return counts | {
                "evicted_endpoints": float(self._connections.evicted),
                "connections": float(self._connections.count),
                "endpoints": float(len(self._peers)),
                "queued": float(sum(map(len, queues))),
                "queued_bytes": float(sum(queue.nbytes for queue in queues)),
            }

    def close(self) -> None:
        """Running and queued transfers fail at once; no thread and no connection is left."""
        with self._lock:
            self._closed = True
            peers = list(self._peers.values())
        for lanes in peers:
            lanes.close()

    # ---- what is to be moved

    def _writing(
        self, writes: Sequence[RoomWrite], time_left: float, priority: Priority, is_wanted: Callable[[], bool]
    ) -> Transfer[None]:
        until = _until(time_left)
        for item in writes:
            if len(item.checksums) != item.runs:
                raise ValueError(f"{item.runs} runs with {len(item.checksums)} checksums")
        most = self._piece_bytes(sum(item.nbytes for item in writes), priority)
        return Transfer(pieces_to_send(writes, most, until, self._count, is_wanted), until, priority, lambda: None)

    def _reading(
        self,
        space: KeySpaceId,
        keys: Sequence[BlockKey],
        destinations: Sequence[Bytes],
        time_left: float,
        on_block: OnBlock | None,
        layers: tuple[int, int] | None,
        group: ReadGroup | None,
    ) -> Reading:
        if len(keys) != len(destinations):
            raise ValueError(f"{len(keys)} keys with {len(destinations)} destinations")
        if layers is not None and (layers[1] < 1 or any(target.nbytes % layers[1] for target in destinations)):
            raise ValueError(f"{layers[1]} runs do not fill their destinations")
        until = _until(time_left)
        return Reading(space, keys, destinations, layers, group, until, on_block, self._count)

    def _tell_damaged(self, address: str, reading: Reading) -> None:
        """So that the peer looks at them, and others are spared them. What becomes of that changes nothing here."""
        if not reading.damaged:
            return
        until = _until(TELL_SECONDS)
        keys = [reading.keys[index] for index in sorted(reading.damaged)]
        self.carry(
            address,
            lambda channel: tell_damaged(channel, reading.space, keys, until),
            TELL_SECONDS,
            priority=Priority.BACKGROUND,
        )

    def _calling(self, work: Callable[[Channel], T], time_left: float, nbytes: int, priority: Priority) -> Transfer[T]:
        calling = Calling(work, nbytes)
        return Transfer([calling], _until(time_left), priority, calling.result)

    def _piece_bytes(self, total: int, priority: Priority) -> int:
        """So that every connection has a part of a large transfer, and nobody waits long for a connection."""
        if priority is Priority.BACKGROUND:
            return BACKGROUND_BYTES
        lanes = self.connections_per_peer if total >= SPLIT_BYTES else 1
        return max(1, min(PIECE_BYTES, -(-total // lanes)))

    # ---- and how

    def _submit(self, address: str, transfer: Transfer[T]) -> Future[T]:
        self._count("transfers", 1)
        transfer.future.add_done_callback(self._note)
        is_over = not transfer.pieces
        with self._lock:
            try:
                self._lanes(address).submit(transfer)
            except TransferError as e:
                transfer.error = e
                is_over = True
        if is_over:
            transfer.settle()
        return transfer.future

    def _lanes(self, address: str) -> Lanes:
        """The lock is held."""
        lanes = self._peers.get(address)
        if lanes is None:
            lanes = Lanes(address, self._key, self.connections_per_peer, self._connections, self._forget, self._count)
            self._peers[address] = lanes
            if self._closed:
                lanes.close()
        return lanes

    def _forget(self, lanes: Lanes) -> None:
        """The lock is held."""
        if self._peers.get(lanes.address) is lanes:
            del self._peers[lanes.address]

    def _note(self, future: Future[T]) -> None:
        if future.exception() is not None:
            self._count("failures", 1)

    def _count(self, name: str, amount: int) -> None:
        with self._counting:
            self._counts[name] += amount


def _until(time_left: float) -> float:
    return time.monotonic() + min(time_left, LONGEST_SECONDS)
