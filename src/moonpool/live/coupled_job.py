"""What a coupled worker keeps of each request, and counts of all."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from moonpool.core.vocabulary import RequestId
from moonpool.wire.messages import TokenOut, Work


@dataclass(slots=True)
class Job:
    work: Work
    arrived: float
    tokens: list[int]
    pages: tuple[int, ...] = ()
    """While it is prefilled; a row brings its own."""
    tasks: tuple[asyncio.Task[None], ...] = ()
    """What still reads or writes its pages."""
    load_seconds: float = 0.0
    started: float = 0.0
    compute_seconds: float = 0.0
    cached_tokens: int = 0
    joined: bool = False
    """It has its first token."""
    dropped: bool = False
    failure: str | None = None
    """Why the request was dropped by this worker itself."""
    finish: str | None = None
    last: TokenOut | None = None
    """The final token, sent when the blocks are kept: whoever asks the next turn at once finds them."""

    @property
    def id(self) -> tuple[RequestId, int]:
        return self.work.request, self.work.attempt

    @property
    def position(self) -> int:
        """Of the next output token."""
        return len(self.tokens) - self.work.prompt_tokens

    def time_left(self) -> float:
        return self.work.time_left - (time.monotonic() - self.arrived)


@dataclass(slots=True)
class Totals:
    prompts: int = 0
    computed_tokens: int = 0
    cached_tokens: int = 0
    finished: int = 0
    failures: int = 0
    tokens: int = 0
    steps: int = 0
    mixed_steps: int = 0
    step_seconds: float = 0.0
    blocks_stored: int = 0
