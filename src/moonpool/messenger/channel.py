"""One tcp connection of the data plane: handshake, frames, payload, each with a deadline (docs/protocol.md)."""

from __future__ import annotations

import hashlib
import hmac
import math
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Final

import msgspec
import numpy as np
import xxhash
from msgspec import Meta, Struct

from moonpool.core.vocabulary import BlockKey, KeySpaceId, RequestId, TimeLeft
from moonpool.errors import TransferError
from moonpool.messenger.neighbour import Neighbour
from moonpool.messenger.questions import Checksums, GetBlocks, Given, PutBlocks, Question, Reply
from moonpool.messenger.seal import seal, unseal
from moonpool.messenger.transfer import TAIL, Bytes, Checksum, checksum
from moonpool.wire.codec import decoded
from moonpool.wire.security import data_key

MAX_HEADER_BYTES = 16 << 20
PIECE_BYTES = 4 << 20
"""Most bytes of one system call. Few large calls cost a fifth less processor time than calls of 256 KiB or 1 MiB."""
MAX_BUFFERS = 1024
"""Of one system call (IOV_MAX)."""
HASH_BYTES = 1 << 20
"""What is received before it is hashed, while the kernel takes in what comes next."""
SPIN_SECONDS = 100e-6
"""How long to look for a frame that comes at once (s): to sleep and be woken takes about as long."""
HANDSHAKE_SECONDS = 5.0

_MAGIC = b"moonpool data 1\n"
_NONCE_BYTES = 32
_MAC_BYTES = 32
LIMIT_SLACK = 0.05
"""A system call may wait this much past the deadline (s)."""
LONGEST_WAIT = 0.5
"""Of one system call (s), which is made again while there is time. So the kernel is told its limit once, and anew only
for the last moments before a deadline: telling it costs as much as a small frame."""
_TIMEVAL = struct.Struct("ll")
_LENGTH = struct.Struct("<I")
_WELCOME = b"+"

Count = Annotated[int, Meta(ge=0, le=1 << 20)]


class Arriving(Struct, frozen=True, array_like=True):
    """The header of one `RoomWrite`; its payload follows the frame, in the order of the items."""

    request: RequestId
    attempt: int
    block: Annotated[int, Meta(ge=TAIL, le=1 << 20)]
    first_run: Count
    runs: Annotated[int, Meta(ge=1, le=1 << 20)]
    nbytes: Annotated[int, Meta(ge=0, le=1 << 40)]
    checksums: tuple[Checksum, ...]


class Write(Struct, frozen=True, tag=True):
    writes: tuple[Arriving, ...]
    time_left: TimeLeft


class Read(Struct, frozen=True, tag=True):
    """The same part of each of these blocks."""

    space: KeySpaceId
    keys: tuple[BlockKey, ...]
    time_left: TimeLeft
    first_byte: Annotated[int, Meta(ge=0, le=1 << 40)] = 0
    nbytes: Annotated[int, Meta(ge=0, le=1 << 40)] = 0
    """0: to the end of the block. A part that reaches beyond the block is cut off there."""


class Done(Struct, frozen=True, tag=True):
    """The answer to `Write`; empty: every run is in its room and its checksum is right."""

    failure: str = ""


class Blocks(Struct, frozen=True, tag=True):
    """The answer to `Read`: the wanted part of `count` leading blocks follows."""

    count: Count
    block_bytes: Annotated[int, Meta(ge=0, le=1 << 40)]
    """Of a whole block."""
    checksums: tuple[Checksum, ...]
    """Of all runs of each block, whatever part was wanted: equal ones mean the same copy of a block that is read in
    several parts."""


class _Tagged(Struct, frozen=True):
    """What can be read of a header with mistakes."""

    type: str


class UnreadableError(TransferError):
    """A frame that arrived as it was sent, but is no header."""

    def __init__(self, reason: str, kind: str) -> None:
        super().__init__(reason)
        self.kind = kind
        """What it says it is; empty where it says nothing."""


