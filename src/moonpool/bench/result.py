"""The last line that a benchmark prints: what must hold, and on what machine it was measured."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence

Bar = dict[str, object]
"""`name`, `value`, `target`, `holds`; value and holds are None for what could not be measured, then with a `reason`."""


def bar(name: str, value: float | None, target: float, *, at_most: bool = False, reason: str = "") -> Bar:
    """`value` must be at least `target`, or at most."""
    if value is None:
        return {"name": name, "value": None, "target": target, "holds": None, "reason": reason or "not measured"}
    holds = value <= target if at_most else value >= target
    return {"name": name, "value": round(value, 3), "target": target, "holds": holds}


def print_result(bars: Sequence[Bar], **more: object) -> None:
    """`more`: of the surroundings, beside the machine."""
    env = {"cores": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version(), **more}
    print("RESULT " + json.dumps({"bars": bars, "env": env}))
