"""A node's tiers against a dict: whatever disks and crashes do, a key is served as it was put, or missed.

The SSD's threads are still; each step of theirs is a step of the test, so that anything may come between. The index is
a real file, the slab lies in memory.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from moonpool.core.events import BlocksStored, Snapshot
from moonpool.core.vocabulary import BlockKey, Incarnation, KeySpace, KeySpaceId, PartId, Tier
from moonpool.messenger.transfer import Bytes
from moonpool.store.arena import Arena
from moonpool.store.disks import Disks, _Volume
from moonpool.store.extents import PAGE_BYTES
from moonpool.store.leases import Lease
from moonpool.store.ledger import Ledger
from moonpool.store.loader import Hold, Loader
from moonpool.store.rooms import ClientId
from moonpool.store.shelf import Saves
from moonpool.store.slab import Slab
from tests.soak import often

from .kit import bytes_of, keys_of, run_checksums

SPACE = KeySpace(KeySpaceId("aa"), block_tokens=4, runs=3, run_bytes=1024)
DRAM_PAGES, SSD_PAGES = 6, 10
"""A block takes a page; the SSD's are divided over two directories."""
CHAINS = [keys_of("a", 4), keys_of("b", 4), [*keys_of("a", 2), *keys_of("c", 2)], keys_of("d", 3)]
CONTENTS = {key: bytes_of(key, SPACE.block_bytes) for chain in CHAINS for key in chain}

prompts = st.tuples(st.sampled_from(CHAINS), st.integers(1, 4)).map(lambda choice: choice[0][: choice[1]])
clients = st.integers(1, 2).map(ClientId)
volumes = st.integers(0, 1)
picks = st.integers(0, 1000)


