"""Messenger's listening side over tcp: a thread a connection, straight between socket and arena."""

from __future__ import annotations

import errno
import logging
import socket
import threading
import time
from collections import Counter
from typing import get_args

from moonpool.errors import ConfigError, PoolError, TransferError
from moonpool.messenger import giving
from moonpool.messenger.channel import (
    SPIN_SECONDS,
    Arriving,
    Blocks,
    Channel,
    Done,
    Header,
    Read,
    UnreadableError,
    Write,
    admit,
)
from moonpool.messenger.pace import moving
from moonpool.messenger.questions import GetBlocks, PutBlocks, Question, Refused
from moonpool.messenger.transfer import Landing, Store
from moonpool.wire.security import check_token, data_key

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 512
"""Beyond them the one that nothing was asked on for the longest time makes way, if that is REST_SECONDS."""
REST_SECONDS = 0.1
IDLE_SECONDS = 120.0
"""Longer than the connecting side keeps an idle connection, so that it is the one to close it."""
FRAME_SECONDS = 5.0
"""From a header's first byte to its last."""
BUSY_SECONDS = 300e-6
"""Who has asked again this soon probably does so once more: that is worth looking for before sleeping."""
LONGEST_SECONDS = 3600.0
CLOSE_SECONDS = 5.0
_FOLLOWED_BY_NOTHING = frozenset(kind.__name__ for kind in (GetBlocks, *get_args(Question)))
"""So that one which cannot be read is refused, and the next can be."""


