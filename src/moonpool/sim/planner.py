"""The search for the split of machines that bears the highest load at which 90 % of the requests attain.

Looking for that load on the whole trace for every split (`exhaustive`) takes several runs for each. This asks less:

1. By arithmetic each split has a bound from prefill and one from decode (`estimate.py`).
2. The most promising of each pipeline size are searched on the trace's beginning. What they bear over what their
   scarcer pool should corrects the arithmetic for that pool, which moves the promising ones; until they are all known,
   and on both sides of the best.
3. The best is searched on the whole trace, from where the corrected arithmetic sees it. Its neighbour with more of what
   it lacks, and the best of other pipeline sizes unless they are far behind, then have to attain at the first load that
   it does not: one run each, which ends as soon as it is certain (`trial.py`). Who does takes its place.

Loads lie on one grid for all splits, a factor of GRID apart. Rounds ask for several trials that do not depend on each
other, so that they may run side by side; what is asked does not depend on whether they do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from msgspec import Struct

from moonpool.sim.bracket import GRID, Bracket
from moonpool.sim.estimate import Split
from moonpool.sim.trial import Pool, Trial

BEGINNING_WIDTH = 3
"""Points of the grid between a load that does and one that does not, where only the beginning is looked at."""
NEAR = 0.95
"""Of the best: other pipeline sizes that should bear as much are tried on the whole trace."""
MOST_ROUNDS = 6
"""Of corrections."""


class Ask(Struct, frozen=True):
    """One trial: this split at so many times the trace's own speed."""

    split: Split
    speed: float
    whole: bool
    """The whole trace, or its beginning."""


Look = Callable[[Sequence[Ask]], Sequence[Trial]]
Bounds = Callable[[Split, bool], tuple[float, float]]
"""Of a split on the whole trace or its beginning: speeds that prefill and decode should bear."""


class Measured(Struct, frozen=True):
    """What was found for one split."""

    split: Split
    speed: float
    """The highest that attains; 0.0 where none did."""
    best: Trial | None
    """At that speed."""
    beyond: Trial | None
    """At the lowest that did not attain."""
    beyond_speed: float
    """Infinite where none was looked at."""
    whole: bool

    @property
    def about(self) -> float:
        """Between the highest speed that does and the lowest that does not."""
        return self.speed if self.beyond is None else math.sqrt(self.speed * self.beyond_speed)

    @property
    def limit(self) -> Pool:
        """What a higher load lacks."""
        if self.beyond is not None:
            return self.beyond.limit
        return "prefill" if self.best is None or self.best.prefill_busy > self.best.decode_load else "decode"


class Planned(Struct, frozen=True):
    best: Measured
    measured: tuple[Measured, ...]
    """On the whole trace, the best among them; others only as far as was needed to tell that they are not."""
    beginnings: tuple[Measured, ...]
    bounds: dict[Split, tuple[float, float]]
    """Of every split on the whole trace: speeds that prefill and decode should bear, by corrected arithmetic."""
    simulated: int
    """Requests."""
    trials: int


class _Quest:
    """For one split's highest load."""

    def __init__(self, split: Split, start: float, whole: bool, width: int = 1) -> None:
        self.split = split
        self.whole = whole
        self.bracket = Bracket(start, width)

    def ask(self) -> Ask:
        return Ask(self.split, self.bracket.speed, self.whole)

    def measured(self) -> Measured:
        found = self.bracket
        return Measured(self.split, found.best_speed, found.best, found.beyond, found.beyond_speed, self.whole)


def exhaustive(among: Iterable[Split], bounds: Bounds, look: Look) -> list[Measured]:
    """Each split's highest load on the whole trace, from where arithmetic sees it."""
    return _close([_Quest(split, min(bounds(split, True)), True) for split in among], look)


def plan(among: Sequence[Split], bounds: Bounds, look: Look) -> Planned:
    """`among`: at least one. A split that attains at no load has speed 0.0."""
    return _Search(among, bounds, look).plan()


def _close(quests: Sequence[_Quest], look: Look) -> list[Measured]:
    """All side by side."""
    while open_ := [quest for quest in quests if not quest.bracket.is_over]:
        trials = look([quest.ask() for quest in open_])
        for quest, trial in zip(open_, trials, strict=True):
            quest.bracket.tell(trial)
    return [quest.measured() for quest in quests]


