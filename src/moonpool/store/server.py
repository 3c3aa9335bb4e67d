"""The node's Unix stream socket: clients of the same host and the same user."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

from msgspec import Struct

from moonpool.errors import ConfigError
from moonpool.store.arena import Arena
from moonpool.store.desk import Desk
from moonpool.store.fetch import Fetcher
from moonpool.store.holder import Holder, credentials
from moonpool.store.ledger import Ledger
from moonpool.store.loader import Loader
from moonpool.store.messages import Welcome
from moonpool.store.overdue import Overdue
from moonpool.store.rooms import ClientId, RoomId
from moonpool.store.session import Session
from moonpool.store.streaming import Streamer

log = logging.getLogger(__name__)

LONGEST_PATH = 107
MAX_CLIENTS = 1024


def listen(path: Path) -> socket.socket:
    """A listening socket at `path`, whose folder must be the user's own and closed to others. Raises ConfigError."""
    folder = path.parent
    try:
        status = folder.stat()
    except OSError as e:
        raise ConfigError(f"run directory {folder}: {e.strerror}") from None
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise ConfigError(
            f"run directory {folder} must belong to this user, with mode 0700: try chmod 700, or another one"
        )
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


class HoldingRules(Struct, frozen=True):
    """How long, and how much, clients may hold of the arena."""

    lease_seconds: float
    grace: float
    """Seconds after a request's deadline."""
    quota: int
    """Bytes, for each client that the supervisor did not start."""
    life_fd: int | None
    """The supervisor's pipe, by which its other children are known."""


class LocalServer:
    def __init__(
        self,
        listener: socket.socket,
        welcome: Welcome,
        arena: Arena,
        ledger: Ledger,
        loader: Loader,
        fetcher: Fetcher,
        streamer: Streamer,
        desk: Desk,
        measure: Callable[[], dict[str, float]],
        rules: HoldingRules,
    ) -> None:
        self._listener = listener
        self._welcome = welcome
        self._arena = arena
        self._ledger = ledger
        self._loader = loader
        self._fetcher = fetcher
        self._streamer = streamer
        self._desk = desk
        self._measure = measure
        self._rules = rules
        self._overdue = Overdue(rules.lease_seconds, rules.grace)
        self._numbers = count(1)
        self._sessions: dict[ClientId, Session] = {}

        self._killed = 0

    def counters(self) -> dict[str, float]:
        """Clients now (and those of them that may be killed), clients killed since the start."""
        supervised = sum(session.holder.is_supervised for session in self._sessions.values())
        return {
            "clients": float(len(self._sessions)),
            "supervised_clients": float(supervised),
            "killed_holders": float(self._killed),
        }

    def end_overdue(self) -> None:
        """Kill the supervised clients that hold something beyond its time; what they held is free when they are dead.

        Called on the loop's thread, again and again. A client that nobody supervises keeps what it has.
        """
        heard = {client: session.heard for client, session in self._sessions.items() if session.holder.is_supervised}
        for client, what in self._overdue.look(self._ledger.holdings(), heard, time.monotonic()).items():
            session = self._sessions[client]
            if not session.holder.killed:
                log.error(
                    "%s (process %d) is killed: it holds %s beyond its time", session.name, session.holder.process, what
                )
                session.holder.kill()
                self._killed += 1
            elif session.holder.is_dead:
                session.end()

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
        process, user = credentials(sock)
        if user != os.geteuid():
            log.warning("process %d of user %d refused: this node serves user %d only", process, user, os.geteuid())
            return False
        if len(self._sessions) >= MAX_CLIENTS:
            log.warning("process %d refused: %d clients are connected", process, len(self._sessions))
            return False
        return True

    async def _serve(self, sock: socket.socket) -> None:
        client = ClientId(next(self._numbers))
        with contextlib.ExitStack() as stack:
            stack.callback(sock.close)
            try:
                holder = Holder(sock, self._rules.life_fd)
                stack.callback(holder.close)
                if not holder.is_supervised:
                    self._ledger.limit(client, self._rules.quota)
                stack.callback(self._ledger.leave_all, client)
                await self._session(sock, client, holder)
            except Exception:
                # One client's trouble must not end the others.
                log.exception("client %d disconnected", client)

    async def _session(self, sock: socket.socket, client: ClientId, holder: Holder) -> None:
        session = Session(
            sock,
            client,
            holder,
            self._welcome,
            self._arena,
            self._ledger,
            self._loader,
            self._fetcher,
            self._streamer,
            self._desk,
            self._measure,
        )
        self._sessions[client] = session
        try:
            await session.run()
        finally:
            del self._sessions[client]
