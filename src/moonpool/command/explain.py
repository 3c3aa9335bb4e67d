"""`moonpool explain`: a request's story in plain lines, from the cluster, or from its journal when that is gone."""

from __future__ import annotations

import sys
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

import msgspec

from moonpool.command.flags import api_key, key_hint
from moonpool.command.journal import default_directory, written_at
from moonpool.command.telling import tell
from moonpool.core.actions import Action
from moonpool.core.conductor import Conductor
from moonpool.core.vocabulary import RequestId
from moonpool.core.why import Waiting, Weighing
from moonpool.errors import ConfigError, JournalError, MoonpoolError
from moonpool.wire.journal import Entry, Origin, Segment, read_origin, read_segment, segments_in
from moonpool.wire.replay import replay, restore
from moonpool.wire.story import Stories, Story

CALL_SECONDS = 5.0
MAX_ANSWER_BYTES = 16 << 20
MAX_NAME_CHARS = 256
Costs = dict[RequestId, tuple[tuple[Weighing, ...], tuple[Waiting, ...]]]
"""What was weighed and waited for, by request: the core forgets it in time."""


def explain(request: str, url: str, journal: Path | None, as_json: bool) -> int:
    """Print the stories of a request. Raises MoonpoolError where nothing is known of it."""
    if not 0 < len(request) <= MAX_NAME_CHARS:
        raise ConfigError(f"a request's id has 1 to {MAX_NAME_CHARS} characters, this has {len(request)}")
    if journal is not None:
        stories, source = from_journal(request, journal)
    else:
        stories, source = _from_anywhere(request, url)
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(stories)).decode() + "\n")
        return 0
    print(f"from {source}")
    for story in stories:
        print("\n" + "\n".join(tell(story)))
    return 0


def _from_anywhere(request: str, url: str) -> tuple[list[Story], str]:
    """From the cluster; else from the journal in its usual place."""
    try:
        stories, why_not = fetch(request, url), f"the cluster at {url} remembers no such request"
    except MoonpoolError as e:
        stories, why_not = [], str(e)
    if stories:
        return stories, url
    try:
        return from_journal(request, default_directory())
    except JournalError as e:
        hint = (
            "; ids are those of the response header x-request-id" if request.startswith(("chatcmpl-", "cmpl-")) else ""
        )
        raise JournalError(f"nothing is known of {request!r}: {why_not}; {e}{hint}") from None


def fetch(request: str, url: str) -> list[Story]:
    """What the cluster remembers, empty where that is nothing. Raises MoonpoolError where it does not answer."""
    page = f"/cluster/requests/{urllib.parse.quote(request, safe='')}"
    key = api_key()
    try:
        call = urllib.request.Request(url.rstrip("/") + page)
        if key:
            call.add_header("Authorization", f"Bearer {key}")
        with urllib.request.urlopen(call, timeout=CALL_SECONDS) as answer:
            return msgspec.json.decode(answer.read(MAX_ANSWER_BYTES), type=list[Story])
    except urllib.error.HTTPError as e:
        if e.code == 404:
            return []
        raise MoonpoolError(f"{url} answered {e.code}{key_hint(e.code)}") from None
    except (OSError, ValueError) as e:
        reason = getattr(e, "reason", e)
        raise MoonpoolError(f"no cluster answers at {url} ({getattr(reason, 'strerror', None) or reason})") from None


def from_journal(request: str, path: Path) -> tuple[list[Story], str]:
    """The stories, and which segment they begin in. Raises JournalError where the journal tells nothing of it."""
    stories = Stories(only=request)
    costs: Costs = {}
    begins = ""
    conductor: Conductor | None = None
    last: Origin | None = None
    seq = 0
    for file in segments_in(path):
        try:
            origin, is_named = read_origin(file), request.encode() in file.read_bytes()
        except (OSError, JournalError) as e:
            print(f"moonpool: left out: {e}", file=sys.stderr)
            continue
        goes_on = last is not None and last.conductor == origin.conductor
        if not is_named and not (goes_on and not stories.are_over):
            conductor = None
            continue
        segment = read_segment(file)
        if conductor is None or not goes_on or origin.seq != seq + 1:
            conductor = _restored(segment)
        _follow(segment, conductor, stories, costs)
        last, seq = origin, segment.entries[-1].seq if segment.entries else origin.seq - 1
        if not begins and not stories.are_none:
            begins = f"{segment.path} (from {written_at(origin)})"
    found = stories.all()
    if not found:
        raise JournalError(
            f"the journal in {path} has no arrival of {request!r}: it came before what is kept, "
            "or within the last second, or never"
        )
    for story in found:
        story.weighings, story.waitings = costs.get(story.request, ((), ()))
    return found, begins


def _restored(segment: Segment) -> Conductor | None:
    """The core as it was before it; None where that cannot be had, and then costs are left out."""
    try:
        return restore(segment)
    except JournalError as e:
        print(f"moonpool: costs are left out: {e}", file=sys.stderr)
        return None


def _follow(segment: Segment, conductor: Conductor | None, stories: Stories, costs: Costs) -> None:
    """Through all of it: by deciding again, which brings back what was weighed, or only as recorded."""

    def look(core: Conductor) -> None:
        for story in stories.all():
            weighings, waitings = core.weighings(story.request), core.waitings(story.request)
            before = costs.get(story.request, ((), ()))
            costs[story.request] = weighings or before[0], waitings or before[1]

    def watch(core: Conductor, entry: Entry, actions: tuple[Action, ...]) -> bool:
        if stories.note(entry.now, entry.event, actions):
            look(core)
        return True

    if conductor is None:
        for entry in segment.entries:
            stories.note(entry.now, entry.event, entry.actions)
        return
    done = replay(segment, conductor, watch)
    if done.difference is not None:
        raise JournalError(
            f"{segment.path} does not replay as it was recorded, from record {done.difference.seq} on: "
            "see `moonpool journal replay`"
        )
    look(conductor)
