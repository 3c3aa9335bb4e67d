"""One process's control sockets: an inbox that peers push into, and a socket a peer to push out of."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import secrets
from collections import OrderedDict

import msgspec
import zmq
import zmq.asyncio

from moonpool.core.vocabulary import Incarnation, PartId, Peer
from moonpool.errors import ConfigError, PeerUnavailableError
from moonpool.wire import codec
from moonpool.wire.messages import Envelope, Message
from moonpool.wire.security import check_token, secure_client, secure_server

log = logging.getLogger(__name__)

SEND_SECONDS = 1.0
HIGH_WATER_MESSAGES = 10_000
MAX_PEERS = 1024


class Link:
    """Sends to and receives from other parts of the cluster; see docs/protocol.md for the rules.

    Must be opened inside a running event loop. `post` keeps the order of messages to one peer.
    """

    def __init__(self, part: PartId, host: str, port: int, token: str | None) -> None:
        check_token(token, host)
        self._token = token
        self._context = zmq.asyncio.Context()
        self._inbox = self._context.socket(zmq.PULL)
        self._peers: OrderedDict[str, _Outbox] = OrderedDict()
        self.dropped = 0
        """Messages received for another incarnation, or not readable."""
        self._inbox.setsockopt(zmq.LINGER, 0)
        self._inbox.setsockopt(zmq.MAXMSGSIZE, codec.MAX_MESSAGE_BYTES)
        self._inbox.setsockopt(zmq.RCVHWM, HIGH_WATER_MESSAGES)
        secure_server(self._inbox, token)
        try:
            self._inbox.bind(f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError as e:
            self._context.destroy(linger=0)
            why = os.strerror(e.errno) if e.errno else str(e)
            option = "--control-port" if e.errno == errno.EADDRINUSE else "--bind, an address of this host"
            raise ConfigError(
                f"cannot listen for control messages on {host}:{port}: {why}; choose another {option}"
            ) from None
        address = self._inbox.getsockopt_string(zmq.LAST_ENDPOINT)
        self.me = Peer(part, Incarnation(secrets.token_hex(8)), address)

    async def send(self, to: Peer, body: Message) -> None:
        """Hand a message to the peer's connection. Raises PeerUnavailableError, after SEND_SECONDS at the latest."""
        data = self._encode(to, body)
        await self._outbox(to.address).put(data)

    def post(self, to: Peer, body: Message) -> None:
        """Send in the background; a peer that cannot be reached is logged: for messages whose loss is an answer."""
        name = type(body).__name__
        try:
            data = self._encode(to, body)
            self._outbox(to.address).put_later(data, name)
        except PeerUnavailableError as e:
            log.warning("%s not delivered: %s", name, e)

    async def receive(self) -> Envelope:
        while True:
            data = await self._inbox.recv()
            try:
                envelope = codec.decode(data)
            except msgspec.MsgspecError as e:
                self.dropped += 1
                log.warning("dropped an unreadable message of %d bytes: %s", len(data), e)
                continue
            if envelope.to and envelope.to != self.me.incarnation:
                self.dropped += 1
                continue
            return envelope

    def close(self) -> None:
        for outbox in self._peers.values():
            outbox.close()
        self._peers.clear()
        self._inbox.close(linger=0)
        self._context.destroy(linger=0)

    def _encode(self, to: Peer, body: Message) -> bytes:
        try:
            return codec.encode(Envelope(self.me, to.incarnation, body))
        except (OverflowError, ValueError, msgspec.MsgspecError) as e:
            # What one peer said may be in what another is to hear: it must not end this process.
            raise PeerUnavailableError(f"{type(body).__name__} for {to.id} cannot be sent: {e}") from None

    def _outbox(self, address: str) -> _Outbox:
        outbox = self._peers.get(address)
        if outbox is None:
            while len(self._peers) >= MAX_PEERS:
                self._peers.popitem(last=False)[1].close()
            outbox = self._peers[address] = _Outbox(self._context, address, self._token)
        self._peers.move_to_end(address)
        return outbox


class _Outbox:
    """A PUSH socket to one peer and the order of what goes through it."""

    def __init__(self, context: zmq.asyncio.Context, address: str, token: str | None) -> None:
        """Raises PeerUnavailableError for what is no address."""
        self._address = address
        self._socket = context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MESSAGES)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        secure_client(self._socket, token)
        try:
            if not address.startswith("tcp://"):
                raise zmq.ZMQError(errno.EPROTONOSUPPORT)
            self._socket.connect(address)
        except (zmq.ZMQError, ValueError):
            # Peers say where they are, and who says it wrongly must not end this process.
            self._socket.close(linger=0)
            raise PeerUnavailableError(f"{address!r} is no address of a peer, which is tcp://host:port") from None
        self._lock = asyncio.Lock()
        self._waiting: set[asyncio.Task[None]] = set()

    async def put(self, data: bytes) -> None:
        async with self._lock:
            try:
                # Not `wait_for`: on Python 3.11 it swallows a cancellation that comes as the message goes out.
                async with asyncio.timeout(SEND_SECONDS):
                    await self._socket.send(data)
            except (TimeoutError, zmq.ZMQError):
                raise PeerUnavailableError(f"{self._address} took no message for {SEND_SECONDS:g} s") from None

    def put_later(self, data: bytes, name: str) -> None:
        if not self._waiting and not self._lock.locked():
            with contextlib.suppress(zmq.Again):
                zmq.Socket.send(self._socket, data, zmq.NOBLOCK)
                return
        if len(self._waiting) >= HIGH_WATER_MESSAGES:
            log.warning("%s to %s dropped: %d messages wait already", name, self._address, len(self._waiting))
            return
        task = asyncio.ensure_future(self._put_logged(data, name))
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)

    async def _put_logged(self, data: bytes, name: str) -> None:
        try:
            await self.put(data)
        except PeerUnavailableError as e:
            log.warning("%s not delivered: %s", name, e)

    def close(self) -> None:
        for task in list(self._waiting):
            task.cancel()
        self._socket.close(linger=0)
