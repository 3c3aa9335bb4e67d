"""K and V of the sequences that decode, beside their pages: contiguous by head, so that no step gathers pages.

Pages stay the truth, since they are what is stored, streamed and shared; this is a copy that a decode step extends by
one token a row. A seat is used again only by a row that goes on where it ended, on the same pages, none of which
anyone else could have written since (`Pages.touched`). Any other row is copied from its pages once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moonpool.engine.engine import Row
from moonpool.engine.pages import Pages

SPARE = 1.25
"""Room for growth when memory is taken, as a factor of the longest context."""


@dataclass(slots=True)
class Seat:
    """One sequence's place. `touched` at most `stamp` on all its pages: nobody else wrote there."""

    pages: list[int]
    index: npt.NDArray[np.int64]
    end: int
    stamp: int


@dataclass(slots=True)
class Seated:
    """One decode step's rows: `seats[i]` is the seat of row i, `ends[i]` its tokens once its new KV is written."""

    seats: Tensor
    last: Tensor
    ends: list[int]
    width: int
    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    """Per layer [width, kv_heads, longest, head_dim] of the first `width` seats."""
    both: Sequence[Tensor]
    """Per layer [seats, tokens, 2, kv_heads, head_dim]: all of it, to write to."""
    in_order: bool


class Contexts:
    """At most as much memory as all pages; a batch beyond that gets None and gathers pages."""

    def __init__(self, pages: Pages, dtype: torch.dtype) -> None:
        self._pages, self._dtype = pages, dtype
        self._limit_tokens = pages.page_count * pages.block_tokens
        self._seats: list[Seat | None] = []
        self._taken: list[int] = []
        """Seats of the running step's rows."""
        self._memory = self._allocate(0, 0)

    def _allocate(self, seats: int, tokens: int) -> Tensor:
        """[layers, 2, seats, kv_heads, tokens, head_dim] of zeros; forgets what was there."""
        self._seats = [None] * seats
        kv_heads, head_dim = self._pages.shape[3:]
        shape = (self._pages.layers, 2, seats, kv_heads, tokens, head_dim)
        self._memory = torch.empty(0, dtype=self._dtype, device=self._pages.device)  # the old one goes first
        self._memory = torch.zeros(shape, dtype=self._dtype, device=self._pages.device)
        return self._memory

    def seat(self, rows: Sequence[Row]) -> Seated | None:
        """Places for rows of one token each, holding KV of all tokens before it; None where there is no room."""
        self._taken = []
        longest = max(row.start + 1 for row in rows)
        if not self._make_room(len(rows), longest):
            return None
        seats = self._assign(rows)
        self._taken = seats
        for row, seat in zip(rows, seats, strict=True):
            known = self._seats[seat]
            if known is None:
                known = self._seats[seat] = self._fill(row, seat)
            used = row.pages[: row.start // self._pages.block_tokens + 1]
            if len(used) != len(known.pages):
                known.pages, known.index = list(used), np.array(used)
            known.end = row.start + 1
        width = max(seats) + 1
        part = self._memory[:, :, :width, :, :longest]
        return Seated(
            seats=torch.tensor(seats, device=self._memory.device),
            last=torch.tensor([row.start for row in rows], device=self._memory.device),
            ends=[row.start + 1 for row in rows],
            width=width,
            keys=part[:, 0].unbind(0),
            values=part[:, 1].unbind(0),
            both=self._memory.permute(0, 2, 4, 1, 3, 5).unbind(0),
            in_order=seats == list(range(width)),
        )

    def stamp(self) -> None:
        """Once the step's own pages are marked as touched: what the step writes there, it writes to its seats too."""
        now = self._pages.now()
        for index in self._taken:
            seat = self._seats[index]
            assert seat is not None
            seat.stamp = now

    def _make_room(self, rows: int, longest: int) -> bool:
        seats, tokens = self._memory.shape[2], self._memory.shape[4]
        if rows <= seats and longest <= tokens:
            return True
        block = self._pages.block_tokens
        for spare in (SPARE, 1.0):
            wanted = max(tokens, -(-int(longest * spare) // block) * block)
            if max(rows, seats) * wanted <= self._limit_tokens:
                self._allocate(max(rows, seats), wanted)
                return True
        return False

    def _assign(self, rows: Sequence[Row]) -> list[int]:
        """The lowest seats; a row that goes on keeps its own where that is one of them."""
        count = len(rows)
        known: dict[tuple[int, int], list[int]] = {}
        for index, seat in enumerate(self._seats[:count]):
            if seat is not None:
                known.setdefault((seat.end, seat.pages[-1]), []).append(index)
        taken: list[int | None] = [self._own(row, known) for row in rows]
        free = iter(sorted(set(range(count)).difference(taken)))
        seats: list[int] = []
        for own in taken:
            if own is None:
                own = next(free)
                self._seats[own] = None
            seats.append(own)
        return seats

    def _own(self, row: Row, known: dict[tuple[int, int], list[int]]) -> int | None:
        if row.start == 0:
            return None
        count = (row.start - 1) // self._pages.block_tokens + 1
        candidates = known.get((row.start, row.pages[count - 1]), [])
        for index in candidates:
            seat = self._seats[index]
            assert seat is not None
            same = list(row.pages[:count]) == seat.pages
            if same and int(self._pages.touched[seat.index].max()) <= seat.stamp:
                candidates.remove(index)
                return index
        return None

    def _fill(self, row: Row, seat: int) -> Seat:
        """Copy the context from its pages; zeros after it, since a masked NaN is NaN still."""
        block = self._pages.block_tokens
        used = list(row.pages[: row.start // block + 1])
        whole = -(-row.start // block)
        table = torch.tensor(used[:whole], dtype=torch.int64, device=self._memory.device)
        for layer in range(self._pages.layers):
            place = self._memory[layer, :, seat]
            if whole:
                # [pages, 2, block, kv_heads, head_dim] to [2, kv_heads, pages * block, head_dim]
                runs = self._pages.tensor(layer).index_select(0, table)
                ordered = runs.permute(1, 3, 0, 2, 4).flatten(2, 3)
                place[:, :, : row.start] = ordered[:, :, : row.start]
            place[:, :, row.start :].zero_()
        return Seat(used, np.array(used), row.start, -1)
