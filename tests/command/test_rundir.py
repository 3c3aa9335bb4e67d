"""Run directories: private, short, and cleaned up only after the dead."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from moonpool.errors import ConfigError
from moonpool.live import rundir
from moonpool.live.rundir import create_run_directory, default_base, stale_directories


@pytest.fixture
def base() -> Iterator[Path]:
    """Short, as real ones are: pytest's own directories exceed the limit of socket paths."""
    path = Path(f"/tmp/mp-{os.getpid()}")
    yield path
    subprocess.run(["rm", "-rf", str(path)], check=True)


def test_it_is_private_and_goes_away(base: Path) -> None:
    directory = create_run_directory(base)
    assert directory.path.stat().st_mode & 0o777 == 0o700
    assert base.stat().st_mode & 0o777 == 0o700
    directory.remove()
    assert not directory.path.exists()


def test_what_the_dead_left_is_removed_and_the_living_are_not_touched(base: Path) -> None:
    living = create_run_directory(base)
    (living.path / "node.sock").touch()
    dead = create_run_directory(base)
    os.close(dead.lock_fd)
    assert stale_directories(base) == [dead.path]
    third = create_run_directory(base)
    assert not dead.path.exists()
    assert (living.path / "node.sock").exists()
    living.remove()
    third.remove()


def test_a_directory_lives_as_long_as_any_process_that_inherited_its_lock(base: Path) -> None:
    directory = create_run_directory(base)
    child = subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[directory.lock_fd], text=True
    )
    try:
        os.close(directory.lock_fd)
        assert stale_directories(base) == []
    finally:
        child.communicate("", timeout=10)
    assert stale_directories(base) == [directory.path]


def test_a_base_that_others_can_write_to_is_refused(base: Path) -> None:
    base.mkdir(mode=0o700)
    base.chmod(0o777)
    with pytest.raises(ConfigError, match="is not a directory of this user alone"):
        create_run_directory(base)


def test_a_base_that_is_a_link_is_refused(base: Path, tmp_path: Path) -> None:
    base.symlink_to(tmp_path)
    try:
        with pytest.raises(ConfigError, match="is not a directory of this user alone"):
            create_run_directory(base)
    finally:
        base.unlink()


def test_a_base_too_long_for_sockets_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="too long: socket paths end at 107 bytes"):
        create_run_directory(tmp_path / ("x" * 80))


def test_a_lock_that_is_held_for_ever_is_named(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    create_run_directory(base).remove()
    monkeypatch.setattr(rundir, "LOCK_SECONDS", 0.1)
    with (base / ".lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another process has held"):
            create_run_directory(base)


def test_xdg_runtime_dir_is_used_where_it_is_short_and_ours(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(base))
    own = Path(f"/tmp/moonpool-{os.getuid()}")
    assert default_base() == base / "moonpool"
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/tmp/" + "y" * 90)
    assert default_base() == own
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert default_base() == own
