"""A gateway's life: it listens, joins, serves, and stops within two seconds."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import uvicorn

from moonpool.core.classes import Classes
from moonpool.core.vocabulary import Slo
from moonpool.errors import ConfigError
from moonpool.gateway.answers import AnswerMemory
from moonpool.gateway.app import make_app
from moonpool.gateway.bodies import Bodies
from moonpool.gateway.caching.keeper import Keeper
from moonpool.gateway.cluster import Cluster
from moonpool.gateway.completions import Desk
from moonpool.gateway.config import GatewayConfig
from moonpool.gateway.connection import Connection, most_connections
from moonpool.gateway.intake import Intake
from moonpool.gateway.keys.file import check_keys
from moonpool.gateway.keys.keyring import Keyring
from moonpool.gateway.meters import Meters
from moonpool.gateway.registry import Registry
from moonpool.gateway.seats import Seats
from moonpool.gateway.tokenizer import Tokenizer
from moonpool.wire.link import Link
from moonpool.wire.membership import Books

BACKLOG = 1024
KEEP_ALIVE_SECONDS = 30
STOP_SECONDS = 0.7
"""For streams to tell their readers; then connections are broken."""


async def run_gateway(
    link: Link,
    conductor: str,
    config: GatewayConfig,
    listener: socket.socket | None = None,
    registry: Registry | None = None,
    token: str | None = None,
) -> None:
    """Serve HTTP until cancelled. `conductor`: its control address. `registry`: of external instances. `token`: the
    cluster's, for its nodes.

    `listener`: from `listen`, where the port must be taken before anything else is done. Raises ConfigError where the
    port is taken, API keys are needed and cannot be read, too few files can be opened for `max_requests`, or no
    Conductor answers, ModelError where the tokenizer cannot be loaded.
    """
    listener = listener or listen(config.host, config.port)
    try:
        tokenizer = await asyncio.to_thread(Tokenizer.load, config.model_path)
        gateway = Gateway(link, conductor, config, tokenizer, registry, token)
        await gateway.run(listener)
    finally:
        listener.close()


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ConfigError."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, proto)
    except OSError as e:
        raise ConfigError(f"cannot listen on {host}:{port}: {e.strerror}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as e:
        listener.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {e.strerror}; choose another with --port") from None
    return listener


class Gateway:
    """All parts of one gateway."""

    def __init__(
        self,
        link: Link,
        conductor: str,
        config: GatewayConfig,
        tokenizer: Tokenizer,
        registry: Registry | None = None,
        token: str | None = None,
    ) -> None:
        """Raises ConfigError where API keys are needed and cannot be read, or too few files can be opened."""
        self._model = config.served_model_name, tokenizer.vocabulary
        self.meters = Meters(config.served_model_name)
        self.cluster = Cluster(link, conductor, config.served_model_name, self.meters)
        self.seats = Seats(config.max_requests)
        self.answers = AnswerMemory(config.answers_remembered, tokenizer.special)
        self.cluster.books = Books(self.check_integrity)
        self.keyring = self._keyring(config)
        self.keeper = Keeper(self.cluster, token, config, self._is_owner)
        self.intake = Intake(config, tokenizer, self.answers, self.keeper.book.find)
        self.meters.watch("num_requests_running", "Requests at a worker.", lambda: self.cluster.running)
        self.meters.watch("num_requests_waiting", "Requests that wait for a place.", lambda: self.cluster.waiting)
        self.bodies = Bodies(config)
        self.meters.watch("num_requests_intake", "Requests that wait to be parsed.", lambda: self.intake.waiting)
        self.meters.watch("body_bytes_held", "Of bodies beyond 64 KiB, until parsed.", lambda: self.bodies.held)
        book = self.keeper.book
        self.meters.watch("cached_contexts", "Contexts that clients have cached.", lambda: len(book))
        self.meters.watch("cached_contexts_pending", "Of those, not pinned now.", lambda: book.pending)
        self.meters.watch("cached_context_tokens", "That they pin.", lambda: book.tokens)
        desk = Desk(
            *(config, tokenizer, self.intake, self.answers, self.cluster, self.seats, self.bodies),
            *(self.keyring, self.keeper, self._abort),
        )
        self.app = make_app(desk, self.meters, registry)
        self._server = _Server(
            uvicorn.Config(
                self.app,
                http=partial(Connection, most=most_connections(config.max_requests)),  # type: ignore[arg-type]
                log_config=None,
                access_log=False,
                lifespan="off",
                ws="none",
                interface="asgi3",
                proxy_headers=False,
                server_header=False,
                backlog=BACKLOG,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=1,
            )
        )

    async def run(self, listener: socket.socket) -> None:
        await self.keeper.load(*self._model)
        serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        work = [asyncio.create_task(self.cluster.run()), asyncio.create_task(self.keeper.run())]
        if self.keyring is not None:
            work.append(asyncio.create_task(self.keyring.run()))
        try:
            done, _ = await asyncio.wait((serving, *work), return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            self._server.should_exit = True
            self.cluster.cancel_all("the gateway is stopping")
            await asyncio.wait((serving,), timeout=STOP_SECONDS)
            for connection in list(self._server.server_state.connections):
                connection.transport.abort()
            await asyncio.wait((serving,), timeout=STOP_SECONDS)
            for task in (serving, *work):
                task.cancel()
            await self.keeper.close()
            await asyncio.wait((serving, *work))
            self.intake.close()
            if self.keyring is not None:
                self.keyring.close()

    def check_integrity(self) -> None:
        self.cluster.check_integrity()
        self.seats.check_integrity()
        self.answers.check_integrity()
        self.keeper.book.check_integrity()
        self.bodies.check_integrity()
        self.intake.check_integrity()
        if self.keyring is not None:
            self.keyring.check_integrity()

    def _is_owner(self, owner: str) -> bool:
        """Of cached contexts: they end with the last key of their group."""
        return self.keyring is None or not owner or self.keyring.has_group(owner)

    def _keyring(self, config: GatewayConfig) -> Keyring | None:
        keys = check_keys(config.keys, config.host)
        if config.keys is None or keys is None:
            return None
        keyring = Keyring(Path(config.keys), keys, Classes(config.classes, Slo()), self.meters)
        self.meters.watch("api_keys", "That there are.", lambda: keyring.count)
        self.meters.watch("api_keys_stale", "1: their file cannot be read.", lambda: bool(keyring.fault))
        return keyring

    def _abort(self, client: object) -> None:
        """Break a connection whose reader does not read: closing it would wait for the reader."""
        for connection in list(self._server.server_state.connections):
            if client is not None and getattr(connection, "client", None) == client:
                connection.transport.abort()


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals belong to the process's own loop."""
        yield