class TcpServer:
    """Serves a node's store to other nodes and their workers. Threads start at once, `close` ends them."""

    def __init__(self, host: str, port: int, token: str | None, store: Store) -> None:
        """Port 0 takes a free one. Raises ConfigError if the address cannot be listened on."""
        check_token(token, host)
        self._key = data_key(token)
        self._store = store
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._open: dict[Channel, threading.Thread] = {}
        self._resting: dict[Channel, float] = {}
        """Those that nothing is asked on, and since when, the longest first; who is not let in yet is among them."""
        self._closed = False
        family = socket.AF_INET6 if ":" in host.strip("[]") else socket.AF_INET
        try:
            self._listener = socket.create_server((host.strip("[]"), port), family=family, backlog=128)
        except OSError as e:
            option = "--data-port" if e.errno == errno.EADDRINUSE else "--bind, an address of this host"
            raise ConfigError(
                f"cannot listen for data on {host}:{port}: {e.strerror}; choose another {option}"
            ) from None
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        self._acceptor = threading.Thread(target=self._accept, name="messenger accept", daemon=True)
        self._acceptor.start()

    def counters(self) -> dict[str, float]:
        """Since the start: payload bytes in and out, transfers of each kind, what went wrong."""
        moved = ("bytes_in", "bytes_out", "writes", "reads", "puts", "gets")
        names = (*moved, "checksum_failures", "refused_connections", "evicted_connections")
        with self._lock:
            return {name: float(self._counts[name]) for name in names}

    def close(self) -> None:
        with self._lock:
            self._closed = True
            running = dict(self._open)
        self._listener.shutdown(socket.SHUT_RDWR)
        for channel in running:
            channel.shut()
        until = time.monotonic() + CLOSE_SECONDS
        for thread in (self._acceptor, *running.values()):
            thread.join(max(0.0, until - time.monotonic()))
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, peer = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                # Out of descriptors, or a peer that went away before it was accepted.
                log.exception("data connection not accepted")
                time.sleep(0.1)
                continue
            name = f"{peer[0]}:{peer[1]}"
            try:
                self._begin(sock, name)
            except (OSError, RuntimeError) as e:
                # It has gone already, or there are no more threads to be had.
                sock.close()
                log.warning("data connection from %s refused: %s", name, e)

    def _begin(self, sock: socket.socket, name: str) -> None:
        """Serve a connection. Raises OSError or RuntimeError where that cannot be."""
        with self._lock:
            if self._closed or (len(self._open) >= MAX_CONNECTIONS and not self._make_way()):
                raise RuntimeError(f"{len(self._open)} are open")
            channel = Channel(sock)
            thread = threading.Thread(target=self._serve, args=(channel, name), name=f"data {name}", daemon=True)
            self._open[channel] = thread
            self._resting[channel] = time.monotonic()
            try:
                thread.start()
            except RuntimeError:
                del self._open[channel], self._resting[channel]
                raise

    def _make_way(self) -> bool:
        """Close the connection that has rested longest, if that is long. The lock is held."""
        channel = next(iter(self._resting), None)
        if channel is None or time.monotonic() - self._resting[channel] < REST_SECONDS:
            return False
        # Its thread ends by itself; whoever has the other end connects anew when he needs it.
        del self._resting[channel], self._open[channel]
        self._counts["evicted_connections"] += 1
        channel.shut()
        return True

    def _serve(self, channel: Channel, peer: str) -> None:
        is_admitted = False
        try:
            admit(channel, self._key)
            self._rest(channel)
            is_admitted = True
            is_busy = False
            while True:
                is_busy = self._answer(channel, is_busy) < BUSY_SECONDS
        except EOFError:
            log.debug("data connection from %s ended", peer)
        except (OSError, TransferError, PoolError) as e:
            if not is_admitted:
                self._count("refused_connections", 1)
            if not self._closed:
                log.warning("data connection from %s closed: %s", peer, e)
        except Exception:
            log.exception("data connection from %s closed", peer)
        finally:
            channel.close()
            with self._lock:
                self._open.pop(channel, None)
                self._resting.pop(channel, None)

    def _rest(self, channel: Channel) -> None:
        with self._lock:
            self._resting.pop(channel, None)
            if channel in self._open:
                self._resting[channel] = time.monotonic()

    def _answer(self, channel: Channel, is_busy: bool) -> float:
        """Seconds for which nothing was asked."""
        idle_since = time.monotonic()
        try:
            header: Header | UnreadableError = channel.receive_header(
                idle_since + IDLE_SECONDS, FRAME_SECONDS, SPIN_SECONDS if is_busy else 0.0
            )
        except TimeoutError:
            if time.monotonic() >= idle_since + IDLE_SECONDS:
                # Whoever has the other end connects anew when he needs it.
                raise EOFError from None
            raise TransferError("half a frame, and no more of it in time") from None
        except UnreadableError as e:
            if e.kind not in _FOLLOWED_BY_NOTHING:
                raise
            header = e
        idle = time.monotonic() - idle_since
        with self._lock:
            self._resting.pop(channel, None)
        self._do(channel, header)
        self._rest(channel)
        return idle

    def _do(self, channel: Channel, header: Header | UnreadableError) -> None:
        match header:
            case UnreadableError():
                log.warning("a %s refused: %s", header.kind, header)
                channel.send_header(Refused(str(header)), time.monotonic() + giving.ANSWER_SECONDS)
            case Write():
                self._receive(channel, header)
            case Read():
                self._send(channel, header)
            case GetBlocks():
                giving.give(channel, self._store, header, self._count)
            case PutBlocks():
                giving.take(channel, self._store, header, self._count)
            case _ if isinstance(header, Question):
                giving.answer(channel, self._store, header)
            case _:
                raise TransferError(f"{type(header).__name__} is no request")

    def _receive(self, channel: Channel, header: Write) -> None:
        until = time.monotonic() + min(header.time_left, LONGEST_SECONDS)
        failure = ""
        for item in header.writes:
            failure = self._receive_one(channel, item, until) or failure
        self._count("writes", 1)
        channel.send_header(Done(failure), until)

    def _receive_one(self, channel: Channel, item: Arriving, until: float) -> str:
        """Why the runs are not in their room; empty if they are."""
        if len(item.checksums) != item.runs:
            raise TransferError(f"{item.runs} runs with {len(item.checksums)} checksums")
        landing = self._store.land(
            item.request, item.attempt, item.block, item.first_run, item.runs, item.nbytes, until
        )
        if isinstance(landing, str):
            with moving(item.nbytes, until) as limit:
                channel.skip(item.nbytes, limit)
            return landing
        try:
            with moving(item.nbytes, until) as limit:
                return self._fill(channel, landing, item, limit)
        finally:
            landing.close()

    def _fill(self, channel: Channel, landing: Landing, item: Arriving, until: float) -> str:
        failure = ""
        for position, (target, expected) in enumerate(zip(landing.slices, item.checksums, strict=True)):
            if target is None:
                channel.skip(landing.run_bytes, until)
                continue
            if channel.receive_hashed(target, until) == expected:
                landing.landed(position, expected)
            else:
                self._count("checksum_failures", 1)
                failure = (
                    f"run {item.first_run + position} of block {item.block} of {item.request} "
                    f"attempt {item.attempt} arrived with a wrong checksum"
                )
                log.warning("%s", failure)
        self._count("bytes_in", item.nbytes)
        return failure

    def _send(self, channel: Channel, header: Read) -> None:
        until = time.monotonic() + min(header.time_left, LONGEST_SECONDS)
        departure = self._store.depart(header.space, header.keys)
        try:
            blocks = departure.blocks
            block_bytes = blocks[0].nbytes if blocks else 0
            end = header.first_byte + header.nbytes if header.nbytes else block_bytes
            parts = [block[header.first_byte : end] for block in blocks]
            answer = Blocks(len(blocks), block_bytes, tuple(departure.checksums))
            channel.send_header(answer, until, more=bool(parts))
            channel.send_all(parts, until)
            self._count("bytes_out", sum(part.nbytes for part in parts))
        finally:
            departure.close()
        self._count("reads", 1)

    def _count(self, name: str, amount: int) -> None:
        with self._lock:
            self._counts[name] += amount