class _Search:
    def __init__(self, among: Sequence[Split], bounds: Bounds, look: Look) -> None:
        self._among = sorted(among)
        self._bounds = bounds
        self._ask = look
        self._corrections = {"prefill": 1.0, "decode": 1.0}
        self._pipelines = {split.pipeline: 1.0 for split in self._among}
        """What each size bears over one of its size by arithmetic."""
        self._beginnings: dict[Split, Measured] = {}
        self._whole: dict[Split, Measured] = {}
        self._simulated = self._trials = 0

    def plan(self) -> Planned:
        self._correct_by_beginnings()
        best = self._climb()
        return Planned(
            best=best,
            measured=tuple(self._whole[split] for split in sorted(self._whole)),
            beginnings=tuple(self._beginnings[split] for split in sorted(self._beginnings)),
            bounds={split: self._corrected(split, True) for split in self._among},
            simulated=self._simulated,
            trials=self._trials,
        )

    def _look(self, asks: Sequence[Ask]) -> Sequence[Trial]:
        trials = self._ask(asks)
        self._simulated += sum(trial.simulated for trial in trials)
        self._trials += len(trials)
        return trials

    def _corrected(self, split: Split, whole: bool) -> tuple[float, float]:
        prefill, decode = self._bounds(split, whole)
        of_prefill = prefill * self._corrections["prefill"] * self._pipelines[split.pipeline]
        return of_prefill, decode * self._corrections["decode"]

    def _expected(self, split: Split, whole: bool) -> float:
        return min(self._corrected(split, whole))

    def _promising(self, whole: bool) -> list[Split]:
        """Of each pipeline size the best."""
        return [
            max(
                (split for split in self._among if split.pipeline == pipeline),
                key=lambda split: (self._expected(split, whole), -split.prefill),
            )
            for pipeline in self._pipelines
        ]

    # On the trace's beginning

    def _correct_by_beginnings(self) -> None:
        for _ in range(MOST_ROUNDS):
            new = [split for split in self._promising(False) if split not in self._beginnings]
            new = new or self._other_sides()
            if not new:
                return
            quests = [_Quest(split, self._expected(split, False), False, BEGINNING_WIDTH) for split in new]
            for measured in _close(quests, self._look):
                self._beginnings[measured.split] = measured
            self._correct(self._beginnings.values())

    def _other_sides(self) -> list[Split]:
        """Where only one pool was ever the scarcer one, what the other bears is not known: a step towards that.

        What prefill bears is asked of every pipeline size, and what decode bears once.
        """
        wanted: set[tuple[int, int]] = set()
        for pipeline in self._pipelines:
            seen = [each for each in self._beginnings.values() if each.split.pipeline == pipeline]
            if all(each.limit == "decode" for each in seen):
                wanted.add((pipeline, min(each.split.prefill for each in seen) - pipeline))
        if all(each.limit == "prefill" for each in self._beginnings.values()):
            most = max(self._beginnings, key=lambda split: (split.prefill, -split.pipeline))
            wanted.add((most.pipeline, most.prefill + most.pipeline))
        return [split for split in self._among if (split.pipeline, split.prefill) in wanted]

    def _correct(self, found: Iterable[Measured]) -> None:
        """By the mean of what each pool bore where it was the scarcer one; pipelines of one tell of prefill itself."""
        ratios: dict[str, list[float]] = {"prefill": [], "decode": []}
        grouped: dict[int, list[float]] = {}
        for each in found:
            if not each.speed:
                continue
            prefill, decode = self._bounds(each.split, each.whole)
            if each.limit == "decode":
                ratios["decode"].append(each.about / decode)
            elif each.split.pipeline == min(self._pipelines):
                ratios["prefill"].append(each.about / prefill)
            else:
                grouped.setdefault(each.split.pipeline, []).append(each.about / prefill)
        for pool, values in ratios.items():
            if values:
                self._corrections[pool] = sum(values) / len(values)
        for pipeline, values in grouped.items():
            self._pipelines[pipeline] = sum(values) / len(values) / self._corrections["prefill"]

    # On the whole trace

    def _climb(self) -> Measured:
        first = max(self._promising(True), key=lambda split: (self._expected(split, True), -split.pipeline))
        best = self._measure([_Quest(first, self._expected(first, True), True)])[0]
        self._correct([best])
        while challengers := [split for split in self._near(best) if split not in self._whole]:
            for won in self._challenge(best, challengers):
                if won.speed > best.speed:
                    best = won
                    self._correct([best])
        return best

    def _near(self, best: Measured) -> list[Split]:
        """Its neighbour with more of what it lacks, or the other one where that lacks the same; and of other pipeline
        sizes the best, if they should bear about as much."""
        split, step = best.split, best.split.pipeline
        near = [
            other
            for other in self._promising(True)
            if other.pipeline != step and self._expected(other, True) >= NEAR * best.speed
        ]
        more = step if best.limit == "prefill" else -step
        beside = Split(split.prefill + more, split.decode - more, step)
        if beside not in self._among or (beside in self._whole and self._whole[beside].limit == best.limit):
            beside = Split(split.prefill - more, split.decode + more, step)
        return [*near, beside] if beside in self._among else near

    def _challenge(self, best: Measured, challengers: Sequence[Split]) -> list[Measured]:
        """Who attains where the best does not is measured; the others have lost by that."""
        bar = best.beyond_speed if best.beyond is not None else best.speed * GRID
        quests = []
        trials = self._look([Ask(split, bar, True) for split in challengers])
        for split, trial in zip(challengers, trials, strict=True):
            quest = _Quest(split, bar, True)
            quest.bracket.tell(trial)
            if trial.passes:
                quests.append(quest)
            else:
                self._whole[split] = quest.measured()
        return self._measure(quests)

    def _measure(self, quests: Sequence[_Quest]) -> list[Measured]:
        found = _close(quests, self._look)
        for measured in found:
            self._whole[measured.split] = measured
        return found
