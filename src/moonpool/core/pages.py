"""The free KV pages of one engine. Page = block; a page has one owner at a time."""

from __future__ import annotations


class PagePool:
    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count - 1, -1, -1))
        self._used: set[int] = set()

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return len(self._used)

    def can_allocate(self, pages: int) -> bool:
        return pages <= len(self._free)

    def allocate(self, pages: int) -> list[int]:
        """Raises ValueError where `can_allocate` is false."""
        if not self.can_allocate(pages):
            raise ValueError(f"{pages} pages wanted, {len(self._free)} free")
        left = len(self._free) - pages
        taken = self._free[left:]
        taken.reverse()
        del self._free[left:]
        self._used.update(taken)
        return taken

    def release(self, pages: list[int]) -> None:
        """Raises ValueError for a page that is not in use: a page released twice would get two owners."""
        left = len(self._used) - len(pages)
        self._used.difference_update(pages)
        if len(self._used) != left:
            self._used = set(range(self.count)).difference(self._free)
            wrong = next(page for at, page in enumerate(pages) if page not in self._used or page in pages[:at])
            raise ValueError(f"page {wrong} is not in use")
        self._free += pages

    def check_integrity(self) -> None:
        assert len(self._free) + len(self._used) == self.count
        assert len(set(self._free)) == len(self._free)
        assert self._used.isdisjoint(self._free)


def pages_for(tokens: int, block_tokens: int) -> int:
    return -(-tokens // block_tokens)
