"""`moonpool journal`: where the journal is, and deciding again what is in it."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from moonpool.engine.model import home
from moonpool.errors import ConfigError, JournalError
from moonpool.wire.journal import Origin, Segment, read_segment, segments_in
from moonpool.wire.replay import Difference, restore
from moonpool.wire.replay import replay as decide_again

OFF = "off"
SHOWN_CHARS = 2000
"""Of the actions of a difference; block keys would fill the screen."""


def directory_of(given: str | None) -> Path | None:
    """Where the Conductor keeps its journal, None for `off`. Raises ConfigError where a given one cannot be made."""
    if given == OFF:
        return None
    if given is None:
        return default_directory()
    directory = Path(given)
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, ValueError) as e:
        why = getattr(e, "strerror", None) or e
        raise ConfigError(f"--journal {given}: cannot make this directory: {why}; give another, or `off`") from None
    return directory.absolute()


def default_directory() -> Path:
    return home() / "journal"


def replay(path: Path | None, anyway: bool) -> int:
    """Print how each segment came out; 0 where all did as recorded. Raises JournalError."""
    status, compared = 0, 0
    paths = segments_in(path or default_directory())
    for file in paths:
        try:
            segment = read_segment(file)
            conductor = restore(segment, anyway)
        except JournalError as e:
            if len(paths) == 1:
                raise
            # The last one may just have begun, an old one may be of an earlier version.
            print(f"not compared: {e}")
            continue
        began = time.monotonic()
        done = decide_again(segment, conductor)
        compared += done.records
        print(_told(segment, done.records, time.monotonic() - began))
        if segment.damage:
            print(f"  not read: {segment.damage}")
        if done.difference is not None:
            print(difference_text(done.difference))
            status = 1
        sys.stdout.flush()
    if not compared and not status:
        print("nothing was compared")
        return 1
    return status


def difference_text(difference: Difference) -> str:
    return (
        f"  DIFFERENT at record {difference.seq}, now = {difference.now!r}\n"
        f"    event     {_cut(difference.event)}\n"
        f"    recorded  {_cut(difference.recorded)}\n"
        f"    replayed  {_cut(difference.replayed)}"
    )


def written_at(origin: Origin) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(origin.written_at))


def _told(segment: Segment, records: int, seconds: float) -> str:
    origin = segment.origin
    last = segment.entries[-1].now - segment.entries[0].now if segment.entries else 0.0
    text = (
        f"{segment.path.name}: from {written_at(origin)}, {last:.0f} s, "
        f"{records} of {len(segment.entries)} records decided again in {seconds:.2f} s"
    )
    return text + (f"; {origin.dropped} were dropped before it" if origin.dropped else "")


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}… ({len(text)} characters)"
