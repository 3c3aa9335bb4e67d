"""When computing on a prefix may begin whose layers still come (PAPER §3, layer-wise prefill).

A prompt waits outside until what is still to come will come while it is computed: then nobody that shares its steps
waits for its layers, and it is done no later than if it had begun at once and waited at each layer. So the whole takes
as long as the longer of loading and computing, and little more.
"""

from __future__ import annotations

MARGIN = 0.8
"""Of the predicted computing: loads and predictions are not even."""
LEAST_PATIENCE_SECONDS = 0.25


def may_begin(there: int, layers: int, seconds: float, compute_seconds: float) -> bool:
    """`there` of the layers have come within so many seconds; computing the next chunk takes `compute_seconds`."""
    if there >= layers:
        return True
    return there > 0 and seconds * (layers - there) <= MARGIN * compute_seconds * there


def patience(recompute_seconds: float, time_left: float) -> float:
    """So long a load is waited for: longer than computing those tokens takes, it is not worth it."""
    return min(max(recompute_seconds, LEAST_PATIENCE_SECONDS), time_left)
