"""The pool as a key-value store, for any program of this or another host (docs/pool.md).

    with Client.connect("/run/…/node-0.sock") as pool:              # or "host:port" of a node's data address
        space = pool.space("my-model/bf16", block_tokens=64, layers=32, block_bytes=32 * 262144)
        key, *_ = space.keys_of(token_ids)
        space.put(key, data)
        with space.get([key]) as (block,):
            ...                                                     # None, or a read-only view of the bytes

Everything raises PoolError with a message that says what to do.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Self, TypeVar, overload

import msgspec

from moonpool.core.vocabulary import BLOCK_KEY_BYTES, BlockKey, BlockMeta, KeySpace, KeySpaceId, PartId
from moonpool.errors import PoolError
from moonpool.messenger.questions import (
    BUSY,
    KEYS_A_QUESTION,
    LEASED,
    PINNED,
    YES,
    CountHolders,
    DescribeBlocks,
    Described,
    Exists,
    Marks,
    Numbers,
    Pin,
    Question,
    Remove,
    Stock,
    TakeStock,
    Unpin,
    packed,
)
from moonpool.messenger.transfer import Bytes
from moonpool.store import checks
from moonpool.store.buffers import Buffer, as_pieces
from moonpool.store.extents import page_aligned
from moonpool.store.far import FarHome
from moonpool.store.home import Held, Home, Layers, Wait
from moonpool.store.near import NearHome
from moonpool.store.rooms import MAX_META_TOKENS

T = TypeVar("T")

TIMEOUT_SECONDS = 30.0
START_SECONDS = 2.0
MOST_REPLICAS = 1 << 20
KEYS_A_CALL = 1024
"""More are put or copied in parts: a node's books are locked for some ten microseconds a block."""
SAID_BYTES = 4 << 20
"""Of what goes with blocks in one call (keys, checksums, token ids); a frame takes four times as much."""
_ID_DIGITS = 32


def key_of(*parts: str | bytes) -> BlockKey:
    """A key for whatever these name together: 16 bytes of SHA-256. For prompts take `Space.keys_of`."""
    state = hashlib.sha256()
    if not parts:
        raise PoolError("a key is made of at least one text, or bytes")
    for part in parts:
        if not isinstance(part, str | bytes | bytearray | memoryview):
            raise PoolError(f"a key is made of texts and bytes, not of {part!r}: give str({part!r})")
        data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        state.update(len(data).to_bytes(8, "little"))
        state.update(data)
    return BlockKey(state.digest()[:BLOCK_KEY_BYTES])


