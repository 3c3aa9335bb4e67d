"""Synthetic requests: arrivals, lengths, shared prefixes and conversations, drawn from one seed, a request at a time.

Arrivals and contents are drawn apart: a request arrives (singly or in batches), belongs to a family by its share, and
is the next turn of that family's conversation which has waited longest for one, or else begins a new one. So rate and
shares are what was asked for from the first request on. What is kept is the conversations and documents that are alive:
memory does not grow with the number of requests.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from typing import Literal

import numpy as np
from msgspec import Struct

from moonpool.trace.request import TraceRequest

BLOCK_TOKENS = 512
LONGEST_PROMPT = 126_000
"""With an answer it fits a context of 128k tokens."""
ALMOST_NONE = 1e-12


class Lengths(Struct, frozen=True):
    """`least` and what is drawn beyond it, at most `most` in all: tokens, or seconds."""

    mean: float
    """Before `most` cuts."""
    deviation: float = 0.0
    """Standard deviation in units of the mean beyond `least`."""
    least: float = 0.0
    most: float = float(LONGEST_PROMPT)
    shape: Literal["lognormal", "normal"] = "lognormal"
    usual: float | None = None
    """What a `usual_share` of all are instead."""
    usual_share: float = 0.0

    def draw(self, rng: np.random.Generator) -> float:
        if self.usual is not None and rng.random() < self.usual_share:
            return self.usual
        beyond = self.mean - self.least
        if self.deviation and beyond > 0:
            if self.shape == "normal":
                beyond *= 1 + self.deviation * rng.standard_normal()
            else:
                variance = math.log1p(self.deviation**2)
                beyond *= math.exp(math.sqrt(variance) * rng.standard_normal() - variance / 2)
        return min(max(self.least + beyond, self.least), self.most)


class Family(Struct, frozen=True):
    """Requests of one kind."""

    prompt: Lengths
    """Of a first turn, with all that it shares."""
    answer: Lengths
    share: float = 1.0
    """Of all requests."""
    preamble_blocks: int = 0
    """That every prompt of the family begins with (as far as it is long enough)."""
    documents: int = 0
    """Alive at one time: a first turn is about one of them, evenly drawn, and shares `document_part` of its prompt."""
    document_part: float = 0.0
    document_uses: float = math.inf
    """By how many prompts, on average, until another takes its place."""
    going_on: float = 0.0
    """Share of the requests that are followed by another turn, if the prompt does not grow too long."""
    pause: Lengths = Lengths(60.0)
    """Seconds from a turn's arrival to the time from which the next one may come."""
    added: Lengths = Lengths(100.0)
    """Tokens that a later turn has beyond the last prompt and its answer."""


class Synthetic(Struct, frozen=True):
    families: tuple[Family, ...]
    requests: int = 2000
    rate: float = 1.0
    """Requests a second."""
    batch: float = 0.0
    """Seconds between the times at which requests arrive, all together; 0: each at its own time."""
    seed: int = 0
    block_tokens: int = BLOCK_TOKENS


def synthesize(wanted: Synthetic) -> Iterator[TraceRequest]:
    """In order of arrival. Poisson arrivals; with `batch`, batches at equal distances, their sizes Poisson."""
    rng = np.random.default_rng(wanted.seed)
    ids = _Ids()
    families = [_Alive(family, wanted.block_tokens, ids) for family in wanted.families]
    shares = np.cumsum([family.share for family in wanted.families])
    now = 0.0
    for _ in range(wanted.requests):
        now += rng.exponential(1 / wanted.rate)
        arrival = math.floor(now / wanted.batch) * wanted.batch if wanted.batch else now
        chosen = 0 if len(families) == 1 else int(np.searchsorted(shares, rng.random() * shares[-1], side="right"))
        yield families[chosen].request(arrival, rng)


class _Ids:
    """New ones, in order."""

    def __init__(self) -> None:
        self._next = 0

    def new(self, count: int) -> list[int]:
        first = self._next
        self._next += count
        return list(range(first, self._next))


class _Document:
    def __init__(self) -> None:
        self.blocks: list[int] = []
        """As many as any prompt has needed."""


class _Turn(Struct, frozen=True, order=True):
    """A conversation that may go on."""

    due: float
    number: int
    tokens: int
    """Of the last prompt and its answer."""
    blocks: tuple[int, ...]
    """The whole ones of the last prompt."""


class _Alive:
    """A family and what it remembers."""

    def __init__(self, family: Family, block_tokens: int, ids: _Ids) -> None:
        self._family = family
        self._block_tokens = block_tokens
        self._ids = ids
        self._preamble = ids.new(family.preamble_blocks)
        self._documents = [_Document() for _ in range(family.documents)]
        self._turns: list[_Turn] = []
        self._made = 0

    def request(self, arrival: float, rng: np.random.Generator) -> TraceRequest:
        turns = self._turns
        if turns and turns[0].due <= arrival:
            turn = heapq.heappop(turns)
            tokens = min(turn.tokens + _tokens(self._family.added, rng), LONGEST_PROMPT)
            shared: list[int] | tuple[int, ...] = turn.blocks
        else:
            tokens = _tokens(self._family.prompt, rng)
            shared = self._shared(tokens, rng)
        answer = _tokens(self._family.answer, rng)
        blocks = (*shared, *self._ids.new(-(-tokens // self._block_tokens) - len(shared)))
        self._made += 1
        if self._family.going_on and rng.random() < self._family.going_on:
            due = arrival + self._family.pause.draw(rng)
            if tokens + answer + self._family.added.mean <= LONGEST_PROMPT:
                whole = blocks[: tokens // self._block_tokens]
                heapq.heappush(turns, _Turn(due, self._made, tokens + answer, whole))
        return TraceRequest(arrival, tokens, answer, blocks)

    def _shared(self, tokens: int, rng: np.random.Generator) -> list[int]:
        """The blocks of a new conversation that others have too: whole ones alone."""
        family, whole = self._family, tokens // self._block_tokens
        shared = self._preamble[:whole]
        if not self._documents:
            return shared
        at = int(rng.integers(len(self._documents)))
        document = self._documents[at]
        wanted = min(int(tokens * family.document_part) // self._block_tokens, whole) - len(shared)
        if wanted > len(document.blocks):
            document.blocks += self._ids.new(wanted - len(document.blocks))
        if rng.random() * family.document_uses < 1.0:
            self._documents[at] = _Document()
        return shared + document.blocks[: max(wanted, 0)]


def _tokens(lengths: Lengths, rng: np.random.Generator) -> int:
    return max(round(lengths.draw(rng)), 1)
