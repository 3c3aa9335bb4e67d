"""Rooms: space for the KV of one prompt, held until its writers and readers are through with it.

A room that has *ended* takes no more runs and no more readers, but its bytes stay until the clients that may still
read or write them have closed it or died. Not thread-safe: the ledger's lock covers it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NewType

from moonpool.core.vocabulary import BLOCK_KEY_BYTES, BlockKey, BlockMeta, KeySpace, Peer, RequestId
from moonpool.errors import PoolError
from moonpool.messenger.transfer import TAIL
from moonpool.store.blocks import Block, Blocks, Name
from moonpool.store.extents import page_aligned

ClientId = NewType("ClientId", int)
RoomId = NewType("RoomId", int)
Waiter = Future["Room | None"]

MAX_META_TOKENS = 1 << 16
"""So that the SSD's record of a block stays small."""


@dataclass(slots=True, eq=False)
class Room:
    id: RoomId
    space: KeySpace
    blocks: list[Block | None]
    """By index in the keys: readable before (pinned), or the room's own; None: there was no room for it."""
    lacking: tuple[int, ...]
    """Indices of the keys that were not readable when the room was opened."""
    tail: Block | None
    tail_tokens: int
    reserved: tuple[RequestId, int] | None = None
    """(request, attempt) of a hand-over room, or of a caching room that others join; None: any other caching room."""
    opener: ClientId | None = None
    """Of a caching room that others join."""
    gateway: Peer | None = None
    """Hand-over rooms: whose request it is."""
    expires: float = 0.0
    """Hand-over rooms: when it ends if no local client is bound to it (monotonic)."""
    writers: set[ClientId] = field(default_factory=set)
    """Local clients; of a caching room the one that opened it."""
    readers: set[ClientId] = field(default_factory=set)
    """Local clients that were given the contents."""
    waiters: dict[Waiter, ClientId] = field(default_factory=dict)
    gone: Collection[Name] = ()
    """Blocks that were removed since they were asked for elsewhere (`copies`): they do not become readable."""
    unfinished: int = 0
    """The room's own blocks, the tail included, that are not complete."""
    ended: bool = False

    @property
    def is_handed_over(self) -> bool:
        return self.reserved is not None and self.opener is None

    def block(self, index: int) -> Block | None:
        """Raises PoolError for an index that the room has not got."""
        if index == TAIL:
            return self.tail
        if not 0 <= index < len(self.blocks):
            raise PoolError(f"room {self.id} has {len(self.blocks)} blocks, no block {index}")
        return self.blocks[index]

    def own(self) -> list[Block]:
        """The blocks that nobody but this room has, complete or not."""
        owned = [block for block in self.blocks if block is not None and not block.resident]
        return owned if self.tail is None else [*owned, self.tail]

    def pinned(self) -> list[Block]:
        return [block for block in self.blocks if block is not None and block.resident]


def open_room(
    blocks: Blocks,
    number: RoomId,
    space: KeySpace,
    keys: Sequence[BlockKey],
    tail_tokens: int,
    whole: bool,
    budget: int | None = None,
    metas: Sequence[BlockMeta] | None = None,
    leaves_kept: bool = False,
) -> Room | None:
    """Pin what is readable, take space for the rest. `whole`: all of it or None; else as many leading keys as fit.

    `budget`: the most bytes that the room of a client with a quota holds, readable blocks included. `metas`: one a
    key; without them the keys are a prompt's, from its first block on. `leaves_kept`: what an SSD has is not lacking.
    """
    affordable = len(keys) if budget is None else max(0, budget) // page_aligned(space.block_bytes)
    if budget is not None:
        tail_tokens = 0
    room = Room(number, space, [None] * len(keys), tuple(range(len(keys))), None, tail_tokens)
    names = [(space.id, key) for key in keys]
    if not blocks.resident.keys().isdisjoint(names):
        room.blocks = [blocks.resident.get(name) if at < affordable else None for at, name in enumerate(names)]
        room.lacking = tuple([at for at, block in enumerate(room.blocks) if block is None])
        blocks.eviction.pin([block.name for block in room.pinned()])
    if leaves_kept:
        room.lacking = tuple([at for at in room.lacking if not blocks.is_kept(names[at])])
    if not _take(blocks, room, keys, whole, affordable, metas):
        free_room(blocks, room)
        return None
    room.unfinished = len(room.own())
    return room


