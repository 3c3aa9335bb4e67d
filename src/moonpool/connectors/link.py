"""The connection to this host's node: it comes by itself, also after the node was away."""

from __future__ import annotations

import secrets
import threading

from moonpool.connectors.counters import Counters, log
from moonpool.errors import PoolError
from moonpool.store.client import NodeClient

CONNECT_SECONDS = 2.0
PAUSE_SECONDS = 0.2
LONGEST_PAUSE_SECONDS = 3.0


class NodeLink:
    """`client` is None while the node is away. Nothing here makes its user wait."""

    def __init__(self, path: str, name: str, counters: Counters) -> None:
        self.client: NodeClient | None = None
        self._path = path
        self._name = name
        self._counters = counters
        self._changed = threading.Event()
        """The node went away, or this link is closed."""
        self._is_closed = False
        self._thread = threading.Thread(target=self._keep, name=f"{name}: node", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_closed = True
        self._changed.set()
        self._thread.join(2 * CONNECT_SECONDS)

    def _keep(self) -> None:
        pause = PAUSE_SECONDS
        while not self._is_closed:
            try:
                client = NodeClient.connect(
                    self._path, name=self._name, incarnation=secrets.token_hex(4), timeout=CONNECT_SECONDS
                )
            except PoolError as e:
                self._counters.add("away")
                self._counters.say("away", f"the pool is away, and its blocks are computed: {e}")
                self._changed.wait(pause)
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
                continue
            pause = PAUSE_SECONDS
            self._use(client)

    def _use(self, client: NodeClient) -> None:
        """Until it is gone, or this link is closed."""
        client.on_lost = self._changed.set
        log.info("joined the pool at %s (%s)", self._path, client.node)
        self.client = client
        # It may have gone before it had somebody to tell.
        if not client.is_gone:
            self._changed.wait()
        self.client = None
        if not self._is_closed:
            self._changed.clear()
            self._counters.add("away")
            self._counters.say("lost", f"the node {client.node} went away; the pool is tried again by itself")
        client.close()
