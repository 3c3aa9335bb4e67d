"""Lines of the Azure LLM inference traces, in both forms that are around: seconds from the start, or dates."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

from moonpool.trace.cells import cells_of, check_seconds, names_in, tokens_in
from moonpool.trace.request import TraceRequest

HEADER = ("arrived_at", "num_prefill_tokens", "num_decode_tokens")
DATED_HEADER = ("timestamp", "contexttokens", "generatedtokens")


def parser(header: bytes) -> Callable[[bytes], TraceRequest] | None:
    """What parses the lines below this one (raising ValueError); None where it is no header of an Azure trace."""
    names = names_in(header)
    for known in (HEADER, DATED_HEADER):
        if all(name in names for name in known):
            return _Rows(len(names), [names.index(name) for name in known], known is DATED_HEADER).parse
    return None


class _Rows:
    def __init__(self, width: int, columns: list[int], is_dated: bool) -> None:
        self._width = width
        self._arrival, self._input, self._output = columns
        self._is_dated = is_dated
        self._began: datetime | None = None

    def parse(self, line: bytes) -> TraceRequest:
        cells = cells_of(line, self._width)
        return TraceRequest(
            self._seconds(cells[self._arrival]), tokens_in(cells[self._input]), tokens_in(cells[self._output])
        )

    def _seconds(self, cell: str) -> float:
        if not self._is_dated:
            return check_seconds(float(cell), cell)
        date = datetime.fromisoformat(cell.strip())
        self._began = self._began or date
        if (date.tzinfo is None) != (self._began.tzinfo is None):
            raise ValueError(f"{cell!r} has a time zone where the first row has none, or the other way round")
        return check_seconds((date - self._began).total_seconds(), cell)


def format_line(request: TraceRequest) -> bytes:
    """Exact, but for the block ids: the format has no place for them."""
    return f"{request.arrival!r},{request.input_tokens},{request.output_tokens}\n".encode()