def _take(
    blocks: Blocks,
    room: Room,
    keys: Sequence[BlockKey],
    whole: bool,
    affordable: int,
    metas: Sequence[BlockMeta] | None,
) -> bool:
    if whole and not blocks.could_hold(bytes_lacking(room)):
        return False
    # The tail first: a hand-over needs it in any case, and it is small.
    if room.tail_tokens:
        room.tail = blocks.allocate_tail(room.space, len(keys), room.space.tail_run_bytes(room.tail_tokens))
        if room.tail is None and whole:
            return False
    lacking = room.lacking if affordable >= len(keys) else [index for index in room.lacking if index < affordable]
    if metas is None:
        wanted = [(keys[index], keys[index - 1] if index else None, index, b"") for index in lacking]
    else:
        wanted = [(keys[at], meta.parent, meta.index, meta.tokens) for at in lacking for meta in (metas[at],)]
    row = blocks.allocate_row(room.space, wanted) if len(wanted) > 1 else None
    if row is not None and len(row) == len(keys):
        room.blocks = [*row]
        return True
    for position, index in enumerate(lacking):
        block = row[position] if row is not None else blocks.allocate(room.space, *wanted[position])
        if block is None:
            return not whole
        room.blocks[index] = block
    return True


def bytes_lacking(room: Room) -> int:
    tail_bytes = room.space.tail_run_bytes(room.tail_tokens) * room.space.runs
    return page_aligned(tail_bytes) + len(room.lacking) * page_aligned(room.space.block_bytes)


def free_room(blocks: Blocks, room: Room) -> None:
    """Give back everything the room holds. Nobody may read or write it any more, running transfers excepted."""
    for block in room.own():
        blocks.discard(block)
    blocks.eviction.unpin([block.name for block in room.pinned()])
    room.blocks = [None] * len(room.blocks)
    room.tail = None


def finish_runs(
    blocks: Blocks, room: Room, written: Iterable[tuple[Block, int]], on_finished: Callable[[Room], None]
) -> None:
    """Of each of these own blocks of the room, these runs (bitmask) are complete, their checksums noted."""
    finished: list[Block] = []
    for block, runs in written:
        if not block.is_complete:
            block.complete |= runs
            if block.is_complete:
                finished.append(block)
    _finish(blocks, room, finished, on_finished)
    blocks.tell()


def finish_blocks(blocks: Blocks, room: Room, written: Sequence[Block], on_finished: Callable[[Room], None]) -> None:
    """As `finish_runs`, of blocks of which nothing was there yet. Needs `Blocks.tell`."""
    whole = (1 << room.space.runs) - 1
    for block in written:
        block.complete = whole
    _finish(blocks, room, written, on_finished)


def _finish(blocks: Blocks, room: Room, finished: Sequence[Block], on_finished: Callable[[Room], None]) -> None:
    if finished:
        room.unfinished -= len(finished)
        keyed = [block for block in finished if block.key is not None]
        if room.gone:
            blocks.settle([block for block in keyed if block.name in room.gone])
            keyed = [block for block in keyed if block.name not in room.gone]
        blocks.promote(room.space, keyed)
        if not room.unfinished:
            on_finished(room)


def name_tokens(room: Room, tokens: bytes) -> None:
    """Of its whole blocks, as far as `tokens` go; those whose token ids are known keep them."""
    size = 4 * room.space.block_tokens
    if room.space.block_tokens > MAX_META_TOKENS:
        return
    for index, block in enumerate(room.blocks[: len(tokens) // size]):
        if block is not None and not block.tokens:
            block.tokens = tokens[index * size : (index + 1) * size]


def mask_of(block: Block, first: int, count: int) -> int:
    """The bitmask of these runs of the block. Raises PoolError where it has not got them."""
    if first < 0 or count < 1 or first + count > block.space.runs:
        raise PoolError(f"a block has {block.space.runs} runs, not runs {first} to {first + count - 1}")
    return (1 << count) - 1 << first


def check_metas(space: KeySpace, keys: Sequence[BlockKey], metas: Sequence[BlockMeta]) -> None:
    """Raises PoolError where they are no metas of these keys."""
    if len(metas) != len(keys):
        raise PoolError(f"{len(keys)} keys with {len(metas)} metas")
    for meta in metas:
        if meta.parent is not None and len(meta.parent) != BLOCK_KEY_BYTES:
            raise PoolError(f"the parent's key has {len(meta.parent)} bytes, not {BLOCK_KEY_BYTES}")
        most = min(space.block_tokens, MAX_META_TOKENS)
        if len(meta.tokens) > 4 * most or len(meta.tokens) % 4:
            raise PoolError(
                f"a block of key space {space.id} is put with at most {most} tokens of 4 bytes, "
                f"not {len(meta.tokens)} bytes of them"
            )
