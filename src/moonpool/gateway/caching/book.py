"""Which cached contexts there are, whose they are, and what they may take. Bookkeeping only: no I/O.

Written to on the event loop alone; `find` may be called from any thread.
"""

from __future__ import annotations

import contextlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from moonpool.core.vocabulary import BlockKey, KeySpace, NodePeer
from moonpool.gateway.caching.context import Context
from moonpool.gateway.problem import ApiError

MOST_CONTEXTS = 4096
EXPIRED_REMEMBERED = 4096
MAX_SHOWN_CHARS = 64


@dataclass(frozen=True, slots=True)
class Pinned:
    """Where a context's blocks are kept."""

    node: NodePeer
    space: KeySpace
    keys: tuple[BlockKey, ...]


@dataclass(slots=True, eq=False)
class Held:
    """A context, and how it stands."""

    context: Context
    pinned: Pinned | None = None
    """None: it is to be pinned (again), and computed before that where nothing is left of it."""
    until: float = 0.0
    """When the pins end. Like the other times here it is of the event loop's clock."""
    problem: str = ""
    """Why it could not be pinned again the last time."""
    failures: int = 0
    retry_at: float = 0.0
    missed_since: float | None = None
    """Since when the node that has it, or had it, is not in the fleet."""
    must_be_computed: bool = False
    """No node has all of it any more."""
    is_unwritten: bool = False
    """Its file says something older."""

    @property
    def is_ready(self) -> bool:
        return self.pinned is not None and self.missed_since is None


class Book:
    def __init__(self, clock: Callable[[], float], quota: int | None) -> None:
        """`clock`: seconds since the epoch. `quota`: tokens that one owner may pin; None: no limit."""
        self._clock = clock
        self._quota = quota
        self._held: dict[str, Held] = {}
        self._tokens: Counter[str] = Counter()
        """Pinned or about to be, by owner."""
        self._coming = 0
        """Contexts that are being made."""
        self._coming_tokens: Counter[str] = Counter()
        self._expired: OrderedDict[str, str] = OrderedDict()
        """Owners of those whose time was over a while ago, by id."""

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[Held]:
        """The oldest first."""
        return iter(list(self._held.values()))

    @property
    def pending(self) -> int:
        """Those that are not pinned."""
        return sum(not held.is_ready for held in self._held.values())

    @property
    def tokens(self) -> int:
        """Of all owners."""
        return self._tokens.total()

    def has(self, held: Held) -> bool:
        return self._held.get(held.context.id) is held

    @contextlib.contextmanager
    def reserve(self, owner: str, tokens: int) -> Iterator[None]:
        """Within the block so many tokens more count as the owner's. Raises ApiError (429) beyond a limit."""
        if len(self._held) + self._coming >= MOST_CONTEXTS:
            message = f"there are {MOST_CONTEXTS} cached contexts, which is the limit: delete some, or let some expire"
            raise ApiError(429, message, code="caching_full")
        has, quota = self._tokens[owner], self._quota
        if quota is not None and has + tokens > quota:
            message = (
                f"{tokens} tokens on top of {has} that you have in cached contexts are more than your quota of "
                f"{quota}: delete some of them, or let some expire"
            )
            raise ApiError(429, message, code="caching_quota_exceeded")
        self._coming += 1
        self._count(owner, tokens, self._coming_tokens)
        try:
            yield
        finally:
            self._coming -= 1
            self._count(owner, -tokens, self._coming_tokens)

    def add(self, held: Held) -> None:
        self._held[held.context.id] = held
        self._tokens[held.context.owner] += held.context.pinned_tokens

    def replace(self, held: Held, context: Context) -> None:
        """The same one, changed."""
        self._tokens[context.owner] += context.pinned_tokens - held.context.pinned_tokens
        held.context = context

    def remove(self, held: Held, is_expired: bool = False) -> None:
        context = held.context
        del self._held[context.id]
        self._tokens[context.owner] -= context.pinned_tokens
        if not self._tokens[context.owner]:
            del self._tokens[context.owner]
        if is_expired:
            self._expired[context.id] = context.owner
            if len(self._expired) > EXPIRED_REMEMBERED:
                self._expired.popitem(last=False)

    def find(self, id_: str, owner: str) -> Held:
        """Raises ApiError: 410 for one that is over, 404 for any other; others' look as if they were not there."""
        held = self._held.get(id_)
        if held is None or held.context.owner != owner:
            if self._expired.get(id_) == owner:
                raise _expired(id_)
            raise ApiError(404, f"there is no cached context {id_[:MAX_SHOWN_CHARS]!r}", code="context_not_found")
        if held.context.expires <= self._clock():
            raise _expired(id_)
        return held

    def of(self, owner: str) -> list[Held]:
        """His that are not over, the newest first."""
        now = self._clock()
        own = [h for h in self if h.context.owner == owner and h.context.expires > now]
        return own[::-1]

    def expired(self) -> list[Held]:
        now = self._clock()
        return [held for held in self if held.context.expires <= now]

    def needed(self, node: NodePeer, space: KeySpace) -> set[BlockKey]:
        """What contexts have pinned there."""
        pins = [held.pinned for held in self if held.pinned is not None]
        return {key for p in pins if p.node == node and p.space.id == space.id for key in p.keys}

    def check_integrity(self) -> None:
        """Raises AssertionError."""
        tokens = Counter(self._coming_tokens)
        for id_, held in self._held.items():
            assert held.context.id == id_, "a context is filed under another id"
            tokens[held.context.owner] += held.context.pinned_tokens
        assert tokens == self._tokens, "the tokens of contexts do not add up"
        assert self._coming >= 0
        assert len(self._expired) <= EXPIRED_REMEMBERED

    def _count(self, owner: str, tokens: int, also: Counter[str]) -> None:
        for counter in (self._tokens, also):
            counter[owner] += tokens
            if not counter[owner]:
                del counter[owner]


def _expired(id_: str) -> ApiError:
    message = f"the time of the cached context {id_[:MAX_SHOWN_CHARS]!r} is over: make it again"
    return ApiError(410, message, code="context_expired")
