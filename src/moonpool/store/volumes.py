"""Opens the directories of an SSD tier: in each a slab, its index, and what the index still says."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from moonpool.errors import ConfigError
from moonpool.store.index import Index, Recovered, recover
from moonpool.store.places import Place, amount, refusal, remember
from moonpool.store.slab import Slab

log = logging.getLogger(__name__)

OpenSlab = Callable[[Path, int], Slab]

LONG_INDEX_BYTES = 16 << 20
"""Reading a longer one takes a second or more, and is said before it begins."""


@dataclass(frozen=True, slots=True, eq=False)
class Opened:
    slab: Slab
    index: Index
    recovered: Recovered
    place: Place
    _undo: contextlib.ExitStack

    def close(self) -> None:
        self.index.close()
        self.slab.close()
        self.place.release()

    def undo(self) -> None:
        """Close it, and leave the directory as it was found."""
        self._undo.close()


def open_volumes(
    directories: Sequence[Path], nbytes: int, open_slab: OpenSlab, seconds: float
) -> list[Opened | ConfigError]:
    """Each directory with a slab of `nbytes`, or why it cannot be used: also where that takes longer than `seconds`.

    One after another, so that each sees what those before it have taken of the disk.
    """
    found: list[Opened | ConfigError] = []
    for directory in directories:
        opening = begin_opening(directory, nbytes, open_slab)
        opened = opening_by(opening, time.monotonic() + seconds)
        if opened is None:
            opening.add_done_callback(close_late)
        found.append(not_open(directory, seconds) if opened is None else opened)
    return found


def begin_opening(directory: Path, nbytes: int, open_slab: OpenSlab) -> Future[Opened]:
    opened: Future[Opened] = Future()

    def run() -> None:
        try:
            opened.set_result(_open(directory, nbytes, open_slab))
        except BaseException as e:
            opened.set_exception(e)

    # A disk that stands still would hold up the end of the process, were it not a daemon.
    threading.Thread(target=run, name=f"ssd open {directory}", daemon=True).start()
    return opened


def opening_by(opening: Future[Opened], until: float) -> Opened | ConfigError | None:
    """What has become of it by then (monotonic); None: nothing yet."""
    try:
        return opening.result(max(0.0, until - time.monotonic()))
    except ConfigError as e:
        return e
    except TimeoutError:
        return None


def not_open(directory: Path, seconds: float) -> ConfigError:
    return ConfigError(f"SSD directory {directory}: not open in {seconds:g} s; choose another --ssd-dir")


def close_late(opening: Future[Opened]) -> None:
    """Nobody waits for it any more."""
    if opening.exception() is None:
        opening.result().close()


def discard_late(opening: Future[Opened]) -> None:
    """As `close_late`, where the node serves without it: what it has may be removed or replaced meanwhile."""
    if opening.exception() is None:
        opened = opening.result()
        try:
            opened.index.discard()
        except OSError as e:
            log.error("SSD %s: its index cannot be removed: %s", opened.slab.path, e.strerror or e)
        opened.close()


def _open(directory: Path, nbytes: int, open_slab: OpenSlab) -> Opened:
    with contextlib.ExitStack() as undo:
        try:
            place = Place(directory)
            undo.callback(place.abandon)
            undo.callback(remember(directory / "slab"))
            slab = open_slab(directory / "slab", nbytes)
            undo.callback(slab.close)
            began = time.monotonic()
            recovered, index = _open_index(directory / "index", slab.size, undo)
        except OSError as e:
            raise refusal(directory, e) from e
        for loss in recovered.losses:
            log.warning("SSD index %s: dropped %s", directory / "index", loss)
        how = "O_DIRECT" if slab.is_direct else "through the page cache: this filesystem knows no O_DIRECT"
        found = f"{len(recovered.entries)} blocks found in {time.monotonic() - began:.1f} s"
        log.info("SSD %s: %d MiB, %s; %s", slab.path, slab.size >> 20, how, found)
        return Opened(slab, index, recovered, place, undo.pop_all())


def _open_index(path: Path, slab_bytes: int, undo: contextlib.ExitStack) -> tuple[Recovered, Index]:
    if not path.exists():
        undo.callback(remember(path))
    elif (size := path.stat().st_size) > LONG_INDEX_BYTES:
        log.info("reading the SSD index %s, %s", path, amount(size))
    recovered = recover(path, slab_bytes)
    index = Index(path, recovered)
    undo.callback(index.close)
    return recovered, index
