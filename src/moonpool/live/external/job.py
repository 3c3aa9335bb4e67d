"""What an adapter keeps of each request, and counts of all."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from moonpool.core.vocabulary import RequestId
from moonpool.wire.messages import TokenOut, Work


@dataclass(slots=True, eq=False)
class Job:
    work: Work
    sent: float
    """When it came here, and went on to the server."""
    tokens: list[int]
    cached_tokens: int
    """As expected, until the server says it."""
    prompt_cached: int | None = None
    """Of the prompt, where it was prefilled by another instance."""
    transfer: bytes = b""
    """`kv_transfer_params`: from the server that prefilled it, or for the one that goes on with it."""
    has_first: bool = False
    """It was handed over with its first token, or has it from here."""
    task: asyncio.Task[None] | None = None
    heard_at: float = 0.0
    """When its last token came."""
    is_answered: bool = False
    """Something came for it."""
    dropped: bool = False
    """Nobody wants it any more."""
    failure: str | None = None
    unservable: bool = False
    """The server has said that the request is to blame."""
    finish: str | None = None
    last: TokenOut | None = None
    """The final token, which waits for what the server says at the end."""

    @property
    def id(self) -> tuple[RequestId, int]:
        return self.work.request, self.work.attempt

    @property
    def position(self) -> int:
        """Of the next output token."""
        return len(self.tokens) - self.work.prompt_tokens

    @property
    def computed_tokens(self) -> int:
        """Of what was sent."""
        return max(len(self.work.tokens) - self.cached_tokens, 1)

    def time_left(self) -> float:
        return self.work.time_left - (time.monotonic() - self.sent)


@dataclass(slots=True)
class Totals:
    prompts: int = 0
    computed_tokens: int = 0
    cached_tokens: int = 0
    finished: int = 0
    failed_prompts: int = 0
    generated_tokens: int = 0
    refused: int = 0
    """By the server, as the request's fault."""
    faults: int = 0
    """Of the server."""
