"""`moonpool record`: a live cluster's journal as a trace to be replayed. Keys become numbers; there is no text."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from moonpool.command.journal import default_directory
from moonpool.core.events import Finished, Registered, RequestArrived
from moonpool.core.vocabulary import BlockKey, KeySpaceId, RequestId
from moonpool.errors import ConfigError, JournalError
from moonpool.trace.request import TraceRequest
from moonpool.trace.write import write_trace
from moonpool.wire.journal import Segment, read_segment, segments_in

ARRIVAL_DIGITS = 4
"""Of seconds: finer no clock in it is."""


class Heard:
    """One request of the journal."""

    __slots__ = ("at", "chains", "most_output", "output", "tokens")

    def __init__(self, at: float, tokens: int, most_output: int, chains: dict[KeySpaceId, tuple[int, ...]]) -> None:
        self.at = at
        """Seconds since the epoch at which it came to its gateway."""
        self.tokens = tokens
        self.most_output = most_output
        self.chains = chains
        """Numbers of its whole blocks."""
        self.output: int | None = None
        """None: nobody knows how long its answer would have been."""


class Recording:
    """What segments tell of requests, segment by segment."""

    def __init__(self, model: str | None = None) -> None:
        """`model`: only requests for this one."""
        self.models: Counter[str] = Counter()
        self.block_tokens: dict[KeySpaceId, int] = {}
        self.damage: list[str] = []
        self._model = model
        self._heard: dict[RequestId, Heard] = {}
        self._numbers: dict[tuple[KeySpaceId, BlockKey], int] = {}
        self._offsets: dict[str, float] = {}
        """Of each Conductor's clock, to seconds since the epoch."""

    def offset(self, segment: Segment) -> float:
        """A segment is dated when it begins, at or before its first record: of several the latest tells best."""
        name = segment.origin.conductor
        if segment.entries:
            here = segment.origin.written_at - segment.entries[0].now
            self._offsets[name] = max(here, self._offsets.get(name, here))
        return self._offsets.get(name, 0.0)

    def take(self, segment: Segment) -> None:
        """After `offset` of all segments."""
        offset = self.offset(segment)
        if segment.damage:
            self.damage.append(f"{segment.path.name}: {segment.damage}")
        for entry in segment.entries:
            match entry.event:
                case RequestArrived(attempt=1) as arrived:
                    self._arrived(arrived, offset + entry.now)
                case Finished(request=request, output_tokens=output) if request in self._heard:
                    self._heard[request].output = output
                case Registered(space=space) if space is not None:
                    self.block_tokens[space.id] = space.block_tokens

    def _arrived(self, arrived: RequestArrived, now: float) -> None:
        self.models[arrived.model] += 1
        if arrived.request in self._heard or self._model not in (None, arrived.model):
            return
        chains = {
            chain.space: tuple([self._number(chain.space, key) for key in chain.keys]) for chain in arrived.chains
        }
        self._heard[arrived.request] = Heard(
            now - arrived.waited, arrived.prompt_tokens, arrived.max_output_tokens, chains
        )

    def _number(self, space: KeySpaceId, key: BlockKey) -> int:
        return self._numbers.setdefault((space, key), len(self._numbers))

    def space(self) -> tuple[KeySpaceId, int] | None:
        """That most requests have blocks in, and its block's tokens. Raises JournalError where nothing tells those."""
        counts = Counter(space for heard in self._heard.values() for space in heard.chains)
        if not counts:
            return None
        space = counts.most_common(1)[0][0]
        tokens = self.block_tokens.get(space) or self._guess(space)
        if tokens is None:
            raise JournalError(
                "no worker has registered in this journal, and its prompts do not tell how many tokens a block has: "
                "take a longer part of it"
            )
        return space, tokens

    def _guess(self, space: KeySpaceId) -> int | None:
        """A prompt of n tokens and k whole blocks says: above n / (k + 1), at most n / k. The only power of 2 there."""
        low, high = 1.0, float("inf")
        for heard in self._heard.values():
            count = len(heard.chains.get(space, ()))
            low = max(low, heard.tokens / (count + 1))
            high = min(high, heard.tokens / count) if count else high
        fit = [1 << power for power in range(1, 21) if low < 1 << power <= high]
        return fit[0] if len(fit) == 1 else None

    def requests(self, space: KeySpaceId | None, own_tokens: int, block_tokens: int) -> Iterator[TraceRequest]:
        """In order of arrival, from time 0, with ids for blocks of `block_tokens`, a multiple of the space's own."""
        heard = sorted(self._heard.values(), key=lambda each: each.at)
        usual = self.usual_output()
        next_id, step = len(self._numbers), block_tokens // own_tokens
        for each in heard:
            keys = each.chains.get(space, ()) if space is not None else ()
            # A key stands for all before it: every so many-th one is that of the larger block.
            blocks = keys[step - 1 :: step]
            # What fills no block has a key of its own: whether others share it, nobody knows.
            lacking = -(-each.tokens // block_tokens) - len(blocks)
            ids = (*blocks, *range(next_id, next_id + lacking))
            next_id += lacking
            output = min(usual, each.most_output) if each.output is None else each.output
            yield TraceRequest(round(each.at - heard[0].at, ARRIVAL_DIGITS), each.tokens, max(output, 1), ids)

    def usual_output(self) -> int:
        """Median tokens of an answer."""
        known = [each.output for each in self._heard.values() if each.output is not None]
        return round(statistics.median(known)) if known else 1

    @property
    def unfinished(self) -> int:
        return sum(each.output is None for each in self._heard.values())

    def __len__(self) -> int:
        return len(self._heard)


def record(out: Path, journal: Path | None, block_size: int | None, model: str | None) -> int:
    """Write the trace and say what is in it. Raises ConfigError, JournalError or TraceError."""
    folder = journal or default_directory()
    recording = _heard_in(segments_in(folder), model)
    if not len(recording):
        others = f"; it has requests for {', '.join(recording.models)}" if recording.models else ""
        raise JournalError(f"{folder} has no requests{f' for {model}' if model else ''}{others}")
    found = recording.space()
    space, own = found if found is not None else (None, block_size or 512)
    block = block_size or own
    if block % own:
        raise ConfigError(f"--block-size {block}: must be a multiple of the cluster's own, {own} tokens")
    requests = list(recording.requests(space, own, block))
    write_trace(out, requests)
    distinct = len({id_ for request in requests for id_ in request.blocks})
    print(
        f"{out}: {len(requests)} requests in {requests[-1].arrival:.1f} s, {distinct} different blocks "
        f"of {block} tokens (--block-size {block} for whoever reads it)"
    )
    if len(recording.models) > 1 and model is None:
        print(f"  for {len(recording.models)} models, {', '.join(recording.models)}: --model takes one")
    if recording.unfinished:
        print(
            f"  {recording.unfinished} were not answered to their end: they are given the median answer, "
            f"{recording.usual_output()} tokens, or what they asked for where that is less"
        )
    for damage in recording.damage:
        print(f"  not read: {damage}")
    return 0


def _heard_in(paths: Sequence[Path], model: str | None) -> Recording:
    """Of all segments that can be read; they are read twice, one at a time: clocks first."""
    recording, failures = Recording(model), list[JournalError]()
    for path in paths:
        try:
            recording.offset(read_segment(path))
        except JournalError as e:
            failures.append(e)
            recording.damage.append(str(e))
    if len(failures) == len(paths):
        raise failures[0]
    for path in paths:
        try:
            recording.take(read_segment(path))
        except JournalError:
            continue
    return recording
