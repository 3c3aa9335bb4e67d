"""The node's Unix stream socket: clients of the same host and the same user."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
from collections.abc import Callable
from itertools import count
from pathlib import Path

from moonpool.errors import ConfigError
from moonpool.store.arena import Arena
from moonpool.store.fetch import Fetcher
from moonpool.store.ledger import Ledger
from moonpool.store.messages import Welcome
from moonpool.store.rooms import ClientId, RoomId
from moonpool.store.session import Session

log = logging.getLogger(__name__)

LONGEST_PATH = 107
MAX_CLIENTS = 1024
_CREDENTIALS = struct.Struct("3i")


def listen(path: Path) -> socket.socket:
    """A listening socket at `path`, whose folder must be the user's own and closed to others. Raises ConfigError."""
    folder = path.parent
    try:
        status = folder.stat()
    except OSError as e:
        raise ConfigError(f"run directory {folder}: {e.strerror}") from None
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise ConfigError(f"run directory {folder} must belong to this user, with mode 0700")
    if len(os.fsencode(path)) > LONGEST_PATH:
        raise ConfigError(f"socket path {path} is longer than {LONGEST_PATH} bytes; choose a shorter run directory")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        listener.bind(str(path))
        listener.listen(128)
    except OSError as e:
        listener.close()
        raise ConfigError(f"cannot listen on {path}: {e.strerror}") from None
    return listener


class LocalServer:
    def __init__(
        self,
        listener: socket.socket,
        welcome: Welcome,
        arena: Arena,
        ledger: Ledger,
        fetcher: Fetcher,
        measure: Callable[[], dict[str, float]],
    ) -> None:
        self._listener = listener
        self._welcome = welcome
        self._arena = arena
        self._ledger = ledger
        self._fetcher = fetcher
        self._measure = measure
        self._numbers = count(1)
        self._sessions: dict[ClientId, Session] = {}

    @property
    def clients(self) -> int:
        return len(self._sessions)

    def room_ended(self, client: ClientId, room: RoomId) -> None:
        """Tell a writer that its room is gone. Called on the loop's thread."""
        session = self._sessions.get(client)
        if session is not None:
            session.room_ended(room)

    async def run(self) -> None:
        """Serve until cancelled; every client is disconnected then."""
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as clients:
            while True:
                try:
                    sock, _ = await loop.sock_accept(self._listener)
                except OSError as e:
                    log.error("no client accepted: %s", e.strerror)
                    await asyncio.sleep(0.1)
                    continue
                if self._may_join(sock):
                    clients.create_task(self._serve(sock))
                else:
                    sock.close()

    def _may_join(self, sock: socket.socket) -> bool:
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        process, user, _ = _CREDENTIALS.unpack(credentials)
        if user != os.geteuid():
            log.warning("process %d of user %d refused: this node serves user %d only", process, user, os.geteuid())
            return False
        if len(self._sessions) >= MAX_CLIENTS:
            log.warning("process %d refused: %d clients are connected", process, len(self._sessions))
            return False
        return True

    async def _serve(self, sock: socket.socket) -> None:
        client = ClientId(next(self._numbers))
        session = Session(sock, client, self._welcome, self._arena, self._ledger, self._fetcher, self._measure)
        self._sessions[client] = session
        try:
            await session.run()
        except Exception:
            # One client's trouble must not end the others.
            log.exception("client %d disconnected", client)
        finally:
            del self._sessions[client]
