"""Lines of the Mooncake trace format (PAPER §8)."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from moonpool.trace.request import TraceRequest

Tokens = Annotated[int, Meta(ge=0, lt=1 << 40)]


class _Line(Struct):
    timestamp: Annotated[float, Meta(ge=0, lt=1e15)]
    """Milliseconds."""
    input_length: Tokens
    output_length: Tokens
    hash_ids: tuple[int, ...] = ()


_decoder = msgspec.json.Decoder(_Line)


def parse(line: bytes) -> TraceRequest:
    """Raises ValueError that says what is wrong."""
    try:
        row = _decoder.decode(line)
    except msgspec.MsgspecError as e:
        raise ValueError(str(e)) from None
    if len(set(row.hash_ids)) < len(row.hash_ids):
        raise ValueError("an id occurs twice in hash_ids")
    return TraceRequest(row.timestamp / 1000, row.input_length, row.output_length, row.hash_ids)


def format_line(request: TraceRequest) -> bytes:
    """Exact to the nanosecond; whole milliseconds are written as whole numbers."""
    milliseconds = round(request.arrival * 1000, 6)
    row = {
        "timestamp": int(milliseconds) if milliseconds.is_integer() else milliseconds,
        "input_length": request.input_tokens,
        "output_length": request.output_tokens,
        "hash_ids": request.blocks,
    }
    return msgspec.json.encode(row) + b"\n"
