"""The prompts that were placed last, and which of their blocks no other of them has."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from moonpool.core.vocabulary import BLOCK_KEY_BYTES, BlockKey, KeySpace

PROMPTS_REMEMBERED = 2048
BLOCKS_REMEMBERED = 1 << 17
BLOCKS_CHECKED = 20_000


class Prompt(NamedTuple):
    space: KeySpace
    keys: tuple[BlockKey, ...]
    """At least one."""
    used_at: float


class RecentPrompts:
    """The one that was used longest ago comes first; beyond so many prompts, or different blocks, it is forgotten."""

    def __init__(self) -> None:
        self._prompts: OrderedDict[BlockKey, Prompt] = OrderedDict()
        """By their last block, which stands for all before it."""
        self._uses: dict[BlockKey, int] = {}
        """In how many of these prompts a block is."""

    def used(self, prompt: Prompt) -> None:
        last = prompt.keys[-1]
        if self._prompts.pop(last, None) is None:
            self._count(prompt.keys)
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
        return [(prompt.space, b"".join(prompt.keys), prompt.used_at) for prompt in self._prompts.values()]

    @classmethod
    def from_plain(cls, plain: list[tuple[KeySpace, bytes, float]]) -> RecentPrompts:
        recent, size = cls(), BLOCK_KEY_BYTES
        for space, joined, used_at in plain:
            keys = tuple([BlockKey(joined[at : at + size]) for at in range(0, len(joined), size)])
            recent.used(Prompt(space, keys, used_at))
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
