"""A segment decided again: does this process decide as the one that wrote it did, to the byte?"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from msgspec import Struct

from moonpool.core.actions import Action
from moonpool.core.conductor import Conductor
from moonpool.errors import JournalError
from moonpool.wire.journal import Entry, Segment, code_version, encode_actions, written_by

Watch = Callable[[Conductor, Entry, tuple[Action, ...]], bool]
"""Told of each record once it is decided again; False: enough."""


class Difference(Struct, frozen=True):
    """The first record that came out otherwise."""

    seq: int
    now: float
    event: str
    recorded: str
    replayed: str


class Replay(Struct, frozen=True):
    records: int
    """Decided again, the differing one included."""
    difference: Difference | None


def restore(segment: Segment, anyway: bool = False) -> Conductor:
    """The core as it was before the segment's first record.

    `anyway`: also where other code wrote it. Raises JournalError where that cannot be.
    """
    if segment.origin.code != code_version() and not anyway:
        raise JournalError(
            f"{segment.path} {written_by(segment.origin)}: it may decide otherwise; "
            "replay it with the code that wrote it, or compare all the same with --anyway"
        )
    if segment.state is None:
        raise JournalError(f"{segment.path} does not replay alone: {segment.damage or 'its beginning is missing'}")
    try:
        return Conductor.restored(segment.state.snapshot, segment.groups)
    except ValueError as e:
        raise JournalError(f"{segment.path}: {e}") from None


def replay(segment: Segment, conductor: Conductor, watch: Watch | None = None) -> Replay:
    """Feed the segment's events to `conductor`, which is as it was before them, up to the first difference."""
    for count, entry in enumerate(segment.entries, 1):
        try:
            actions = conductor.handle(entry.event, entry.now)
        except Exception as e:
            # The core of the live Conductor may have failed here as well: then this is the last record.
            told = f"the decision core failed: {type(e).__name__}: {e}"
            return Replay(count, Difference(entry.seq, entry.now, _shown(entry.event), _shown(entry.actions), told))
        if encode_actions(actions) != entry.recorded:
            return Replay(
                count,
                Difference(entry.seq, entry.now, _shown(entry.event), _shown(entry.actions), _shown(actions)),
            )
        if watch is not None and not watch(conductor, entry, actions):
            return Replay(count, None)
    return Replay(len(segment.entries), None)


def _shown(value: object) -> str:
    return msgspec.json.encode(msgspec.to_builtins(value, enc_hook=repr)).decode()