Part = Bytes | bytes | memoryview
"""Something to be sent."""
Header = Write | Read | Done | Blocks | Question | Reply | GetBlocks | Given | PutBlocks | Checksums

_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(Header)
_tagged: Final = msgspec.msgpack.Decoder(_Tagged)


class Channel:
    """A connected socket. Methods raise OSError when the connection breaks, TimeoutError past `until` (monotonic).

    The socket is a blocking one with time limits of the kernel's: one system call a piece, and MSG_WAITALL.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._scratch: Bytes | None = None
        self._length = memoryview(bytearray(_LENGTH.size))
        self._limits = {socket.SO_RCVTIMEO: math.inf, socket.SO_SNDTIMEO: math.inf}
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A host that vanishes without a word is noticed by the kernel, not only by the transfer's deadline.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 10_000)
        self._neighbour = Neighbour.of(sock)

    @property
    def is_near(self) -> bool:
        """The peer is on this host."""
        return self._neighbour is not None

    @property
    def is_gone(self) -> bool:
        """The peer has closed the connection, or its host has vanished. What it sent before may be there still."""
        poll = select.poll()
        poll.register(self._socket, select.POLLRDHUP)
        return bool(poll.poll(0))

    def step_aside(self) -> None:
        """Before a large transfer: the peer, if it is on this host, is to have a processor to itself."""
        if self._neighbour is not None:
            self._neighbour.step_aside()

    def send(self, data: Part, until: float, more: bool = False) -> None:
        """`more` tells the kernel that further bytes follow at once."""
        view = data.data if isinstance(data, np.ndarray) else memoryview(data)
        while len(view):
            is_last = len(view) <= PIECE_BYTES and not more
            self._wait_at_most(until, socket.SO_SNDTIMEO)
            try:
                sent = self._socket.send(view[:PIECE_BYTES], 0 if is_last else socket.MSG_MORE)
            except BlockingIOError:
                continue
            view = view[sent:]

    def send_all(self, parts: Sequence[Part], until: float, more: bool = False) -> None:
        """One behind the other, many small ones in one system call: the calls are most of what a small one costs."""
        views = [part.data if isinstance(part, np.ndarray) else memoryview(part) for part in parts]
        left = sum(len(view) for view in views)
        at = 0
        while left:
            group = _sent_together(views, at)
            is_last = sum(len(view) for view in group) == left and not more
            self._wait_at_most(until, socket.SO_SNDTIMEO)
            try:
                sent = self._socket.sendmsg(group, (), 0 if is_last else socket.MSG_MORE)
            except BlockingIOError:
                continue
            left -= sent
            while left and sent >= len(views[at]):
                sent -= len(views[at])
                at += 1
            if left:
                views[at] = views[at][sent:]

    def receive_into(self, target: Bytes, until: float) -> None:
        self._receive_all(target.data, until)

    def receive_hashed(self, target: Bytes, until: float) -> int:
        """Receive one run; its xxh3-64."""
        if target.nbytes <= HASH_BYTES:
            self.receive_into(target, until)
            return checksum(target)
        digest = xxhash.xxh3_64()
        for start in range(0, target.nbytes, HASH_BYTES):
            piece = target[start : start + HASH_BYTES]
            self.receive_into(piece, until)
            digest.update(piece.data)
        return digest.intdigest()

    def receive_some(self, view: memoryview, until: float) -> int:
        """One system call's worth: at least one byte."""
        received = self._receive(view, until, socket.MSG_WAITALL)
        if not received:
            raise ConnectionResetError("the peer closed the connection")
        return received

    def receive_each(self, views: Sequence[memoryview], until: float) -> None:
        """Fill them one behind the other, many small ones in one system call (at most MAX_BUFFERS of them)."""
        group = list(views)
        at = 0
        while at < len(group):
            self._wait_at_most(until, socket.SO_RCVTIMEO)
            try:
                received = self._socket.recvmsg_into(group[at:], 0, socket.MSG_WAITALL)[0]
            except BlockingIOError:
                continue
            if not received:
                raise ConnectionResetError("the peer closed the connection")
            while at < len(group) and received >= len(group[at]):
                received -= len(group[at])
                at += 1
            if received:
                group[at] = group[at][received:]

    def skip(self, nbytes: int, until: float) -> None:
        """Receive bytes and throw them away."""
        if self._scratch is None:
            self._scratch = np.empty(HASH_BYTES, np.uint8)
        for start in range(0, nbytes, HASH_BYTES):
            self.receive_into(self._scratch[: nbytes - start], until)

    def send_header(self, header: Header, until: float, more: bool = False) -> None:
        self.send(framed(header), until, more)

    def receive_header(self, until: float, body_seconds: float | None = None, soon: float = 0.0) -> Header:
        """The next frame. With `body_seconds` the time between its first bytes and its last is limited to that.

        `soon`: it probably comes within so many seconds, so look for it for as long before sleeping.

        Raises EOFError where the peer closed the connection between two frames, TransferError for what is no frame.
        """
        received = self._receive_soon(self._length, soon) if soon else None
        if received is None:
            received = self._receive(self._length, until)
        if not received:
            raise EOFError
        if body_seconds is not None:
            until = min(until, time.monotonic() + body_seconds)
        self._receive_all(self._length[received:], until)
        (length,) = _LENGTH.unpack(self._length)
        if length > MAX_HEADER_BYTES:
            raise TransferError(f"a frame announces {length} bytes, at most {MAX_HEADER_BYTES}")
        data = bytearray(length)
        self._receive_all(memoryview(data), until)
        return _unframed(data)

    def receive_header_of(self, nbytes: int, until: float) -> Header:
        """The next frame, which has exactly so many bytes: it takes one system call. Raises as `receive_header`."""
        frame = memoryview(bytearray(nbytes))
        received = 0
        while received < nbytes:
            some = self._receive(frame[received:], until)
            if not some:
                raise EOFError
            received += some
            if received >= _LENGTH.size and _LENGTH.unpack(frame[: _LENGTH.size])[0] != nbytes - _LENGTH.size:
                raise TransferError(f"a frame came where one of {nbytes} bytes was expected, which it has not")
        return _unframed(frame[_LENGTH.size :])

    def await_frame(self, until: float, is_wanted: Callable[[], bool]) -> bool:
        """Wait until the peer says something or has gone, or until that time; False once nobody wants it any more."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN | select.POLLRDHUP)
        while not poll.poll(max(0.0, min(until - time.monotonic(), LONGEST_WAIT)) * 1000):
            if not is_wanted():
                return False
            if time.monotonic() >= until:
                break
        return True

    def shut(self) -> None:
        """Break the connection from any thread: whoever waits for it gets an error at once."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return

    def close(self) -> None:
        self._socket.close()

    def _receive_all(self, view: memoryview, until: float) -> None:
        while len(view):
            view = view[self.receive_some(view[:PIECE_BYTES], until) :]

    def _receive(self, view: memoryview, until: float, flags: int = 0) -> int:
        """0 where the peer has closed the connection."""
        while True:
            self._wait_at_most(until, socket.SO_RCVTIMEO)
            try:
                return self._socket.recv_into(view, 0, flags)
            except BlockingIOError:
                continue

    def _receive_soon(self, view: memoryview, seconds: float) -> int | None:
        """None where nothing has come by then."""
        until = time.perf_counter() + seconds
        while True:
            try:
                return self._socket.recv_into(view, 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                if time.perf_counter() >= until:
                    return None
                # Whoever else has something to do on this processor, the peer perhaps, goes first.
                os.sched_yield()

    def _wait_at_most(self, until: float, which: int) -> None:
        seconds = until - time.monotonic()
        if seconds <= 0:
            raise TimeoutError("the deadline has passed")
        wanted = min(seconds, LONGEST_WAIT)
        if not wanted <= self._limits[which] <= wanted + LIMIT_SLACK:
            self._limits[which] = limit = min(wanted + LIMIT_SLACK, LONGEST_WAIT)
            whole, part = divmod(limit, 1)
            self._socket.setsockopt(socket.SOL_SOCKET, which, _TIMEVAL.pack(int(whole), int(part * 1e6)))


def _unframed(data: bytearray | memoryview) -> Header:
    header = unseal(data)
    try:
        return decoded(_decoder, header)
    except msgspec.MsgspecError as e:
        reason = f"unreadable frame of {len(data)} bytes: {e}"
    try:
        kind = decoded(_tagged, header).type
    except msgspec.MsgspecError:
        kind = ""
    raise UnreadableError(reason, kind)


def framed(header: Header) -> bytes:
    """As it goes over the wire. Raises TransferError for one that is too long."""
    data = seal(_encoder.encode(header))
    if len(data) > MAX_HEADER_BYTES:
        raise TransferError(
            f"the header of one transfer has {len(data)} bytes, at most {MAX_HEADER_BYTES}: send fewer runs at once"
        )
    return _LENGTH.pack(len(data)) + data


def _sent_together(views: Sequence[memoryview], at: int) -> list[memoryview]:
    """From this one on, for one system call."""
    if len(views[at]) > PIECE_BYTES:
        return [views[at][:PIECE_BYTES]]
    group: list[memoryview] = []
    size = 0
    for view in views[at : at + MAX_BUFFERS]:
        size += len(view)
        if size > PIECE_BYTES:
            break
        group.append(view)
    return group


def greet(channel: Channel, key: bytes, until: float) -> None:
    """The connecting side of the handshake. Raises TransferError if the other side does not know the key."""
    until = min(until, time.monotonic() + HANDSHAKE_SECONDS)
    mine = secrets.token_bytes(_NONCE_BYTES)
    channel.send(_MAGIC + mine, until)
    answer = np.empty(_NONCE_BYTES + _MAC_BYTES, np.uint8)
    channel.receive_into(answer, until)
    theirs, proof = answer[:_NONCE_BYTES].tobytes(), answer[_NONCE_BYTES:].tobytes()
    if theirs.startswith(b"HTTP/"):
        raise TransferError("what answers there speaks HTTP: that is no node's data address")
    if not hmac.compare_digest(proof, _proof(key, b"server", mine, theirs)):
        raise TransferError(f"data handshake refused: the other side has {_whose(key, proof, mine, theirs)}")
    channel.send(_proof(key, b"client", mine, theirs), until)
    welcome = np.empty(1, np.uint8)
    channel.receive_into(welcome, until)


def _whose(key: bytes, proof: bytes, mine: bytes, theirs: bytes) -> str:
    """What token the other side has, as far as can be told."""
    if hmac.compare_digest(proof, _proof(data_key(None), b"server", mine, theirs)):
        return "no cluster token, this one has: connect without a token"
    return "a cluster token, this one has none: give it" if key == data_key(None) else "another cluster token"


def admit(channel: Channel, key: bytes) -> None:
    """The accepting side of the handshake. Raises TransferError for a peer that does not know the key."""
    until = time.monotonic() + HANDSHAKE_SECONDS
    hello = np.empty(len(_MAGIC) + _NONCE_BYTES, np.uint8)
    channel.receive_into(hello, until)
    if hello[: len(_MAGIC)].tobytes() != _MAGIC:
        raise TransferError("data handshake refused: not a Moonpool peer, or one of another version")
    theirs = hello[len(_MAGIC) :].tobytes()
    mine = secrets.token_bytes(_NONCE_BYTES)
    channel.send(mine + _proof(key, b"server", theirs, mine), until)
    proof = np.empty(_MAC_BYTES, np.uint8)
    channel.receive_into(proof, until)
    if not hmac.compare_digest(proof.tobytes(), _proof(key, b"client", theirs, mine)):
        raise TransferError("data handshake refused: the peer has another cluster token")
    channel.send(_WELCOME, until)


def _proof(key: bytes, role: bytes, client_nonce: bytes, server_nonce: bytes) -> bytes:
    return hmac.digest(key, role + client_nonce + server_nonce, hashlib.sha256)
