"""How large the chunks of a prompt are that several machines compute one after another (PAPER §3)."""

from __future__ import annotations

import math

from moonpool.core.cost import PrefillCost

FINEST = 8
"""A chunk is not smaller than this part of the largest: of fewer tokens a machine's step takes no less, as it reads the
weights all the same, and a linear cost does not tell."""


def pipeline_chunk(tokens: int, cached: int, machines: int, step: PrefillCost, most: int, waiting: int = 0) -> int:
    """Tokens of each step, at most `most`, with which this prompt and those that wait for it are through soonest.

    `step`: of one step in the slowest machine, f + r seconds a token. L tokens in m equal steps leave the first machine
    after m f + r L seconds, which the others wait for too, and the last one (machines - 1)(f + r L / m) later, when the
    next prompt is under way already. The sum over all is least with m² = (machines - 1) r L / (f (1 + waiting)).
    """
    left = tokens - cached
    if machines == 1 or left <= 0:
        return most
    fixed, per_token, per_square = step.fit.coefficients
    computing = per_token * left + per_square * (tokens * tokens - cached * cached)
    delay = fixed * (1 + waiting)
    steps = round(math.sqrt((machines - 1) * computing / delay)) if delay > 0.0 else left
    steps = max(min(steps, left // -(-most // FINEST)), -(-left // most))
    return -(-left // steps)
