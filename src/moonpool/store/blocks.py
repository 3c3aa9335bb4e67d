"""The blocks in a node's arena: which are readable, which are pinned, which go when room is needed.

A block's life: allocated for a room (private, filling) → promoted (resident: any reader may lease it) → discarded.
A private block may also be discarded without ever being promoted. Not thread-safe: the ledger's lock covers it.

A key is *filling* while some private block for it may still become readable; whoever waits for the key waits for that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from dataclasses import dataclass, field

from msgspec import Struct

from moonpool.core.eviction import Eviction
from moonpool.core.vocabulary import BlockKey, KeySpace, KeySpaceId, Tier
from moonpool.store.board import Board
from moonpool.store.extents import Extents, page_aligned
from moonpool.store.spaces import Spaces

Name = tuple[KeySpaceId, BlockKey]
Wanted = tuple[BlockKey, BlockKey | None, int, bytes]
"""A block's key, that of the block before it in its prompt, its index there, its token ids if they are known."""


class Block(Struct, eq=False, gc=False):
    """One extent of the arena: a whole block, or (key None) the partial tail of a prompt."""

    offset: int
    space: KeySpace
    run_bytes: int
    key: BlockKey | None
    parent: BlockKey | None
    index: int
    """In its prompt."""
    checksums: list[int]
    tokens: bytes = b""
    """Its token ids (u32, little-endian), where whoever put it gave them."""
    complete: int = 0
    """Bitmask of the runs that are all there."""
    arriving: int = 0
    """Bitmask of the runs that a transfer is writing now."""
    transfers: int = 0
    """Running transfers into this block; its bytes are freed only after them."""
    resident: bool = False
    saving: bool = False
    """Its bytes are being written to an SSD: it is not evicted meanwhile."""
    discarded: bool = False
    settled: bool = False
    """It is readable, or will never be: nobody waits for it."""

    @property
    def nbytes(self) -> int:
        return self.run_bytes * self.space.runs

    @property
    def is_complete(self) -> bool:
        return self.complete == (1 << self.space.runs) - 1

    @property
    def is_untouched(self) -> bool:
        """Nobody has written any of it, or is at it."""
        return not (self.complete or self.arriving or self.resident)

    @property
    def name(self) -> Name:
        assert self.key is not None
        return self.space.id, self.key


class Change(Struct, gc=False):
    """A block has come to a tier (stored) or has left it. What is in DRAM is readable."""

    stored: bool
    name: Name
    tier: Tier = Tier.DRAM


