"""How fast a server computes, as far as its answers tell: what the Conductor's cost models learn from.

A server computes prompts in turn or together and decodes meanwhile; all that is seen is when tokens come.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

STEPS_TOLD_SECONDS = 0.5
WINDOW_SECONDS = 0.1
UNDISTURBED_SECONDS = 5.0
"""After so long without one, steps beside which a prompt was computed are told of as well."""


class Prompted(Struct, frozen=True):
    """A prompt whose first token came."""

    sent: float
    computed_tokens: int
    first_at: float


class Taken(Struct, frozen=True):
    queue_seconds: float
    compute_seconds: float


class PromptPace:
    """From the later of the last first token and a prompt's sending up to its own first token, it was computed."""

    def __init__(self) -> None:
        self._last = 0.0

    def take(self, together: Sequence[Prompted]) -> list[Taken]:
        """Prompts whose first tokens came at nearly the same time share the time by the tokens that they computed."""
        end = max(each.first_at for each in together)
        begin = max(self._last, min(each.sent for each in together))
        self._last = end
        total = sum(each.computed_tokens for each in together)
        taken = []
        for each in together:
            seconds = max(end - begin, 0.0) * each.computed_tokens / total
            taken.append(Taken(max(each.first_at - each.sent - seconds, 0.0), seconds))
        return taken


class StepPace:
    """Seconds of a decode step: over a while in which the batch stayed the same, time x batch / tokens."""

    def __init__(self) -> None:
        self._since = 0.0
        self._tokens = 0
        self._told_at = 0.0

    def restart(self, now: float) -> None:
        """The batch is another one now."""
        self._since, self._tokens = now, 0

    def note(self, tokens: int, batch: int, is_prefilling: bool, now: float) -> float | None:
        """So many tokens came. The seconds of a step, where it is time to tell them."""
        self._tokens += tokens
        if now - self._told_at < (UNDISTURBED_SECONDS if is_prefilling else STEPS_TOLD_SECONDS):
            return None
        if now - self._since < WINDOW_SECONDS or self._tokens < 2 * batch:
            return None
        seconds = (now - self._since) * batch / self._tokens
        self._told_at = now
        self.restart(now)
        return seconds
