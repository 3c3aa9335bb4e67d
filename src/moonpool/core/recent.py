"""The prompts that were placed last: which of their blocks no other of them has, and what many of them begin with."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from itertools import islice
from typing import NamedTuple

from moonpool.core.vocabulary import BLOCK_KEY_BYTES, BlockKey, KeySpace

PROMPTS_REMEMBERED = 2048
BLOCKS_REMEMBERED = 1 << 17
BLOCKS_CHECKED = 20_000
PROMPTS_COMPARED = 256
"""The newest, for the hottest prefixes."""
MOST_FORKS = 16
"""Of one prompt, from its beginning on: where some of the others that begin alike leave it."""


class Prompt(NamedTuple):
    space: KeySpace
    keys: tuple[BlockKey, ...]
    """At least one."""
    used_at: float
    times: int = 1
    """That it was placed since it is remembered."""


class Prefix(NamedTuple):
    """What several prompts begin with."""

    space: KeySpace
    keys: tuple[BlockKey, ...]
    uses: int
    """Placements of the compared prompts that begin with it."""
    used_at: float
    """The last of them."""


class RecentPrompts:
    """The one that was used longest ago comes first; beyond so many prompts, or different blocks, it is forgotten."""

    def __init__(self) -> None:
        self._prompts: OrderedDict[BlockKey, Prompt] = OrderedDict()
        """By their last block, which stands for all before it."""
        self._uses: dict[BlockKey, int] = {}
        """In how many of these prompts a block is."""

    def used(self, prompt: Prompt) -> None:
        last = prompt.keys[-1]
        before = self._prompts.pop(last, None)
        if before is None:
            self._count(prompt.keys)
        else:
            prompt = prompt._replace(times=before.times + prompt.times)
        self._prompts[last] = prompt
        while len(self._prompts) > PROMPTS_REMEMBERED or (
            len(self._uses) > BLOCKS_REMEMBERED and len(self._prompts) > 1
        ):
            self.forget(next(iter(self._prompts.values())))

    def oldest(self) -> Prompt | None:
        return next(iter(self._prompts.values()), None)

    def alone_from(self, prompt: Prompt) -> int:
        """From this block to its end no other prompt has what it has."""
        uses, first = self._uses, len(prompt.keys)
        while first and uses[prompt.keys[first - 1]] == 1:
            first -= 1
        return first

    def hottest(self, most: int) -> list[Prefix]:
        """Of the newest PROMPTS_COMPARED: the prefixes that spared most blocks, the first one first.

        What lies on the way to another prompt's best prefix counts once: of each prompt only its best one is named.
        """
        prompts = list(islice(reversed(self._prompts.values()), PROMPTS_COMPARED))
        forks = [self._forks(prompt) for prompt in prompts]
        uses: dict[BlockKey, int] = {}
        for prompt, ends in zip(prompts, forks, strict=True):
            for end in ends:
                last = prompt.keys[end - 1]
                uses[last] = uses.get(last, 0) + prompt.times
        best: dict[BlockKey, Prefix] = {}
        for prompt, ends in zip(prompts, forks, strict=True):
            shared = [end for end in ends if uses[prompt.keys[end - 1]] > 1]
            if shared:
                end = max(shared, key=lambda end: (uses[prompt.keys[end - 1]] - 1) * end)
                last = prompt.keys[end - 1]
                best.setdefault(last, Prefix(prompt.space, prompt.keys[:end], uses[last], prompt.used_at))
        return sorted(best.values(), key=lambda p: (-(p.uses - 1) * len(p.keys), p.keys[-1]))[:most]

    def _forks(self, prompt: Prompt) -> list[int]:
        """After how many blocks other prompts leave it, the first MOST_FORKS; or it ends.

        The uses of its blocks never rise along it, for a key stands for all before it.
        """
        uses, keys, end = self._uses, prompt.keys, 0
        ends: list[int] = []
        while end < len(keys) and len(ends) < MOST_FORKS:
            end = bisect_left(keys, 1 - uses[keys[end]], lo=end, key=lambda key: -uses[key])
            ends.append(end)
        return ends

    def forget(self, prompt: Prompt) -> None:
        del self._prompts[prompt.keys[-1]]
        uses = self._uses
        for key in prompt.keys:
            if uses[key] == 1:
                del uses[key]
            else:
                uses[key] -= 1

    def to_plain(self) -> object:
        """Keys in one string a prompt: the Conductor stands still while this is made."""
        return [(p.space, b"".join(p.keys), p.used_at, p.times) for p in self._prompts.values()]

    @classmethod
    def from_plain(cls, plain: list[tuple[KeySpace, bytes, float, int]]) -> RecentPrompts:
        recent, size = cls(), BLOCK_KEY_BYTES
        for space, joined, used_at, times in plain:
            keys = tuple([BlockKey(joined[at : at + size]) for at in range(0, len(joined), size)])
            recent.used(Prompt(space, keys, used_at, times))
        return recent

    def _count(self, keys: tuple[BlockKey, ...]) -> None:
        uses = self._uses
        for key in keys:
            uses[key] = uses.get(key, 0) + 1

    def check_integrity(self) -> None:
        """Raises AssertionError where uses and prompts disagree; many blocks are not counted."""
        assert len(self._prompts) <= PROMPTS_REMEMBERED
        if len(self._uses) > BLOCKS_CHECKED:
            return
        counted: dict[BlockKey, int] = {}
        for prompt in self._prompts.values():
            for key in prompt.keys:
                counted[key] = counted.get(key, 0) + 1
        assert counted == self._uses
