"""How often prompts are used again: a prompt that continues an earlier one is likelier to be continued itself.

An earlier prompt is known by the key of its last whole block, whether it was served or refused: who asks again is still
there. What a prompt's KVCache will be good for is so told by counts, of prompts that begin something new and of those
that go on, in bounded memory.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from moonpool.core.vocabulary import BlockKey

REMEMBERED = 16384
"""Prompts; the one not continued for longest goes."""
_KEPT = 4096.0
"""When so many are counted all weigh half from then on."""
_PRIOR = 8.0
"""So many that were not continued are taken as seen before any was."""


@dataclass(slots=True)
class Sequels:
    new: float = 0.0
    """Prompts that continue none."""
    second: float = 0.0
    """That continue one of those."""
    later: float = 0.0
    """That continue one which continues another."""
    _ends: OrderedDict[BlockKey, tuple[bool, int]] = field(default_factory=OrderedDict)
    """By the key of a prompt's last whole block: whether it continued another, and its tokens."""

    def asked(self, keys: Sequence[BlockKey], tokens: int) -> float:
        """A prompt has come; how often its KVCache will be used, this time included.

        One that makes up at least half of it is what it continues: all share the first blocks of a system's prompt.
        """
        continues, known = self._find(keys)
        if known is None or known[1] != tokens:
            # The same once more is not counted: whoever was refused comes again.
            if known is None:
                self.new += 1.0
            elif known[0]:
                self.later += 1.0
            else:
                self.second += 1.0
            if self.new + self.second + self.later >= _KEPT:
                self.new, self.second, self.later = self.new / 2, self.second / 2, self.later / 2
            if keys:
                self._remember(keys[-1], (continues, tokens))
        else:
            continues = known[0]
        return self.uses(continues)

    def uses(self, continues: bool) -> float:
        """Of a prompt that continues another, or does not."""
        again = self.later / (self.second + self.later + _PRIOR)
        following = again / (1.0 - again)
        return 1.0 + (following if continues else self.second / (self.new + _PRIOR) * (1.0 + following))

    def _find(self, keys: Sequence[BlockKey]) -> tuple[bool, tuple[bool, int] | None]:
        ends = self._ends
        for at in range(len(keys) - 1, len(keys) // 2 - 1, -1):
            found = ends.get(keys[at])
            if found is not None:
                ends.move_to_end(keys[at])
                return True, found
        return False, None

    def _remember(self, key: BlockKey, what: tuple[bool, int]) -> None:
        self._ends[key] = what
        self._ends.move_to_end(key)
        if len(self._ends) > REMEMBERED:
            self._ends.popitem(last=False)

    def check_integrity(self) -> None:
        assert len(self._ends) <= REMEMBERED
        assert min(self.new, self.second, self.later) >= 0.0
