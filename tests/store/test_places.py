"""Directories of the SSD tier that cannot be had, and disks that are too small: said at once, and no trace is left."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from moonpool.core.vocabulary import Incarnation, PartId
from moonpool.errors import ConfigError
from moonpool.store.arena import Arena
from moonpool.store.disks import Disks
from moonpool.store.index import Index
from moonpool.store.ledger import Ledger
from moonpool.store.places import RESERVED_BYTES, Place, amount, check_places, lacking_bytes, spare_bytes
from moonpool.store.slab import Slab

from .kit import SECONDS, keys_of
from .tiered import Tiered

MIB = 1 << 20
GIB = 1 << 30
KEYS = keys_of("a", 24)
Disk = Callable[..., None]


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    """`disk(size, free)`: every filesystem is that large from now on."""

    def be(size: int, free: int) -> None:
        found = SimpleNamespace(f_frsize=4096, f_blocks=size // 4096, f_bavail=free // 4096)
        monkeypatch.setattr(os, "statvfs", lambda path: found)

    return be


@pytest.fixture
def full_in_the_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full when half of a slab has been allocated."""

    def half(fd: int, offset: int, nbytes: int) -> None:
        os.truncate(fd, nbytes // 2)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", half)


def files(folder: Path) -> dict[str, int]:
    """Every path below, with its size."""
    return {str(path.relative_to(folder)): path.stat().st_size * path.is_file() for path in folder.rglob("*")}


def test_a_slab_leaves_a_reserve_on_its_disk(tmp_path: Path, disk: Disk) -> None:
    disk(100 * GIB, 3 * GIB)
    assert spare_bytes(tmp_path) == 3 * GIB - RESERVED_BYTES
    disk(40 * MIB, 3 * MIB)
    assert spare_bytes(tmp_path / "not" / "there") == MIB, "a twentieth of a small one"
    disk(100 * GIB, 0)
    assert spare_bytes(tmp_path) == 0
    disk(0, 0)
    assert spare_bytes(tmp_path) is None


def test_a_slab_that_does_not_fit_is_refused_before_anything_is_written(tmp_path: Path, disk: Disk) -> None:
    disk(100 * GIB, 60 * GIB)
    with pytest.raises(ConfigError, match=r"no slab of 200\.0 GiB at .*: 200\.0 GiB more needed, 59\.0 .*--ssd-per-no"):
        Slab(tmp_path / "slab", 200 * GIB)
    assert not files(tmp_path)


@pytest.mark.parametrize("before", [None, MIB])
@pytest.mark.usefixtures("full_in_the_middle")
def test_a_slab_that_cannot_be_allocated_is_put_back(tmp_path: Path, before: int | None) -> None:
    slab = tmp_path / "slab"
    if before is not None:
        slab.write_bytes(bytes(before))
    with pytest.raises(ConfigError, match="No space left on device; choose a smaller --ssd-per-node"):
        Slab(slab, 8 * MIB)
    assert files(tmp_path) == ({} if before is None else {"slab": before})


@pytest.mark.usefixtures("full_in_the_middle")
def test_a_slab_of_the_right_size_takes_nothing_from_a_full_disk(tmp_path: Path, disk: Disk) -> None:
    (tmp_path / "slab").write_bytes(bytes(2 * MIB))
    disk(100 * GIB, 0)
    for size in (2 * MIB, MIB):
        Slab(tmp_path / "slab", size).close()
        assert files(tmp_path) == {"slab": size}
    assert lacking_bytes(tmp_path / "slab", 3 * MIB) == 2 * MIB


@pytest.mark.usefixtures("full_in_the_middle")
def test_disks_that_are_refused_leave_no_trace(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    with pytest.raises(ConfigError, match="No space left on device"):
        disks_in(tmp_path / "new" / "deep" / "node-0")
    assert list(files(tmp_path)) == ["old"]


def test_one_bad_directory_of_two_leaves_no_trace_of_the_other(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match=r"SSD directory .*file/node-0: .*--ssd-dir"):
        disks_in(tmp_path / "new" / "node-0", tmp_path / "file" / "node-0")
    assert files(tmp_path) == {"file": 1}


def test_no_room_for_the_index_leaves_no_slab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(index: Index, entries: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Index, "rewrite", full)
    with pytest.raises(ConfigError, match=r"SSD directory .*: No space left on device; choose another --ssd-dir"):
        disks_in(tmp_path / "node-0")
    assert not files(tmp_path)


def disks_in(*directories: Path, is_restart: bool = False) -> dict[str, float]:
    """Opened and closed; their counters."""
    arena = Arena(MIB)
    try:
        shelf = Ledger(arena.extents, PartId("node-0"), Incarnation("1")).shelf
        disks = Disks(arena, shelf, directories, 4 * MIB, is_restart=is_restart)
        disks.close()
        return disks.counters() | shelf.counters()
    finally:
        arena.close()


@pytest.mark.parametrize("fault", ["a file", "full", "another's", "stands still"])
def test_a_restarted_node_goes_on_with_dram_alone(
    tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    directory, may_go_on, seconds = tmp_path / "node-0", threading.Event(), SECONDS
    open_slab: Callable[[Path, int], Slab] = Slab
    match fault:
        case "a file":
            directory.write_text("x")
            reason = "Not a directory"
        case "full":
            monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_frsize=1, f_blocks=1 << 40, f_bavail=0))
            reason = "0.0 MiB can be had"
        case "another's":
            Place(directory)
            reason = "another node uses"
        case _:

            def open_slab(path: Path, nbytes: int) -> Slab:
                may_go_on.wait(SECONDS)
                raise OSError(errno.EIO, "Input/output error")

            reason, seconds = "not open in 0.05 s", 0.05
    try:
        with Tiered(directory, open_slab=open_slab, is_restart=True, open_seconds=seconds) as tiered:
            assert (tiered.count("ssd_lost_volumes"), tiered.count("ssd_volumes")) == (1, 0)
            assert (tiered.count("ssd_capacity_bytes"), tiered.count("ssd_direct_volumes")) == (0, 0)
            for key in KEYS:
                tiered.put([key])
                assert tiered.get(key) is not None
            assert not tiered.ssd_changes()
    finally:
        may_go_on.set()
    assert f"{directory} is given up until this node restarts" in caplog.text
    assert reason in caplog.text


def test_one_disk_lost_at_a_restart_leaves_the_other(tmp_path: Path) -> None:
    (tmp_path / "0").write_text("x")
    found = disks_in(tmp_path / "0", tmp_path / "1", is_restart=True)
    assert (found["ssd_lost_volumes"], found["ssd_volumes"], found["ssd_direct_volumes"]) == (1, 1, 1)
    assert found["ssd_capacity_bytes"] == 2 * MIB


def test_the_check_counts_all_slabs_of_a_disk_and_what_they_have_already(tmp_path: Path, disk: Disk) -> None:
    directories = [tmp_path / "ssd" / f"node-{number}" for number in range(2)]
    disk(100 * GIB, 5 * GIB)
    check_places(directories, 2 * GIB)
    with pytest.raises(ConfigError, match=r"6\.0 GiB more needed in .*/ssd, 4\.0 GiB can be had: .*--ssd-per-node"):
        check_places(directories, 3 * GIB)
    assert not files(tmp_path)
    directories[0].mkdir(parents=True)
    (directories[0] / "slab").touch()
    os.truncate(directories[0] / "slab", 3 * GIB)
    check_places(directories, 3 * GIB)
    assert sorted(files(tmp_path)) == ["ssd", "ssd/node-0", "ssd/node-0/slab"]


@pytest.mark.parametrize("directory", ["/proc/x/node-0", "/dev/null/x/node-0", "/sys/node-0", "/" + "x" * 300])
def test_the_check_finds_what_is_impossible(directory: str) -> None:
    with pytest.raises(ConfigError, match=r"^SSD directory .*: .*; choose another --ssd-dir$"):
        check_places([Path(directory)], MIB)


def test_the_check_finds_files_that_are_none_and_another_node(tmp_path: Path) -> None:
    (tmp_path / "slab").mkdir()
    with pytest.raises(ConfigError, match="Is a directory"):
        check_places([tmp_path], MIB)
    (tmp_path / "slab").rmdir()
    place = Place(tmp_path)
    with pytest.raises(ConfigError, match="another node uses"):
        check_places([tmp_path], MIB)
    place.release()
    for _ in range(2):
        check_places([tmp_path], MIB)
    assert list(files(tmp_path)) == ["lock"], "that of the other one is not taken away"


def test_a_place_that_was_abandoned_meanwhile_is_not_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    really_open = os.open

    def open_and_lose(path: Path, flags: int, mode: int = 0o777) -> int:
        fd = really_open(path, flags, mode)
        Path(path).unlink()
        return fd

    monkeypatch.setattr(os, "open", open_and_lose)
    with pytest.raises(ConfigError, match="another node uses"):
        Place(tmp_path)


def test_amounts() -> None:
    assert [amount(n) for n in (1 << 19, 5 * GIB, 3 << 39)] == ["0.5 MiB", "5.0 GiB", "1.5 TiB"]
