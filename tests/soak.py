"""How much the tests try: enough each time, much more in `make soak`."""

from __future__ import annotations

import os

SOAK = os.environ.get("MOONPOOL_SOAK", "") not in ("", "0")


def often(examples: int, more: int = 30) -> int:
    """So many examples or rounds; `more` times as many in a soak."""
    return examples * more if SOAK else examples
