"""Prompts for a trace's requests: their tokens follow from the trace's block ids and a seed, and from nothing else.

Equal ids give equal tokens. Blocks of different ids differ within their first few tokens, mostly in the very first:
those spell the id, in digits that a one-to-one mix of it has, so that no two ids share a spelling. What follows is
drawn from the same mix. So prompts share whole blocks exactly where their ids are equal, and no chance is in it.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from moonpool.errors import ConfigError, MoonpoolError
from moonpool.trace.request import TraceRequest

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MASK = (1 << 64) - 1
ODD = 0x9E3779B97F4A7C15
LEAST_WORDS = 256
ID_RANGE = (1000, 32_000)
"""Token ids that any usual vocabulary has, without those that mean something special."""
MOST_WORDS = 8192
"""Of a text: they are tried one by one."""
TRIED = 4096
"""Tokens of a text with which words are tried together."""
CACHED_BYTES = 64 << 20
BLOCKS_A_TURN = 16
"""So many are made before others have the event loop."""


class Words(Struct, frozen=True):
    """What a prompt is made of: any of them in any order is one token each."""

    pieces: tuple[bytes, ...]
    """As they stand in JSON: numbers, or text."""
    joint: bytes
    """Between them."""


def ids_below(vocabulary: int | None = None) -> Words:
    """Token ids. `vocabulary`: how many there are; the last of them are often special. Raises ConfigError."""
    low, high = ID_RANGE
    if vocabulary is not None:
        high = min(vocabulary, high)
        low = min(low, high // 4)
    if high - low < LEAST_WORDS:
        raise ConfigError(f"--vocabulary {vocabulary}: prompts need some {2 * LEAST_WORDS} token ids at least")
    return Words(tuple([b"%d" % number for number in range(low, high)]), b",")


def text_words(tokenizer: Tokenizer) -> Words:
    """Words with a space before them that are tokens by themselves and beside each other.

    Raises MoonpoolError where the tokenizer has too few of them.
    """
    rng = np.random.default_rng(0)
    found = [" " + text for text in _candidates(tokenizer)]
    for at in range(0, len(found), TRIED):
        # Beside each other in another order than that of the vocabulary.
        part = found[at : at + TRIED]
        order = rng.permutation(len(part)).tolist()
        kept = set(_whole(tokenizer, [part[number] for number in order]))
        found[at : at + TRIED] = [text if text in kept else "" for text in part]
    words = [text for text in found if text][:MOST_WORDS]
    sample = [words[number] for number in rng.integers(len(words), size=TRIED)] if words else []
    if len(words) < LEAST_WORDS or len(tokenizer.encode("".join(sample), add_special_tokens=False).ids) != TRIED:
        raise MoonpoolError(
            f"the tokenizer has only {len(words)} words of one token that stay so beside others, prompts need "
            f"{LEAST_WORDS}; where the endpoint takes token ids, do without --tokenizer"
        )
    return Words(tuple([msgspec.json.encode(word)[1:-1] for word in words]), b"")


def _candidates(tokenizer: Tokenizer) -> list[str]:
    """Plain words of the vocabulary, in the order of their ids."""
    special = set(tokenizer.get_added_tokens_decoder())
    known = sorted((number, text) for text, number in tokenizer.get_vocab().items() if number not in special)
    plain = [text[1:] for _, text in known if text[:1] in ("Ġ", "▁")]
    return [text for text in plain if 2 <= len(text) <= 12 and text.isascii() and text.isalpha() and text.islower()]


def _whole(tokenizer: Tokenizer, texts: Sequence[str]) -> list[str]:
    """Those that come out as one token each when all are joined."""
    offsets = tokenizer.encode("".join(texts), add_special_tokens=False).offsets
    before = {0: 0}
    """By each place where a token ends: how many end there or before."""
    for count, (_, end) in enumerate(offsets, 1):
        before[end] = count
    found, at = [], 0
    for text in texts:
        end = at + len(text)
        if at in before and before.get(end) == before[at] + 1:
            found.append(text)
        at = end
    return found


class Prompts:
    """Makes them, as JSON without brackets or quotes."""

    def __init__(self, words: Words, block_tokens: int, seed: int, extra_tokens: int = 0) -> None:
        """`extra_tokens`: that the endpoint puts before each; they count as the prompt's first."""
        self._words = words
        self._block = block_tokens
        self._extra = extra_tokens
        self._salt = _mix(seed * ODD + 1)
        self._digits = math.ceil(64 / math.log2(len(words.pieces)))
        self._cache: OrderedDict[int, bytes] = OrderedDict()
        self._cached = 0

    async def prompt(self, number: int, request: TraceRequest) -> bytes:
        """Of the request with this number in its run: what the trace has no ids for, no other prompt has."""
        left, skip = max(request.input_tokens, self._extra + 1), self._extra
        parts = []
        for at in range(-(-left // self._block)):
            id_ = request.blocks[at] if at < len(request.blocks) else _own(number, at)
            taken = min(left, self._block)
            left -= taken
            # What the endpoint adds stands in the place of the block's last tokens: its first ones tell it apart.
            taken, skip = max(taken - skip, 0), max(skip - taken, 0)
            if taken:
                parts.append(self._whole(id_) if taken == self._block else self._part(id_, taken))
            if at % BLOCKS_A_TURN == BLOCKS_A_TURN - 1:
                await asyncio.sleep(0)
        return self._words.joint.join(parts)

    def numbers(self, id_: int, count: int) -> list[int]:
        """The first words of a block, as indices."""
        size, state = len(self._words.pieces), _mix((id_ + self._salt) & MASK)
        found, rest = [], state
        for _ in range(min(self._digits, count)):
            rest, digit = divmod(rest, size)
            found.append(digit)
        if count > self._digits:
            found += (_draws(state, count - self._digits) % np.uint64(size)).tolist()
        return found

    def _whole(self, id_: int) -> bytes:
        made = self._cache.pop(id_, None)
        if made is None:
            made = self._part(id_, self._block)
            self._cached += len(made)
        self._cache[id_] = made
        while self._cached > CACHED_BYTES:
            self._cached -= len(self._cache.popitem(last=False)[1])
        return made

    def _part(self, id_: int, count: int) -> bytes:
        pieces = self._words.pieces
        return self._words.joint.join([pieces[number] for number in self.numbers(id_, count)])


def _own(number: int, at: int) -> int:
    """An id of this place in this request alone: half of all numbers are beyond those of traces."""
    return -(number * (1 << 22) + at + 1)


def _mix(state: int) -> int:
    """One to one on 64 bits (splitmix64's)."""
    state &= MASK
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB & MASK
    return state ^ (state >> 31)


def _draws(state: int, count: int) -> npt.NDArray[np.uint64]:
    """The same of the states that follow."""
    with np.errstate(over="ignore"):
        found = np.uint64(state) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(ODD)
        found = (found ^ (found >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        found = (found ^ (found >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return found ^ (found >> np.uint64(31))