class Client:
    """One program's connection to its home node. Thread-safe.

    What the home node lacks it looks up in the cluster's directory and fetches from the node that has it.
    """

    @classmethod
    def connect(
        cls,
        address: str | Path,
        *,
        token: str | None = None,
        name: str = "client",
        timeout: float = TIMEOUT_SECONDS,
        start_timeout: float = START_SECONDS,
    ) -> Client:
        """`address`: the path of a node's socket on this host (zero copies), or `host:port` of its data address.

        `token`: the cluster's, for `host:port`. `name` is for the node's log. `timeout`: the most that any call takes,
        in seconds, beyond what `wait_until` allows. `start_timeout`: of that, how long a node is waited for where
        nothing listens yet. Raises NodeUnreachableError where there is none, or none that can be connected to;
        PoolError where it does not let this client in, and for mistakes in the arguments.
        """
        where, is_far = checks.address_of(address)
        if token is not None and not isinstance(token, str):
            raise PoolError(f"a cluster token is a text, not a {type(token).__name__}")
        name, timeout = checks.text(name, "a client's name"), checks.timeout(timeout)
        start_timeout = min(max(0.0, checks.seconds(start_timeout, "start_timeout")), timeout)
        if is_far:
            return cls(FarHome(str(where), token, name, timeout, start_timeout), timeout)
        return cls(NearHome(where, name, timeout, start_timeout), timeout)

    def __init__(self, home: Home, timeout: float) -> None:
        """Use `connect`."""
        self._home = home
        self._timeout = timeout

    @property
    def node(self) -> PartId:
        """The home node."""
        return self._home.node

    def space(self, name: str | KeySpace, *, block_bytes: int = 0, layers: int = 1, block_tokens: int = 1) -> Space:
        """The blocks of one layout, all of one size. Nothing is created: equal names and sizes mean the same space.

        `name`: anything, an id of 32 hex digits, or a whole KeySpace. `layers` divide a block into runs of equal size
        that can be read by themselves and have a checksum each.
        """
        if isinstance(name, KeySpace):
            return Space(self._home, _checked(name, name.id), self._timeout, name.id)
        checks.text(name, "a key space's name")
        block_bytes, layers, block_tokens = (
            checks.whole(number, f"key space {name}: {what}")
            for number, what in ((block_bytes, "block_bytes"), (layers, "layers"), (block_tokens, "block_tokens"))
        )
        if block_bytes < 1 or layers < 1 or block_bytes % layers:
            raise PoolError(
                f"key space {name}: {block_bytes} bytes are no {layers} layers of equal size: see block_bytes"
            )
        is_id = len(name) == _ID_DIGITS and all(digit in "0123456789abcdef" for digit in name)
        space_id = name if is_id else key_of("moonpool key space", name).hex()
        space = KeySpace(KeySpaceId(space_id), block_tokens, layers, block_bytes // layers)
        return Space(self._home, _checked(space, name), self._timeout, name)

    def stats(self) -> dict[str, float]:
        """The home node's counters and gauges (docs/operations.md)."""
        stock = self._home.ask(TakeStock())
        assert isinstance(stock, Stock)
        return stock.values

    def close(self) -> None:
        """Leases of this client end: no view of it may be used any more."""
        self._home.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Blocks(Sequence[Bytes | None]):
    """What `get` found, in the order of its keys: read-only bytes, or None for a miss. Use it as a context manager.

    The views may not be used after its end: on the node's host they are the pool's own memory.
    """

    def __init__(self, held: Sequence[Held]) -> None:
        self._held = held
        self._views = [view for part in held for view in part.views]

    @overload
    def __getitem__(self, index: int) -> Bytes | None: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Bytes | None]: ...

    def __getitem__(self, index: int | slice) -> Bytes | Sequence[Bytes | None] | None:
        return self._views[index]

    def __len__(self) -> int:
        return len(self._views)

    @property
    def hits(self) -> int:
        return sum(view is not None for view in self._views)

    def close(self) -> None:
        """Closing twice does nothing. Raises PoolError where the node was lost since `get`, on its host: other blocks
        may have come into the memory of these views before their end.
        """
        with contextlib.ExitStack() as closing:
            for part in self._held:
                closing.callback(part.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # What went wrong in the block is said rather than this.
        with contextlib.nullcontext() if kind is None else contextlib.suppress(PoolError):
            self.close()


class Space:
    """The blocks of one layout. Get one from `Client.space`."""

    def __init__(self, home: Home, space: KeySpace, timeout: float, name: str) -> None:
        self.key_space = space
        self._name = name
        self._home = home
        self._timeout = timeout

    @property
    def block_bytes(self) -> int:
        return self.key_space.block_bytes

    @property
    def layer_bytes(self) -> int:
        return self.key_space.run_bytes

    def keys_of(self, tokens: Sequence[int], salt: str = "") -> tuple[BlockKey, ...]:
        """Of the whole blocks of a prompt: equal keys mean equal prefixes (and an equal salt)."""
        return checks.prompt_keys(tokens, self.key_space, salt)

    # Writing

    def put(self, key: BlockKey, data: Buffer, meta: BlockMeta | None = None) -> bool:
        """Store a block; everybody can read it when this returns. False: it was there already, and stays as it is."""
        return self.put_from(key, [data], meta)

    def put_many(self, keys: Sequence[BlockKey], data: Sequence[Buffer], metas: Sequence[BlockMeta] = ()) -> list[bool]:
        return self.put_from_many(keys, [[buffer] for buffer in _each(data, "data")], metas)

    def put_from(self, key: BlockKey, pieces: Sequence[Buffer], meta: BlockMeta | None = None) -> bool:
        """A block from several buffers, one a layer for example: one behind the other they are its bytes."""
        return self.put_from_many([key], [pieces], [] if meta is None else [meta])[0]

    def put_from_many(
        self, keys: Sequence[BlockKey], pieces: Sequence[Sequence[Buffer]], metas: Sequence[BlockMeta] = ()
    ) -> list[bool]:
        keys = checks.listed(keys)
        pieces = _each(pieces, "pieces")
        _check_length(keys, pieces, "lists of buffers")
        metas = checks.metas_of(self.key_space, keys, metas)
        nbytes = self.block_bytes
        sources = [as_pieces(buffers, nbytes) for buffers in pieces]
        if len(set(keys)) < len(keys):
            return self._put_first(keys, sources, metas)
        return self._in_parts(
            len(keys), lambda part: self._home.put(self.key_space, keys[part], sources[part], metas[part])
        )

    def _put_first(
        self, keys: Sequence[BlockKey], sources: Sequence[Sequence[Bytes]], metas: Sequence[BlockMeta]
    ) -> list[bool]:
        """Of a key that is given again the first block counts; the others find it there."""
        first: dict[BlockKey, int] = {}
        for at, key in enumerate(keys):
            first.setdefault(key, at)
        chosen = list(first.values())
        outcomes = self.put_from_many(
            list(first), [sources[at] for at in chosen], [metas[at] for at in chosen if metas]
        )
        new = dict(zip(chosen, outcomes, strict=True))
        return [new.get(at, False) for at in range(len(keys))]

    # Reading

    def get(self, keys: Sequence[BlockKey], layers: Layers | None = None, wait_until: float | None = None) -> Blocks:
        """These blocks, each by itself: those that are there.

        `layers`: (first, count), only these. `wait_until`: a time of time.monotonic() until which blocks that somebody
        is writing now are waited for; one whose writer gives up is a miss at once.
        """
        keys = checks.listed(keys)
        chosen = checks.layers_of(self.key_space, layers)
        # Where they are held and not copied, parts of them would be no easier to have.
        parts = self._parts(len(keys)) if self._home.copies else _slices(len(keys), KEYS_A_QUESTION)
        with contextlib.ExitStack() as holding:
            try:
                held = [
                    holding.enter_context(
                        contextlib.closing(self._home.get(self.key_space, keys[part], chosen, self._wait(wait_until)))
                    )
                    for part in parts
                ]
            except PoolError as e:
                raise self._named(e) from None
            holding.pop_all()
            return Blocks(held)

    def get_into(
        self,
        key: BlockKey,
        pieces: Sequence[Buffer] | Buffer,
        layers: Layers | None = None,
        wait_until: float | None = None,
    ) -> bool:
        """Copy a block into one buffer, or several, one a layer for example. False: a miss; anything may be in them."""
        return self.get_into_many([key], [pieces], layers, wait_until)[0]

    def get_into_many(
        self,
        keys: Sequence[BlockKey],
        pieces: Sequence[Sequence[Buffer] | Buffer],
        layers: Layers | None = None,
        wait_until: float | None = None,
    ) -> list[bool]:
        keys = checks.listed(keys)
        pieces = _each(pieces, "pieces")
        _check_length(keys, pieces, "lists of buffers")
        chosen = checks.layers_of(self.key_space, layers)
        nbytes = chosen[1] * self.layer_bytes
        targets = [as_pieces(buffers, nbytes, writable=True) for buffers in pieces]
        return self._in_parts(
            len(keys),
            lambda part: self._home.get_into(self.key_space, keys[part], targets[part], chosen, self._wait(wait_until)),
        )

    def exists(self, key: BlockKey) -> bool:
        return self.exists_many([key])[0]

    def exists_many(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Which of them are in the pool, on any node and in any tier."""
        return _yes(self._marks(keys, lambda some: Exists(self.key_space.id, some)))

    def metas(self, keys: Sequence[BlockKey]) -> list[BlockMeta | None]:
        """What was given with those blocks that are on the home node."""
        found: list[BlockMeta | None] = []
        keys = checks.listed(keys)
        for part in self._parts(len(keys)):
            described = self._home.ask(DescribeBlocks(self.key_space.id, packed(keys[part])))
            assert isinstance(described, Described)
            found += described.metas
        return found

    # Keeping

    def pin(self, keys: Sequence[BlockKey], ttl: float) -> list[bool]:
        """Keep these blocks on the home node for `ttl` seconds, whatever else needs room, this client's end or not.

        False for those that are not in the pool. Pinning again prolongs. PoolError beyond the share of the arena
        that may be pinned (`--caching-share`, a quarter); of more than 8192 keys, some are pinned by then.
        """
        ttl = checks.seconds(ttl, "a pin's ttl")
        if not 0 < ttl <= 1e9:
            raise PoolError(f"a pin ends after its time, which is not {ttl} seconds")
        return _yes(self._marks(keys, lambda some: Pin(self.key_space, some, ttl)))

    def unpin(self, keys: Sequence[BlockKey]) -> list[bool]:
        """End these pins, whoever made them. False for those that were not pinned on the home node."""
        return _yes(self._marks(keys, lambda some: Unpin(self.key_space.id, some)))

    def replicas(self, key: BlockKey, n: int = 0) -> int:
        """On how many nodes it is. With `n` it is copied to so many, as far as there are; on how many it will be then.

        It returns when the copies are ordered. PoolError where the Conductor, which orders them, does not answer.
        """
        n = checks.whole(n, "a number of nodes")
        if not 0 <= n <= MOST_REPLICAS:
            raise PoolError(f"a block is on 0 to {MOST_REPLICAS} nodes, not on {n}")
        answer = self._home.ask(CountHolders(self.key_space, packed([key]), n))
        assert isinstance(answer, Numbers)
        return answer.numbers[0]

    def remove(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Take these blocks out of the pool, on all nodes. False for those that were not there.

        Raises PoolError that names those which somebody reads or has pinned; the others are gone all the same.
        """
        keys = checks.listed(keys)
        marks = self._marks(keys, lambda some: Remove(self.key_space.id, some))
        why = {LEASED: "read by somebody", PINNED: "pinned", BUSY: "on its way to or from an SSD"}
        kept = [f"{key.hex()} ({why[mark]})" for key, mark in zip(keys, marks, strict=True) if mark in why]
        if kept:
            more = f" and {len(kept) - 8} more" if len(kept) > 8 else ""
            raise PoolError(f"not removed: {', '.join(kept[:8])}{more}; release or unpin first")
        return _yes(marks)

    def _marks(self, keys: Sequence[BlockKey], question: Callable[[bytes], Question]) -> bytes:
        """`question`: of packed keys."""
        keys = checks.listed(keys)
        return b"".join(self._ask_marks(question(packed(keys[part]))) for part in _slices(len(keys), KEYS_A_QUESTION))

    def _ask_marks(self, question: Question) -> bytes:
        try:
            answer = self._home.ask(question)
        except PoolError as e:
            raise self._named(e) from None
        assert isinstance(answer, Marks)
        return answer.marks

    def _named(self, error: PoolError) -> PoolError:
        """Nodes know a space by its id alone, which its user has never seen."""
        return PoolError(str(error).replace(self.key_space.id, self._name))

    def _wait(self, wait_until: float | None) -> Wait:
        if wait_until is None:
            return Wait(self._timeout, False)
        return Wait(checks.seconds_until(wait_until, time.monotonic()), True)

    def _parts(self, count: int) -> list[slice]:
        """Of so many blocks, whose places in the arena and descriptions a node should not be asked for all at once."""
        space = self.key_space
        said = 64 + 8 * space.runs + 4 * min(space.block_tokens, MAX_META_TOKENS)
        size = min(KEYS_A_CALL, self._home.batch_bytes // page_aligned(space.block_bytes), SAID_BYTES // said)
        return _slices(count, max(1, size))

    def _in_parts(self, count: int, work: Callable[[slice], list[T]]) -> list[T]:
        try:
            return [outcome for part in self._parts(count) for outcome in work(part)]
        except PoolError as e:
            raise self._named(e) from None


def _slices(count: int, size: int) -> list[slice]:
    """At least one: what is asked about nothing is asked all the same."""
    return [slice(start, min(start + size, count)) for start in range(0, max(count, 1), size)]


def _checked(space: KeySpace, name: str) -> KeySpace:
    """Raises PoolError for what no node would take."""
    try:
        return msgspec.convert(msgspec.to_builtins(space), KeySpace)
    except (msgspec.ValidationError, TypeError) as e:
        raise PoolError(f"key space {name}: {e}") from None


def _yes(marks: bytes) -> list[bool]:
    return [mark == YES for mark in marks]


def _each(things: Sequence[T] | Iterable[T], what: str) -> Sequence[T]:
    """One a key. Raises PoolError for one that would pass for many."""
    if isinstance(things, str | bytes | bytearray | memoryview) or not isinstance(things, Iterable):
        raise PoolError(f"{what}: give a list, one a key, not a {type(things).__name__}")
    return things if isinstance(things, list | tuple) else list(things)


def _check_length(keys: Sequence[BlockKey], others: Sequence[object], what: str) -> None:
    if len(keys) != len(others):
        raise PoolError(f"{len(keys)} keys with {len(others)} {what}")
