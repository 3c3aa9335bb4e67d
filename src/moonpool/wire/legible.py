"""Text that somebody else has chosen, as it may stand in a log: on one line, not too long, and no terminal obeys it."""

from __future__ import annotations

MOST_CHARS = 8192
"""Of one event of the log."""


def legible(text: str, most: int = MOST_CHARS) -> str:
    """Control characters, line ends and what has no shape are escaped; what is beyond `most` characters is left out."""
    cut = text[:most]
    if not cut.isprintable():
        cut = "".join(char if char.isprintable() else repr(char)[1:-1] for char in cut)
    return cut if len(text) <= most else f"{cut}… ({len(text)} characters)"
