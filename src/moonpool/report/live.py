"""What a run on a real endpoint has beyond a simulated one: errors, all token intervals, and the client's own share."""

from __future__ import annotations

from msgspec import Struct

from moonpool.report.summary import Spread


class Client(Struct, frozen=True):
    """What the client itself did to the figures."""

    lag: Spread
    """Seconds that requests were sent after they were due."""
    stall: Spread
    """Seconds that its event loop was late: so much later than it came may a token have been seen."""
    cpu_share: float
    """Of one core."""
    cpu_per_token: float
    """Seconds of processor time for each token received, everything included."""
    most_streams: int
    """Under way at one time."""
    full: int
    """Requests that were late because so many were under way that no more were allowed."""


class Live(Struct, frozen=True):
    """Counts are of the requests that are measured: not the warm-up, not what was cut off."""

    endpoint: str
    model: str
    seconds: float
    """From the first request's due time to the last token."""
    prompt_tokens: int
    """Of requests that had a first token."""
    output_tokens: int
    intervals: Spread
    """Between all tokens of all requests."""
    errors: dict[str, int]
    """Requests that were neither completed nor refused, by what went wrong."""
    client: Client
    warm_up: int = 0
    """Requests before those that are measured."""
    cut_off: int = 0
    """Still under way when the run was interrupted."""
    wrong_prompts: int = 0
    """The endpoint counted other prompt tokens than were meant."""
    short_answers: int = 0
    """Complete, and shorter than was asked for."""
    held: int = 0
    """Turns that waited for the answer before them."""
    knows_cached: bool = True
    """The endpoint says how many prompt tokens it found cached."""
    notes: tuple[str, ...] = ()
