"""Where a gateway keeps its cached contexts."""

from __future__ import annotations

from pathlib import Path

from moonpool.engine.model import home

OFF = "off"


def caching_directory(given: str | None, part: str, port: int) -> str | None:
    """None: nowhere. By default it goes by the port, which no two gateways of a host share."""
    if given == OFF:
        return None
    return str(Path(given).absolute() if given else home() / "caching" / f"{part}-{port}")