@dataclass(slots=True)
class Blocks:
    extents: Extents
    on_change: Callable[[Sequence[Change]], None]
    eviction: Eviction[Name]
    board: Board | None = None
    """Where clients of this host see what is readable."""
    spaces: Spaces = field(default_factory=Spaces)
    resident: dict[Name, Block] = field(default_factory=dict)
    places: dict[int, Name] = field(default_factory=dict)
    """The readable blocks by offset."""
    lingering: dict[int, Block] = field(default_factory=dict)
    """Discarded, by offset, but a transfer still writes into them."""
    saving: dict[Name, Block] = field(default_factory=dict)
    """The few that are being written to an SSD now."""
    is_kept: Callable[[Name], bool] = lambda name: False
    """Whether an SSD has it too: then it is not lost with its place here."""
    gives_way: Callable[[Block], bool] = lambda block: True
    """Whether what an SSD has of this block's key is the same bytes, or is forgotten for them: a node never has two
    versions of a key."""
    on_come: Callable[[Sequence[Name]], None] = lambda names: None
    on_go: Callable[[Name], None] = lambda name: None
    """Blocks have come to DRAM, or one has left it: what an SSD has may hang on it."""
    filling: dict[Name, int] = field(default_factory=dict)
    """Private blocks, by key, that are not settled."""
    on_settled: Callable[[Sequence[Name]], None] = lambda names: None
    """Some of them are; it may only wake somebody."""
    pinned: Collection[Name] = ()
    """Keys that may not leave the tier they are in (`Pins`)."""
    _untold: list[Block] = field(default_factory=list)
    evictions: int = 0
    demotions: int = 0
    """Evictions of what an SSD has kept."""

    def leading(self, space: KeySpaceId, keys: Sequence[BlockKey]) -> list[Block]:
        found = []
        for key in keys:
            block = self.resident.get((space, key))
            if block is None:
                break
            found.append(block)
        return found

    def could_hold(self, nbytes: int) -> bool:
        """False means that not even an empty list of unpinned blocks would make this much room."""
        return nbytes <= self.extents.free + self.eviction.evictable_bytes - self.saving_bytes()

    def pinned_bytes_beside(self, names: Container[Name]) -> int:
        """What blocks take here that may not leave, these excepted."""
        beside = [self.resident[name] for name in self.pinned if name not in names and name in self.resident]
        return sum(page_aligned(block.nbytes) for block in beside)

    def allocate(
        self, space: KeySpace, key: BlockKey, parent: BlockKey | None, index: int, tokens: bytes
    ) -> Block | None:
        """Space for one block, at the cost of unpinned ones where it must be; None if there is none."""
        offset = self._make_room(space.block_bytes)
        if offset is None:
            return None
        self.spaces.came(space)
        name = space.id, key
        self.filling[name] = self.filling.get(name, 0) + 1
        return Block(offset, space, space.run_bytes, key, parent, index, [0] * space.runs, tokens)

    def allocate_tail(self, space: KeySpace, index: int, run_bytes: int) -> Block | None:
        """As `allocate`, for the last tokens of a prompt, which are no whole block."""
        offset = self._make_room(run_bytes * space.runs)
        if offset is None:
            return None
        self.spaces.came(space)
        return Block(offset, space, run_bytes, None, None, index, [0] * space.runs, settled=True)

    def _make_room(self, nbytes: int) -> int | None:
        if not self.could_hold(page_aligned(nbytes)):
            return None
        offset = self.extents.allocate(nbytes)
        while offset is None:
            candidates = self.eviction.victims(page_aligned(nbytes) + self.saving_bytes())
            victims = [name for name in candidates if name not in self.saving]
            if not victims:
                return None
            for victim in victims:
                self.evict(victim)
                offset = self.extents.allocate(nbytes)
                if offset is not None:
                    break
            else:
                # Enough is free, but here and there: what lies between goes now, however lately it was used.
                for at in self.extents.in_the_way(nbytes, self._may_go) or ():
                    self.evict(self.places[at])
                offset = self.extents.allocate(nbytes)
        return offset

    def allocate_row(self, space: KeySpace, wanted: Sequence[Wanted]) -> list[Block] | None:
        """As `allocate`, for several whole blocks at once; None where they do not lie in one piece of free memory."""
        row = self.extents.allocate_row(space.block_bytes, len(wanted))
        if row is None:
            return None
        filling, id_, run_bytes, runs = self.filling, space.id, space.run_bytes, space.runs
        self.spaces.came(space, len(wanted))
        for key, _, _, _ in wanted:
            name = id_, key
            filling[name] = filling.get(name, 0) + 1
        return [
            Block(offset, space, run_bytes, key, parent, index, [0] * runs, tokens)
            for offset, (key, parent, index, tokens) in zip(row, wanted, strict=True)
        ]

    def promote(self, space: KeySpace, blocks: Iterable[Block]) -> None:
        """Make complete blocks readable and pin them. Needs `tell`.

        One whose key is readable already stays private, and so does one of which an SSD has another version in use.
        """
        id_, size = space.id, page_aligned(space.block_bytes)
        resident, places, pinned, add = self.resident, self.places, self.pinned, self.eviction.add
        come: dict[Name, Block] = {}
        for block in blocks:
            name = block.name
            if name in resident or (self.is_kept(name) and not self.gives_way(block)):
                continue
            come[name] = resident[name] = block
            block.resident = True
            places[block.offset] = name
            parent = None if block.parent is None else (id_, block.parent)
            add(name, size, parent, block.index, 2 if name in pinned else 1)
        self._untold += come.values()
        self.on_come([*come])
        self.settle(come.values())

    def tell(self) -> None:
        """Say of all that `promote` made readable that it is there: to clients of this host, and to the directory.

        They ask the node for what they do not know, so it may come after what cannot wait.
        """
        if self._untold:
            told, self._untold = self._untold, []
            if self.board is not None:
                self.board.show([(block.name, block.offset, block.nbytes) for block in told])
            self.on_change([Change(True, block.name) for block in told])

    def settle(self, blocks: Iterable[Block]) -> None:
        names, filling = [], self.filling
        for block in blocks:
            if not block.settled:
                block.settled = True
                names.append(name := block.name)
                if others := filling.pop(name) - 1:
                    filling[name] = others
        self.on_settled(names)

    def evict(self, name: Name) -> None:
        self.drop(name)
        self.evictions += 1
        self.demotions += self.is_kept(name)

    def drop(self, name: Name) -> None:
        """A block that is neither pinned nor being saved is readable no more."""
        self.tell()
        self.eviction.remove(name)
        block = self.resident.pop(name)
        if self.board is not None:
            self.board.hide(*name)
        del self.places[block.offset]
        block.resident = False
        block.discarded = True
        # Whatever claims on it are still open: they cover only runs that were not complete, so no byte is to come.
        self._release(block)
        self.on_go(name)
        self.on_change([Change(False, name)])

    def discard(self, block: Block) -> None:
        """Free a block that is not readable, now or when the last transfer into it has ended."""
        block.discarded = True
        self.settle([block])
        if block.transfers:
            self.lingering[block.offset] = block
        else:
            self._release(block)

    def begin_transfer(self, block: Block, runs: int) -> None:
        """`runs`: bitmask of those that the transfer will write."""
        block.transfers += 1
        block.arriving |= runs

    def end_transfer(self, block: Block, runs: int) -> None:
        block.transfers -= 1
        block.arriving &= ~runs
        if not block.transfers and self.lingering.get(block.offset) is block:
            del self.lingering[block.offset]
            self._release(block)

    def _release(self, block: Block) -> None:
        self.extents.release(block.offset)
        self.spaces.left(block.space)

    def _may_go(self, offset: int) -> bool:
        name = self.places.get(offset)
        return name is not None and name not in self.saving and not self.eviction.pins(name)

    def saving_bytes(self) -> int:
        """Of the blocks that would be evictable if they were not being written to an SSD."""
        return sum(page_aligned(block.nbytes) for name, block in self.saving.items() if not self.eviction.pins(name))

    def check_integrity(self, private: Sequence[Block]) -> None:
        """`private`: the blocks that rooms own and that are not resident."""
        self.extents.check_integrity()
        self.eviction.check_integrity()
        assert all(block.resident and block.is_complete and not block.discarded for block in self.resident.values())
        assert all(name in self.eviction for name in self.resident), "a readable block is unknown to eviction"
        assert len(self.eviction) == len(self.resident)
        if self.board is not None:
            self.board.check_integrity({name: (block.offset, block.nbytes) for name, block in self.resident.items()})
        assert self.places == {block.offset: name for name, block in self.resident.items()}
        assert all(block.transfers > 0 and block.discarded for block in self.lingering.values())
        assert self.filling == Counter(block.name for block in private if not block.settled)
        held = [*self.resident.values(), *private, *self.lingering.values()]
        assert len({block.offset for block in held}) == len(held), "two blocks share an extent"
        assert sum(page_aligned(block.nbytes) for block in held) == self.extents.used, "bytes are lost or counted twice"
