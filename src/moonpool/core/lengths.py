"""How long answers get: counted per family of prompts, forgotten slowly, in bounded memory.

A family is all prompts that begin with the same blocks. Its own counts speak where there are enough of them, then those
of a wider family, of the model, of the whole cluster; where nothing was seen yet a guess does.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isqrt

from moonpool.core.vocabulary import BlockKey

SLICES = 5
"""A distribution is told as the means of so many equally likely slices, shortest first."""
FAMILY_KEYS = 2
"""Prompts are kin by their first block, and closer kin by their first two."""
FAMILIES = 2048
"""Remembered; the one not seen for longest goes."""
_CONFIDENT = 8
"""Answers that a family must have given to speak for itself."""
_KEPT = 512
"""When so many are counted all weigh half from then on."""
_STARTS = sorted({isqrt(isqrt(1 << quarter)) for quarter in range(80)})
"""First length of each bin: four bins for each doubling, in whole numbers, so that every machine counts alike."""
_BINS = len(_STARTS)
_MIDDLES = [(low + high - 1) / 2 for low, high in zip(_STARTS, [*_STARTS[1:], _STARTS[-1] + 1], strict=True)]
_GUESS = (20.0, 80.0, 160.0, 280.0, 560.0)
"""Before anything was seen: chats."""

Expected = tuple[float, ...]
"""Output tokens in each slice."""


@dataclass(slots=True)
class Lengths:
    """Of the answers in one family."""

    counts: list[float] = field(default_factory=lambda: [0.0] * _BINS)
    total: float = 0.0
    _sliced: Expected = ()
    _sliced_until: float = 0.0

    def observe(self, tokens: int) -> None:
        self.counts[_bin(tokens)] += 1.0
        self.total += 1.0
        if self.total >= _KEPT:
            self.counts = [count / 2 for count in self.counts]
            self.total /= 2
            self._sliced_until = 0.0

    def slices(self) -> Expected:
        """Recomputed when a tenth more was counted."""
        if self.total >= self._sliced_until:
            self._sliced = self.slices_beyond(0)
            self._sliced_until = 1.1 * self.total + 1.0
        return self._sliced

    def slices_beyond(self, produced: int) -> Expected:
        """Of those answers that are longer than `produced`; empty where none was."""
        first = _bin(produced + 1) if produced else 0
        left = sum(self.counts[first:])
        if left <= 0.0:
            return ()
        share = left / SLICES
        found: list[float] = []
        need, weighted = share, 0.0
        for at in range(first, _BINS):
            count, middle = self.counts[at], max(_MIDDLES[at], produced + 1.0)
            while count > need and len(found) < SLICES - 1:
                found.append((weighted + need * middle) / share)
                count -= need
                need, weighted = share, 0.0
            weighted += count * middle
            need -= count
        # Rounding may leave a little in the last slice, or the last one short.
        found.append(weighted / max(share - need, 1e-9 * share) if weighted else found[-1])
        return tuple(found)


class LengthForecast:
    def __init__(self) -> None:
        self._families: OrderedDict[BlockKey, Lengths] = OrderedDict()
        self._models: dict[str, Lengths] = {}
        self._all = Lengths()

    def observe(self, model: str, keys: Sequence[BlockKey], tokens: int) -> None:
        """An answer of `tokens` tokens to a prompt with these block keys is complete."""
        for key in keys[:FAMILY_KEYS]:
            family = self._families.get(key)
            if family is None:
                family = self._families[key] = Lengths()
                if len(self._families) > FAMILIES:
                    self._families.popitem(last=False)
            else:
                self._families.move_to_end(key)
            family.observe(tokens)
        of_model = self._models.get(model)
        if of_model is None:
            of_model = self._models[model] = Lengths()
        of_model.observe(tokens)
        self._all.observe(tokens)

    def expected(self, model: str, keys: Sequence[BlockKey], produced: int, most: int) -> Expected:
        """Tokens of the whole answer, `produced` of which are there and which has `most` at most; `SLICES` of them."""
        for lengths in self._nearest(model, keys):
            if lengths.total < _CONFIDENT:
                continue
            found = lengths.slices_beyond(produced) if produced else lengths.slices()
            if found:
                return found if found[-1] <= most else tuple([min(length, most) for length in found])
        return tuple([min(produced + length, most) for length in _GUESS])

    def _nearest(self, model: str, keys: Sequence[BlockKey]) -> list[Lengths]:
        """The closest first."""
        families = [self._families[key] for key in reversed(keys[:FAMILY_KEYS]) if key in self._families]
        if model in self._models:
            families.append(self._models[model])
        families.append(self._all)
        return families

    def check_integrity(self) -> None:
        assert len(self._families) <= FAMILIES
        for lengths in (*self._families.values(), *self._models.values(), self._all):
            assert abs(sum(lengths.counts) - lengths.total) < 1e-6 * max(lengths.total, 1.0)


def _bin(tokens: int) -> int:
    return bisect_right(_STARTS, max(tokens, 1)) - 1
