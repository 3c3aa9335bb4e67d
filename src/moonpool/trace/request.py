"""One request of a trace, whatever file it came from."""

from __future__ import annotations

import enum

from msgspec import Struct


class TraceFormat(enum.Enum):
    MOONCAKE = "mooncake"
    """JSONL: timestamp (ms), input_length, output_length, hash_ids."""
    AZURE = "azure"
    """CSV of arrival and lengths; says nothing of prefixes."""
    BURSTGPT = "burstgpt"
    """The same with other columns, and with requests that failed."""


class TraceRequest(Struct, frozen=True, gc=False):
    arrival: float
    """Seconds since the trace began, at least 0."""
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    """An id for each block of the prompt, a partial last one included: equal ids mean an equal prefix up to there.

    No id occurs twice. Empty where the file has none.
    """