class MemorySlab(Slab):
    """Fails when it is told so, in the middle of what it does."""

    def __init__(self, path: Path, nbytes: int) -> None:
        self.path, self.size, self.is_direct = path, nbytes // PAGE_BYTES * PAGE_BYTES, True
        self.bytes = np.zeros(self.size, np.uint8)
        self.is_broken = False

    def write(self, offset: int, buffers: Sequence[Bytes]) -> None:
        for number, buffer in enumerate(buffers):
            if self.is_broken and number == len(buffers) // 2:
                self.bytes[offset : offset + buffer.nbytes // 2] = buffer[: buffer.nbytes // 2]
                raise OSError(errno.ENOSPC, "No space left on device")
            self.bytes[offset : offset + buffer.nbytes] = buffer
            offset += buffer.nbytes

    def read(self, offset: int, buffers: Sequence[Bytes]) -> None:
        if self.is_broken:
            raise OSError(errno.EIO, "Input/output error")
        for buffer in buffers:
            buffer[:] = self.bytes[offset : offset + buffer.nbytes]
            offset += buffer.nbytes

    def close(self) -> None:
        return


class StillDisks(Disks):
    """Its threads end as they begin."""

    def _save_all(self, volume: _Volume) -> None:
        return

    def _load_all(self, volume: _Volume) -> None:
        return


class TiersMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="mp-tiers-"))
        self.slabs: dict[Path, MemorySlab] = {}
        self.damaged: set[BlockKey] = set()
        """Some copy of it may have been scratched, cut or overwritten: it may be missed for that."""
        self.written: set[BlockKey] = set()
        self.start()

    def start(self) -> None:
        self.arena = Arena(DRAM_PAGES * PAGE_BYTES)
        self.ledger = Ledger(self.arena.extents, PartId("node-0"), Incarnation("1"), board=self.arena.board)
        directories = [self.folder / "0", self.folder / "1"]
        nbytes = SSD_PAGES * PAGE_BYTES
        self.disks = StillDisks(self.arena, self.ledger.shelf, directories, nbytes, open_slab=self.slab)
        self.loader = Loader(self.arena, self.ledger, self.disks)
        self.leases: list[Lease] = []
        self.holds: list[Hold] = []
        self.saving: dict[int, Saves] = {}
        self.known: dict[Tier, set[BlockKey]] = {tier: set() for tier in Tier}
        self.ledger.ask_snapshot()
        self.listen()

    def slab(self, path: Path, nbytes: int) -> MemorySlab:
        slab = self.slabs.setdefault(path, MemorySlab(path, nbytes))
        slab.is_broken = False
        return slab

    def listen(self) -> None:
        """The directory's view."""
        while (message := self.ledger.next_announcement()) is not None:
            if isinstance(message, Snapshot):
                self.known = {tier: set() for tier in Tier}
                for _, tier, keys in message.blocks:
                    self.known[tier].update(keys)
            elif isinstance(message, BlocksStored):
                assert self.known[message.tier].isdisjoint(message.keys)
                self.known[message.tier].update(message.keys)
            else:
                assert self.known[message.tier].issuperset(message.keys)
                self.known[message.tier].difference_update(message.keys)

    def volume(self, number: int) -> _Volume:
        return self.disks._volumes[number]

    def view(self, offset: int) -> bytes:
        return bytes(self.arena.slice(offset, SPACE.block_bytes))

    # What may happen ---------------------------------------------------------------------------------------------

    @rule(client=clients, keys=prompts, whole=st.integers(0, 4))
    def put(self, client: ClientId, keys: list[BlockKey], whole: int) -> None:
        """All, or as far as the client got when it died: half a block more."""
        room = self.ledger.rooms.open(client, SPACE, keys)
        for index, key in enumerate(keys):
            block = room.blocks[index]
            if block is None or block.resident:
                continue
            runs = SPACE.runs if index < whole else 1
            data = CONTENTS[key][: runs * SPACE.run_bytes]
            self.arena.slice(block.offset, data.nbytes)[:] = data
            self.ledger.rooms.complete(client, room.id, [(index, 0, runs)], run_checksums(data, runs))
            if runs < SPACE.runs:
                break
            self.written.add(key)
        self.ledger.rooms.close(client, room.id)

    @rule(client=clients, keys=prompts)
    def lease(self, client: ClientId, keys: list[BlockKey]) -> None:
        lease = self.ledger.leases.leading(client, SPACE, keys)
        assert [block.key for block in lease.blocks] == keys[: len(lease.blocks)]
        self.leases.append(lease)

    @precondition(lambda self: self.leases)
    @rule(pick=picks)
    def release(self, pick: int) -> None:
        lease = self.leases.pop(pick % len(self.leases))
        self.ledger.leases.end(lease.client, lease.id)

    @rule(client=clients)
    def die(self, client: ClientId) -> None:
        self.ledger.leave_all(client)
        self.leases = [lease for lease in self.leases if lease.client != client]

    @rule(number=volumes, most=st.integers(1, 3))
    def begin_save(self, number: int, most: int) -> None:
        if number not in self.saving:
            saves = self.ledger.shelf.next_saves(number, most, DRAM_PAGES * PAGE_BYTES)
            if saves is not None:
                self.saving[number] = saves

    @precondition(lambda self: self.saving)
    @rule(pick=picks)
    def end_save(self, pick: int) -> None:
        number = sorted(self.saving)[pick % len(self.saving)]
        saves = self.saving.pop(number)
        is_written = self.disks._save(self.volume(number), saves)
        assert is_written != self.slabs[self.volume(number).slab.path].is_broken or not saves.blocks
        self.ledger.shelf.saved(saves, is_written)

    @rule(number=volumes)
    def save(self, number: int) -> None:
        self.begin_save(number, 3)
        if number in self.saving:
            self.end_save(sorted(self.saving).index(number))

    @rule(chains=st.permutations(CHAINS))
    def work(self, chains: list[list[BlockKey]]) -> None:
        """What a node does most of the time; chance alone rarely gets it to give up what was saved."""
        for chain in chains:
            self.put(ClientId(1), chain, 4)
            for number in (0, 1):
                self.save(number)

    @rule(keys=prompts)
    def begin_load(self, keys: list[BlockKey]) -> None:
        self.holds.append(self.loader.load_blocking(SPACE.id, keys, seconds=0.0))

    @rule(number=volumes)
    def read(self, number: int) -> None:
        queue = self.volume(number).queue
        if queue:
            self.disks._load(self.volume(number), queue.popleft())

    @precondition(lambda self: self.holds)
    @rule(pick=picks)
    def let_go(self, pick: int) -> None:
        self.holds.pop(pick % len(self.holds)).close()

    @rule(pick=picks)
    def get_from_ssd(self, pick: int) -> None:
        cold = sorted(self.known[Tier.SSD] - self.known[Tier.DRAM])
        if cold:
            self.get(cold[pick % len(cold)])

    @rule(key=st.sampled_from(sorted(CONTENTS)))
    def get(self, key: BlockKey) -> None:
        """What the directory was told of is served, unless somebody broke it."""
        self.listen()
        is_on_ssd, is_in_dram = key in self.known[Tier.SSD], key in self.known[Tier.DRAM]
        may_fail = key in self.damaged or any(slab.is_broken for slab in self.slabs.values())
        has_room = self.ledger._blocks.could_hold(PAGE_BYTES)
        with self.loader.load_blocking(SPACE.id, [key], seconds=0.0):
            for number in (0, 1):
                while self.volume(number).queue:
                    self.read(number)
            lease = self.ledger.leases.leading(ClientId(9), SPACE, [key])
            assert [self.view(block.offset) for block in lease.blocks] == [bytes(CONTENTS[key])] * len(lease.blocks)
            assert not lease.blocks or key in self.written
            if is_in_dram or (is_on_ssd and has_room and not may_fail):
                assert lease.blocks, "what was kept is served"
            self.ledger.leases.end(ClientId(9), lease.id)

    @rule(number=volumes, broken=st.booleans())
    def break_or_mend(self, number: int, broken: bool) -> None:
        self.slabs[self.volume(number).slab.path].is_broken = broken

    @precondition(lambda self: self.known[Tier.SSD])
    @rule(pick=picks, at=st.integers(0, SPACE.block_bytes - 1))
    def scratch(self, pick: int, at: int) -> None:
        entries = [shelved for number in (0, 1) for shelved in self.ledger.shelf.entries(number)]
        shelved = entries[pick % len(entries)]
        self.slabs[self.volume(shelved.volume).slab.path].bytes[shelved.offset + at] ^= 0x10
        self.damaged.add(shelved.key)

    @rule(number=volumes, cut=st.sampled_from([0, 0, 0, 1, 37, 200]), steps=st.integers(0, 3))
    def crash(self, number: int, cut: int, steps: int) -> None:
        """`kill -9`, perhaps in the middle of what is being saved; perhaps the power failed and the index is short."""
        self.listen()
        kept = set(self.known[Tier.SSD])
        for volume, saves in self.saving.items():
            self.save_a_bit(self.volume(volume), saves, steps)
            kept -= {shelved.key for shelved in saves.removed}
        self.disks.close()
        self.holds.clear()
        self.arena.close()
        index = self.folder / str(number) / "index"
        # A volume that was given up has none.
        if cut and index.exists():
            os.truncate(index, max(0, index.stat().st_size - cut))
        self.start()
        assert not self.known[Tier.DRAM]
        assert self.known[Tier.SSD] <= self.written
        if cut:
            # A removal that is forgotten brings back an entry whose bytes are another's.
            self.damaged |= set(CONTENTS)
        else:
            assert kept <= self.known[Tier.SSD], "what was saved is found again"

    def save_a_bit(self, volume: _Volume, saves: Saves, steps: int) -> None:
        if steps > 0 and saves.removed:
            volume.index.append((), saves.removed)
        for shelved, block in saves.blocks if steps > 1 else ():
            half = self.arena.slice(block.offset, PAGE_BYTES // (1 if steps > 2 else 2))
            self.slabs[volume.slab.path].bytes[shelved.offset : shelved.offset + half.nbytes] = half
        if steps > 2:
            volume.index.append([shelved for shelved, _ in saves.blocks], ())

    # What always holds -------------------------------------------------------------------------------------------

    @invariant()
    def leased_blocks_are_there_and_exact(self) -> None:
        for lease in self.leases:
            for block in lease.blocks:
                assert block.key is not None
                assert self.ledger._blocks.resident[block.name] is block, "a leased block was evicted"
                assert self.view(block.offset) == bytes(CONTENTS[block.key])

    @invariant()
    def all_that_is_readable_is_exact(self) -> None:
        for (_, key), block in self.ledger._blocks.resident.items():
            assert self.view(block.offset) == bytes(CONTENTS[key])

    @invariant()
    def books_agree(self) -> None:
        self.ledger.check_integrity()
        self.listen()
        assert self.known[Tier.DRAM] == {key for _, key in self.ledger._blocks.resident}
        assert self.known[Tier.SSD] == {key for _, key in self.ledger.shelf.names()}

    def teardown(self) -> None:
        for number in (0, 1):
            while self.volume(number).queue:
                self.read(number)
        for hold in self.holds:
            hold.close()
        for number, saves in self.saving.items():
            self.ledger.shelf.saved(saves, self.disks._save(self.volume(number), saves))
        for client in (1, 2):
            self.ledger.leave_all(ClientId(client))
        self.ledger.check_integrity()
        counters = self.ledger.counters()
        assert (counters["rooms"], counters["leases"]) == (0, 0)
        assert counters["used_bytes"] == counters["evictable_bytes"]
        self.disks.close()
        self.arena.close()
        shutil.rmtree(self.folder)


TestTiers = TiersMachine.TestCase
TestTiers.settings = settings(max_examples=often(40), stateful_step_count=50)
