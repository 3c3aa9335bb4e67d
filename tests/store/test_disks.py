"""Disks that lie, fail, fill up and stand still; indexes that were cut, scratched, or written by the future."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import struct
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from moonpool.core.vocabulary import BlockKey, KeySpace, KeySpaceId
from moonpool.errors import ConfigError, PoolError
from moonpool.messenger.questions import YES
from moonpool.messenger.transfer import Bytes
from moonpool.store.index import Index, recover
from moonpool.store.slab import Slab

from .kit import BLOCK, SECONDS, SPACE, bytes_of, eventually, keys_of
from .tiered import Tiered

KEYS = keys_of("a", 24)


class FaultySlab(Slab):
    """A slab whose operations fail, or wait, when it is told so."""

    def __init__(self, path: Path, nbytes: int) -> None:
        super().__init__(path, nbytes)
        self.fail_reads: OSError | None = None
        self.fail_writes: OSError | None = None
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def write(self, offset: int, buffers: Sequence[Bytes]) -> None:
        self.may_go_on.wait(SECONDS)
        if self.fail_writes is not None:
            super().write(offset, buffers[: len(buffers) // 2])
            raise self.fail_writes
        super().write(offset, buffers)

    def read(self, offset: int, buffers: Sequence[Bytes]) -> None:
        self.may_go_on.wait(SECONDS)
        if self.fail_reads is not None:
            raise self.fail_reads
        super().read(offset, buffers)


@pytest.fixture
def faulty(tmp_path: Path) -> Callable[[Path, int], FaultySlab]:
    made: list[FaultySlab] = []

    def make(path: Path, nbytes: int) -> FaultySlab:
        if not made:
            made.append(FaultySlab(path, nbytes))
        return made[0]

    return make


def on_ssd_only(tiered: Tiered, keys: Sequence[BlockKey]) -> list[BlockKey]:
    _, found = zip(*[tiered.ledger.shelf.borrow(tiered.space.id, [key]) for key in keys], strict=True)
    borrowed = [shelved for each in found for _, shelved in each]
    tiered.ledger.shelf.give_back(borrowed)
    return [shelved.key for shelved in borrowed]


def exact(tiered: Tiered, keys: Sequence[BlockKey]) -> int:
    """How many are served; each that is, exactly."""
    got = {key: tiered.get(key) for key in keys}
    assert all(data == bytes(bytes_of(key)) for key, data in got.items() if data is not None)
    return sum(data is not None for data in got.values())


def test_it_survives_a_restart_and_says_how_it_writes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with Tiered(tmp_path) as tiered:
        tiered.put_gently(KEYS)
        saved = int(tiered.count("ssd_blocks"))
        assert tiered.count("ssd_direct_volumes") == 1
    assert "O_DIRECT" in caplog.text
    with Tiered(tmp_path) as again:
        assert again.count("ssd_blocks") == saved >= len(KEYS) - 8
        assert exact(again, KEYS) == saved


def test_it_works_without_o_direct(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    really_open = os.open

    def refuse(path: str | Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return really_open(path, flags, mode)

    monkeypatch.setattr(os, "open", refuse)
    with Tiered(tmp_path) as tiered:
        tiered.put_gently(KEYS)
        assert exact(tiered, KEYS) == len(KEYS)
        assert (tiered.count("ssd_volumes"), tiered.count("ssd_direct_volumes")) == (1, 0)
    assert "through the page cache" in caplog.text


@pytest.mark.parametrize("seed", range(3))
def test_a_flipped_byte_of_the_slab_is_a_miss_and_counted(tmp_path: Path, seed: int) -> None:
    with Tiered(tmp_path) as tiered:
        tiered.put_gently(KEYS)
        victims = on_ssd_only(tiered, KEYS)
        used = int(tiered.count("ssd_used_bytes"))
        flip(tmp_path / "slab", random.Random(seed).randrange(used))
        served = exact(tiered, victims)
        assert served >= len(victims) - 1
        bad = len(victims) - served
        assert tiered.count("ssd_checksum_failures") == bad
        assert exact(tiered, [key for key in victims if tiered.get(key) is None]) == 0, "a damaged block stays away"


def test_a_damaged_block_is_withdrawn_and_can_be_put_again(tmp_path: Path) -> None:
    with Tiered(tmp_path) as tiered:
        tiered.put_gently(KEYS)
        [key, *_] = on_ssd_only(tiered, KEYS)
        tiered.ssd_changes()
        [(_, shelved)] = tiered.ledger.shelf.borrow(tiered.space.id, [key])[1]
        tiered.ledger.shelf.give_back([shelved])
        flip(tmp_path / "slab", shelved.offset + 5000)
        assert tiered.get(key) is None
        assert [change.keys for change in tiered.ssd_changes() if type(change).__name__ == "BlocksRemoved"] == [(key,)]
        tiered.put_gently([key])
        assert tiered.get(key) == bytes(bytes_of(key))
    with Tiered(tmp_path) as again:
        assert exact(again, KEYS) == again.count("ssd_blocks")
        assert again.count("ssd_checksum_failures") == 0, "the index was told of the damaged one"


def test_read_errors_are_misses_and_then_dram_goes_on_alone(
    tmp_path: Path, faulty: Callable[[Path, int], FaultySlab], caplog: pytest.LogCaptureFixture
) -> None:
    with Tiered(tmp_path, open_slab=faulty) as tiered:
        tiered.put_gently(KEYS)
        cold = on_ssd_only(tiered, KEYS)
        slab = faulty(tmp_path, 0)
        slab.fail_reads = OSError(errno.EIO, "Input/output error")
        assert tiered.get(cold[0]) is None
        slab.fail_reads = None
        assert tiered.get(cold[0]) == bytes(bytes_of(cold[0])), "one error is not the end"
        slab.fail_reads = OSError(errno.EIO, "Input/output error")
        assert exact(tiered, cold[1:]) == 0
        assert_dram_alone(tiered, caplog)


def test_a_full_disk_loses_nothing_that_was_saved_and_then_dram_goes_on_alone(
    tmp_path: Path, faulty: Callable[[Path, int], FaultySlab], caplog: pytest.LogCaptureFixture
) -> None:
    with Tiered(tmp_path, open_slab=faulty) as tiered:
        tiered.put_gently(KEYS[:12])
        saved = on_ssd_only(tiered, KEYS[:12])
        faulty(tmp_path, 0).fail_writes = OSError(errno.ENOSPC, "No space left on device")
        tiered.put([KEYS[12]])
        eventually(lambda: tiered.count("ssd_errors") == 1, "the disk is full")
        assert exact(tiered, saved[:1]) == 1
        for key in keys_of("more", 30):
            tiered.put([key])
            eventually(lambda: not tiered.ledger._blocks.saving, "the write ends")
        eventually(lambda: tiered.count("ssd_lost_volumes") == 1, "the disk is given up")
        assert_dram_alone(tiered, caplog)
    assert_nothing_comes_back(tmp_path)


def test_a_disk_that_stands_still_holds_nobody_up(
    tmp_path: Path, faulty: Callable[[Path, int], FaultySlab], caplog: pytest.LogCaptureFixture
) -> None:
    with Tiered(tmp_path, stall_seconds=0.2, open_slab=faulty) as tiered:
        tiered.put_gently(KEYS)
        cold = on_ssd_only(tiered, KEYS)
        slab = faulty(tmp_path, 0)
        slab.may_go_on.clear()
        try:
            began = time.monotonic()
            assert tiered.get(cold[0], seconds=0.3) is None
            assert time.monotonic() - began < 2.0
            tiered.disks.check(time.monotonic())
            assert_dram_alone(tiered, caplog)
            eventually(lambda: not (tmp_path / "index").exists(), "the index is gone while the disk stands still")
        finally:
            slab.may_go_on.set()
        eventually(lambda: tiered.count("rooms") == 0, "what the read was to fill is free when it has ended")
    assert_nothing_comes_back(tmp_path)


@pytest.mark.parametrize("way", ["opens", "fails", "never"])
def test_a_disk_that_stands_still_while_it_is_opened_does_not_keep_a_restarted_node_from_its_dram(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    with Tiered(tmp_path) as before:
        before.put_gently(KEYS)
        kept = before.count("ssd_blocks")
    may_go_on = threading.Event()

    def open_slab(path: Path, nbytes: int) -> Slab:
        may_go_on.wait(SECONDS)
        if way == "fails":
            raise OSError(errno.EIO, "Input/output error")
        return Slab(path, nbytes)

    try:
        with Tiered(tmp_path, open_slab=open_slab, is_restart=True, patience=0.05) as tiered:
            assert (tiered.count("ssd_opening_volumes"), tiered.count("ssd_volumes")) == (1, 0)
            # One that the SSD has too, one that is new, and one that is pinned meanwhile.
            tiered.put([KEYS[0], *keys_of("new", 1)])
            assert tiered.get(KEYS[0]) == bytes(bytes_of(KEYS[0]))
            assert tiered.ledger.pins.pin([(SPACE.id, KEYS[0])], time.monotonic() + SECONDS) == [True]
            if way == "never":
                tiered.disks.check(time.monotonic() + 61.0)
                assert_dram_alone(tiered, caplog)
                may_go_on.set()
                assert_nothing_comes_back(tmp_path)
                return
            may_go_on.set()
            eventually(lambda: tiered.count("ssd_opening_volumes") == 0, "it is known what becomes of it")
            eventually(lambda: tiered.count("ssd_volumes") + tiered.count("ssd_lost_volumes") == 1, "it has joined")
            if way == "fails":
                assert_dram_alone(tiered, caplog)
                return
            assert tiered.count("ssd_blocks") == kept
            told = {key for change in tiered.ssd_changes() for key in change.keys}
            assert len(told) == kept, "the directory hears of them"
            eventually(lambda: exact(tiered, KEYS) == kept, "all that it has is served")
            assert tiered.ledger.pins.unpin([(SPACE.id, KEYS[0])]) == [True]
    finally:
        may_go_on.set()
    with Tiered(tmp_path) as again:
        assert exact(again, KEYS) >= kept


def test_a_node_that_ends_while_a_disk_is_opened_leaves_it_to_the_next(tmp_path: Path) -> None:
    may_go_on = threading.Event()

    def open_slab(path: Path, nbytes: int) -> Slab:
        may_go_on.wait(SECONDS)
        return Slab(path, nbytes)

    with Tiered(tmp_path, open_slab=open_slab, is_restart=True, patience=0.05) as tiered:
        assert tiered.count("ssd_opening_volumes") == 1
    may_go_on.set()

    def is_free() -> bool:
        try:
            with Tiered(tmp_path):
                return True
        except ConfigError:
            return False

    eventually(is_free, "the place is let go of")


def test_what_is_removed_or_replaced_while_a_disk_is_opened_does_not_come_back(tmp_path: Path) -> None:
    with Tiered(tmp_path) as before:
        before.put_gently(KEYS)
        kept = before.count("ssd_blocks")
        removed, replaced = on_ssd_only(before, KEYS)[:2]
    may_go_on = threading.Event()

    def open_slab(path: Path, nbytes: int) -> Slab:
        may_go_on.wait(SECONDS)
        return Slab(path, nbytes)

    try:
        with Tiered(tmp_path, open_slab=open_slab, is_restart=True, patience=0.05) as tiered:
            tiered.put([removed, replaced])
            assert tiered.ledger.catalogue.remove(SPACE.id, [removed, replaced]) == [YES, YES]
            may_go_on.set()
            eventually(lambda: tiered.count("ssd_opening_volumes") == 0, "it is open")
            eventually(lambda: tiered.count("ssd_blocks") == kept - 2, "it has joined")
            assert [tiered.get(key) for key in (removed, replaced)] == [None, None]
    finally:
        may_go_on.set()


def test_an_index_that_was_discarded_is_not_written_again(tmp_path: Path) -> None:
    index = Index(tmp_path / "index", recover(tmp_path / "index", BLOCK))
    index.discard()
    index.append((), ())
    index.rewrite(())
    index.close()
    assert not list(tmp_path.iterdir())


def assert_nothing_comes_back(folder: Path) -> None:
    """A disk that was given up knows nothing of what was removed or replaced since."""
    eventually(lambda: not (folder / "index").exists(), "the index is gone")
    again: list[float] = []

    def is_free() -> bool:
        try:
            with Tiered(folder) as tiered:
                again.append(tiered.count("ssd_blocks"))
        except ConfigError:
            return False
        return True

    eventually(is_free, "the place is let go of")
    assert again == [0.0]


def assert_dram_alone(tiered: Tiered, caplog: pytest.LogCaptureFixture) -> None:
    assert tiered.count("ssd_lost_volumes") == 1
    assert tiered.count("ssd_blocks") == 0
    eventually(lambda: "is given up until this node restarts" in caplog.text, "the log says so")
    known: set[BlockKey] = set()
    for change in tiered.ssd_changes():
        (known.update if type(change).__name__ == "BlocksStored" else known.difference_update)(change.keys)
    assert not known, "the directory was told"
    fresh = keys_of("fresh", 20)
    for key in fresh:
        tiered.put([key])
        assert tiered.get(key) == bytes(bytes_of(key))


def test_a_block_is_loaded_once_for_all_who_ask(tmp_path: Path) -> None:
    with Tiered(tmp_path) as tiered:
        tiered.put_gently(KEYS)
        [key, *_] = on_ssd_only(tiered, KEYS)
        read = tiered.count("ssd_read_bytes")

        async def ask() -> list[bytes | None]:
            return await asyncio.gather(*[tiered.get_later(key) for _ in range(5)])

        assert asyncio.run(ask()) == [bytes(bytes_of(key))] * 5
        assert tiered.count("ssd_read_bytes") - read == BLOCK


def test_a_loader_that_is_cancelled_holds_nothing(tmp_path: Path, faulty: Callable[[Path, int], FaultySlab]) -> None:
    with Tiered(tmp_path, open_slab=faulty) as tiered:
        tiered.put_gently(KEYS)
        [key, *_] = on_ssd_only(tiered, KEYS)
        slab = faulty(tmp_path, 0)
        slab.may_go_on.clear()

        async def ask_and_leave() -> None:
            task = asyncio.create_task(tiered.get_later(key))
            await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(ask_and_leave())
        assert tiered.count("rooms") == 1, "the read still writes into it"
        slab.may_go_on.set()
        eventually(lambda: tiered.count("rooms") == 0, "the room ends with the read")


@pytest.mark.parametrize("cut", [1, 40, 0.3, 0.7, 0.999])
def test_a_cut_index_serves_what_is_whole(tmp_path: Path, cut: float, caplog: pytest.LogCaptureFixture) -> None:
    with Tiered(tmp_path) as tiered:
        tiered.put_gently(KEYS)
        saved = tiered.count("ssd_blocks")
    index = tmp_path / "index"
    size = index.stat().st_size
    os.truncate(index, int(cut if cut >= 1 else size * cut))
    with Tiered(tmp_path) as again:
        assert again.count("ssd_blocks") < saved
        assert exact(again, KEYS) == again.count("ssd_blocks")
        assert (again.count("ssd_blocks") > 0) == (0.2 < cut < 1)
    assert "dropped" in caplog.text


@pytest.mark.parametrize("seed", range(8))
def test_a_flipped_byte_of_the_index_costs_one_entry(tmp_path: Path, seed: int) -> None:
    with Tiered(tmp_path) as tiered:
        tiered.put_gently(KEYS)
        saved = tiered.count("ssd_blocks")
    index = tmp_path / "index"
    # Beyond header and key space: those are needed by all.
    flip(index, random.Random(seed).randrange(150, index.stat().st_size))
    with Tiered(tmp_path) as again:
        assert again.count("ssd_blocks") >= saved - 1
        assert exact(again, KEYS) == again.count("ssd_blocks")


def test_an_index_of_a_newer_version_is_not_believed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Tiered(tmp_path) as tiered:
        tiered.put_gently(KEYS)
    data = (tmp_path / "index").read_bytes()
    (tmp_path / "index").write_bytes(data[:14] + struct.pack("<H", 2) + data[16:])
    with Tiered(tmp_path) as again:
        assert again.count("ssd_blocks") == 0
        again.put_gently(KEYS)
        assert exact(again, KEYS) == len(KEYS)
    assert "it is of version 2, this is Moonpool's version 1" in caplog.text


def test_a_smaller_slab_keeps_what_lies_within(tmp_path: Path) -> None:
    with Tiered(tmp_path) as tiered:
        tiered.put_gently(KEYS)
    with Tiered(tmp_path, ssd_blocks=10) as again:
        assert 0 < again.count("ssd_blocks") <= 10
        assert exact(again, KEYS) == again.count("ssd_blocks")


def test_an_index_stays_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moonpool.store.index.WASTE_RECORDS", 20)
    with Tiered(tmp_path, ssd_blocks=8) as tiered:
        for name in "bcdefgh":
            tiered.put_gently(keys_of(name, 24))
        assert (tmp_path / "index").stat().st_size < 60 * 120
        saved = tiered.count("ssd_blocks")
    with Tiered(tmp_path, ssd_blocks=8) as again:
        assert again.count("ssd_blocks") == saved
        assert exact(again, keys_of("h", 24)) == saved


def test_a_whole_index_is_gone_on_with_and_any_other_written_anew(tmp_path: Path) -> None:
    index = tmp_path / "index"
    with Tiered(tmp_path) as tiered:
        tiered.put_gently(KEYS[:12])
        saved = tiered.count("ssd_blocks")
    first = index.stat().st_ino
    with Tiered(tmp_path) as again:
        assert again.count("ssd_blocks") == saved
        again.put_gently(KEYS[12:])
        saved = again.count("ssd_blocks")
    assert index.stat().st_ino == first, "a million entries are not written anew at each start"
    with Tiered(tmp_path) as third:
        assert exact(third, KEYS) == third.count("ssd_blocks") == saved
    with index.open("ab") as file:
        file.write(b"\xb1 half a record")
    assert recover(index, 64 * BLOCK).losses
    with Tiered(tmp_path) as fourth:
        assert fourth.count("ssd_blocks") == saved
    assert index.stat().st_ino != first
    assert not recover(index, 64 * BLOCK).losses


def test_an_append_that_fails_leaves_no_half_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Tiered(tmp_path) as tiered:
        write, failed = Index._write, []

        def fail_once(index: Index, data: bytes) -> None:
            if not failed:
                failed.append(True)
                write(index, data[: len(data) // 2])
                raise OSError(errno.ENOSPC, "No space left on device")
            write(index, data)

        monkeypatch.setattr(Index, "_write", fail_once)
        for key in KEYS:
            tiered.put([key])
        eventually(lambda: bool(failed) and tiered.count("ssd_saves") > 0, "it went on")
    assert not recover(tmp_path / "index", 64 * BLOCK).losses


def test_two_nodes_do_not_share_a_directory(tmp_path: Path) -> None:
    with Tiered(tmp_path), pytest.raises(ConfigError, match=r"another node uses .*--ssd-dir"):
        Tiered(tmp_path)


def test_blocks_of_another_shape_are_not_loaded(tmp_path: Path) -> None:
    """The same id with another layout: a mistake of a client, which must not become wrong bytes."""
    with Tiered(tmp_path) as tiered:
        tiered.put_gently(KEYS)
    other = KeySpace(KeySpaceId("aa" * 16), block_tokens=16, runs=8, run_bytes=2048)
    with Tiered(tmp_path, space=other) as again:
        for key in (KEYS[0], *keys_of("new", 1)):
            with pytest.raises(PoolError, match="has 4 runs of 4096 bytes on this node, not 8 of 2048"):
                again.get(key)
            with pytest.raises(PoolError, match="has 4 runs of 4096 bytes on this node, not 8 of 2048"):
                again.put([key])
    with Tiered(tmp_path) as again:
        assert exact(again, KEYS) == again.count("ssd_blocks") > 0


def test_an_ssd_smaller_than_dram_comes_to_rest(tmp_path: Path) -> None:
    """No block is saved in place of one that then wants to be saved again."""
    with Tiered(tmp_path, dram_blocks=16, ssd_blocks=6) as tiered:
        tiered.put_gently(KEYS)
        eventually(lambda: tiered.count("ssd_evictions") > 0, "the SSD is full")
        time.sleep(0.3)  # a thousand saves, if it goes round in circles
        assert tiered.count("ssd_saves") <= len(KEYS)


def flip(path: Path, position: int) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        [byte] = file.read(1)
        file.seek(position)
        file.write(bytes([byte ^ 0x40]))
