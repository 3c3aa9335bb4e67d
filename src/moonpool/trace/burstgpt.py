"""Lines of the BurstGPT traces: CSV of seconds, model, request and response tokens, and where the request was made.

A row without response tokens is a request that failed: it says nothing of how long its answer would have been.
"""

from __future__ import annotations

from collections.abc import Callable

from moonpool.trace.cells import cells_of, check_seconds, names_in, tokens_in
from moonpool.trace.request import TraceRequest

HEADER = ("Timestamp", "Model", "Request tokens", "Response tokens", "Total tokens", "Log Type")
_NEEDED = ("timestamp", "request tokens", "response tokens")


def parser(header: bytes) -> Callable[[bytes], TraceRequest | None] | None:
    """What parses the lines below this one (raising ValueError); it returns None for a request that failed.

    None where this is no header of a BurstGPT trace.
    """
    names = names_in(header)
    if not all(name in names for name in _NEEDED):
        return None
    arrival, asked, answered = [names.index(name) for name in _NEEDED]

    def parse(line: bytes) -> TraceRequest | None:
        cells = cells_of(line, len(names))
        seconds = check_seconds(float(cells[arrival]), cells[arrival])
        request = TraceRequest(seconds, tokens_in(cells[asked]), tokens_in(cells[answered]))
        return request if request.output_tokens else None

    return parse
