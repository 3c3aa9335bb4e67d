"""How much of a prompt the pool has, asked without making vLLM's scheduler wait."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as LateError
from dataclasses import dataclass

from moonpool.connectors.counters import Counters
from moonpool.connectors.link import NodeLink
from moonpool.core.vocabulary import BlockKey, KeySpace, RequestId
from moonpool.errors import PoolError
from moonpool.messenger.questions import YES, Exists, Marks, packed
from moonpool.store.board import space_tag
from moonpool.store.client import NodeClient

PATIENCE_SECONDS = 0.002
"""The most that one call waits; most answers take a tenth of it."""
FRESH_SECONDS = 0.25
"""vLLM asks for a request in every step until there is room for it."""
MAX_OUTSTANDING = 16
MAX_KEYS = 8192


@dataclass(slots=True, eq=False)
class _Asked:
    keys: int
    answer: Future[tuple[int, bool]] | None
    until: float
    """The answer is waited for, or good, so long (monotonic)."""
    found: int


class Lookup:
    """Used by one thread, the scheduler's."""

    def __init__(self, link: NodeLink, counters: Counters, seconds: float) -> None:
        self._link = link
        self._counters = counters
        self._seconds = seconds
        self._asked: dict[RequestId, _Asked] = {}
        self._outstanding: set[Future[tuple[int, bool]]] = set()
        self._thread = ThreadPoolExecutor(1, "pool lookup")

    def leading(self, request: RequestId, space: KeySpace, keys: Sequence[BlockKey]) -> int | None:
        """How many leading blocks the pool has, on any node and in any tier; None: not known yet, ask again."""
        asked = self._asked.get(request)
        if asked is None or asked.keys != len(keys) or (asked.answer is None and time.monotonic() > asked.until):
            asked = self._asked[request] = self._ask(space, keys)
        if asked.answer is not None:
            self._settle(asked)
        return None if asked.answer is not None else asked.found

    def forget(self, request: RequestId) -> None:
        self._asked.pop(request, None)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _ask(self, space: KeySpace, keys: Sequence[BlockKey]) -> _Asked:
        client, now = self._link.client, time.monotonic()
        self._counters.add("lookups")
        if client is None or not keys:
            return _Asked(len(keys), None, now + FRESH_SECONDS, 0)
        found = _on_board(client, space, keys)
        self._outstanding = {answer for answer in self._outstanding if not answer.done()}
        if found == len(keys):
            return _Asked(len(keys), None, now + FRESH_SECONDS, found)
        if len(self._outstanding) >= MAX_OUTSTANDING:
            self._counters.add("late_lookups")
            return _Asked(len(keys), None, now + FRESH_SECONDS, found)
        until = now + self._seconds
        answer = self._thread.submit(_leading, client, space, keys[found : found + MAX_KEYS], until)
        self._outstanding.add(answer)
        return _Asked(len(keys), answer, until, found)

    def _settle(self, asked: _Asked) -> None:
        """Take the answer if it is there, in a moment, or if it is too late."""
        assert asked.answer is not None
        now, is_late = time.monotonic(), False
        try:
            found, is_late = asked.answer.result(max(0.0, min(PATIENCE_SECONDS, asked.until - now)))
            asked.found += found
        except LateError:
            if time.monotonic() < asked.until:
                return
            is_late = True
        if is_late:
            self._counters.add("late_lookups")
            self._counters.say("late", "the node does not say in time which blocks it has; they are computed")
        asked.answer, asked.until = None, now + FRESH_SECONDS


def _on_board(client: NodeClient, space: KeySpace, keys: Sequence[BlockKey]) -> int:
    tag = space_tag(space.id)
    for count, key in enumerate(keys):
        seen = client.board.find(tag, key)
        if seen is None or seen.nbytes != space.block_bytes:
            return count
    return len(keys)


def _leading(client: NodeClient, space: KeySpace, keys: Sequence[BlockKey], until: float) -> tuple[int, bool]:
    """On the lookup's thread: how many leading ones are there as far as is known, and whether time was too short."""
    found = 0
    try:
        found = _ask(client, Exists(space.id, packed(keys), here=True), until)
        if found < len(keys):
            found += _ask(client, Exists(space.id, packed(keys[found:])), until)
    except (LateError, PoolError):
        return found, True
    return found, False


def _ask(client: NodeClient, question: Exists, until: float) -> int:
    reply = client.ask(question).result(max(0.0, until - time.monotonic()))
    if not isinstance(reply, Marks):
        return 0
    return len(reply.marks) - len(reply.marks.lstrip(bytes([YES])))
