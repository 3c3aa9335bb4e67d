"""What the connector did, and what it could not do: numbers for vLLM's metrics, and lines that do not flood its log."""

from __future__ import annotations

import logging
import threading
import time
from typing import Final

log = logging.getLogger("vllm.moonpool")
"""A child of vLLM's logger: it is shown where vLLM's own lines are."""

SILENCE_SECONDS = 30.0

COUNTS: Final = {
    "lookups": "Prompts that the pool was asked for",
    "late_lookups": "Prompts whose answer came too late, or not at all",
    "hit_blocks": "Blocks that the pool was said to have, beyond vLLM's own cache",
    "loaded_blocks": "Blocks that came from the pool",
    "failed_blocks": "Blocks that did not come in time, and are computed",
    "saved_blocks": "Blocks that the pool did not have and got",
    "dropped_blocks": "Blocks that were computed and not stored: too late, or the node was away",
    "load_seconds": "Seconds that loads took",
    "save_wait_seconds": "Seconds that steps waited for what they store",
    "away": "Times that no node was found or that it went away",
    "faults": "Errors of the connector itself, each a miss to vLLM",
}


class Counters:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, float] = {}
        self._said: dict[str, tuple[float, int]] = {}

    def add(self, name: str, amount: float = 1) -> None:
        assert name in COUNTS, name
        with self._lock:
            self._counts[name] = self._counts.get(name, 0) + amount

    def take(self) -> dict[str, float]:
        """What was counted since this was called before."""
        with self._lock:
            counts, self._counts = self._counts, {}
            return counts

    def say(self, kind: str, text: str, is_fault: bool = False) -> None:
        """A warning, at most one of its kind in SILENCE_SECONDS. `is_fault`: with the error that is being handled."""
        now = time.monotonic()
        with self._lock:
            last, unsaid = self._said.get(kind, (-SILENCE_SECONDS, 0))
            if now < last + SILENCE_SECONDS:
                self._said[kind] = last, unsaid + 1
                return
            self._said[kind] = now, 0
        more = f" ({unsaid} more of this kind meanwhile)" if unsaid else ""
        log.warning("%s%s", text, more, exc_info=is_fault)
