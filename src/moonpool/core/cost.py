"""Seconds that prefill, decode steps and transfers take: linear models, corrected by what is measured.

prefill  c0 + a(n − p) + b(n² − p²)   n prompt tokens, p of them cached (PAPER §7)
decode   d0 + d1·batch + d2·context   context: tokens of KV that the batch holds
transfer latency + bytes / bandwidth

The first two are fitted per instance by recursive least squares on relative errors with forgetting. Plain
Python arithmetic, so that a journal replays to the same bits on any machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec import Struct

FORGETTING = 0.95
"""Weight of an observation against one that is one newer."""
NOISE = 0.1
"""Relative error of one observation."""
SPREAD = 10.0
"""How many times its initial value a coefficient may end up away from it before the prior resists."""
CLAMP = 1000.0
"""No coefficient leaves [0, CLAMP x initial value]."""
LEAST_SECONDS = 1e-6


class PrefillCoefficients(Struct, frozen=True):
    """Initial values: a 135M model on two CPU cores."""

    fixed: float = 0.02
    per_token: float = 1 / 440
    per_token_squared: float = 1e-7


class DecodeCoefficients(Struct, frozen=True):
    """Initial values: a 135M model on two CPU cores."""

    fixed: float = 0.03
    per_request: float = 0.005
    per_context_token: float = 2e-6


class TransferCost(Struct, frozen=True):
    """Between two nodes; the sink waits for what the source already sends."""

    latency: float = 0.002
    bytes_per_second: float = 2e9
    ssd_bytes_per_second: float = 1e9
    """Of reading blocks that are on a node's SSD only, before they are sent."""

    def seconds(self, nbytes: int, queued_bytes: int = 0) -> float:
        return self.latency + (nbytes + queued_bytes) / self.bytes_per_second


@dataclass(slots=True)
class Fit:
    """Recursive least squares for y = Σ cᵢ·xᵢ with cᵢ ≥ 0, in information form.

    Works in units of the initial coefficients (each starts at 1) and on relative errors, so that a short
    and a long prompt weigh the same. Observations are forgotten, the prior is not: where nothing varies,
    what cannot be told apart stays near its initial value instead of drifting.
    """

    initial: tuple[float, ...]
    observations: int = 0
    coefficients: tuple[float, ...] = field(init=False)
    _information: list[list[float]] = field(init=False)
    """Σ x·xᵀ of the weighted rows, without the prior."""
    _target: list[float] = field(init=False)
    """Σ x·y."""

    def __post_init__(self) -> None:
        size = len(self.initial)
        self.coefficients = self.initial
        self._information = [[0.0] * size for _ in range(size)]
        self._target = [0.0] * size

    def predict(self, x: Sequence[float]) -> float:
        seconds = 0.0
        for c, v in zip(self.coefficients, x, strict=True):
            seconds += c * v
        return seconds if seconds > LEAST_SECONDS else LEAST_SECONDS

    def observe(self, x: Sequence[float], y: float) -> None:
        """`y` seconds were measured for `x`."""
        if not LEAST_SECONDS <= y < float("inf"):
            return
        # Relative to the larger of both: a measurement far off in either direction has an error below 1.
        unit = max(y, self.predict(x)) * NOISE
        row = [c * v / unit for c, v in zip(self.initial, x, strict=True)]
        for i, r in enumerate(row):
            line = self._information[i]
            for j, other in enumerate(row):
                line[j] = line[j] * FORGETTING + r * other
            self._target[i] = self._target[i] * FORGETTING + r * y / unit
        prior = SPREAD**-2
        matrix = [[v + prior * (i == j) for j, v in enumerate(line)] for i, line in enumerate(self._information)]
        scale = _least_nonnegative(matrix, [t + prior for t in self._target])
        self.coefficients = tuple(c * min(s, CLAMP) for c, s in zip(self.initial, scale, strict=True))
        self.observations += 1


def _least_nonnegative(matrix: list[list[float]], target: list[float]) -> list[float]:
    """The s ≥ 0 that minimises s·M·s − 2·t·s for a positive definite M, by trying each set of positive sᵢ.

    All of them first: where that solution has no negative sᵢ there is none better.
    """
    size = len(target)
    best = _solve(matrix, target)
    if min(best) >= 0.0:
        return best
    best, least = [0.0] * size, 0.0
    for chosen in range(1, (1 << size) - 1):
        free = [i for i in range(size) if chosen >> i & 1]
        solved = _solve([[matrix[i][j] for j in free] for i in free], [target[i] for i in free])
        # At a solution the objective is −t·s.
        value = -sum(target[i] * s for i, s in zip(free, solved, strict=True))
        if value < least and min(solved) >= 0.0:
            least = value
            best = [0.0] * size
            for i, s in zip(free, solved, strict=True):
                best[i] = s
    return best


def _solve(matrix: list[list[float]], target: list[float]) -> list[float]:
    """Gaussian elimination; a positive definite matrix needs no pivoting."""
    size = len(target)
    rows = [[*line, t] for line, t in zip(matrix, target, strict=True)]
    for i in range(size):
        for j in range(i + 1, size):
            factor = rows[j][i] / rows[i][i]
            rows[j] = [a - factor * b for a, b in zip(rows[j], rows[i], strict=True)]
    solved = [0.0] * size
    for i in reversed(range(size)):
        rest = sum(rows[i][j] * solved[j] for j in range(i + 1, size))
        solved[i] = (rows[i][size] - rest) / rows[i][i]
    return solved


class PrefillCost:
    """Of one prefill instance."""

    __slots__ = ("fit",)

    def __init__(self, initial: PrefillCoefficients) -> None:
        self.fit = Fit((initial.fixed, initial.per_token, initial.per_token_squared))

    def seconds(self, tokens: int, cached: int) -> float:
        # As `Fit.predict`, but a placement asks this of every instance.
        fixed, per_token, per_square = self.fit.coefficients
        seconds = fixed + per_token * (tokens - cached) + per_square * (tokens * tokens - cached * cached)
        return seconds if seconds > LEAST_SECONDS else LEAST_SECONDS

    def observe(self, tokens: int, cached: int, seconds: float) -> None:
        self.fit.observe(self._row(tokens, cached), seconds)

    @staticmethod
    def _row(tokens: int, cached: int) -> tuple[float, float, float]:
        return 1.0, float(tokens - cached), float(tokens * tokens - cached * cached)


class DecodeCost:
    """Of one decode instance."""

    __slots__ = ("fit",)

    def __init__(self, initial: DecodeCoefficients) -> None:
        self.fit = Fit((initial.fixed, initial.per_request, initial.per_context_token))

    def seconds(self, batch: int, context_tokens: int) -> float:
        """Of one step."""
        fixed, per_request, per_context_token = self.fit.coefficients
        seconds = fixed + per_request * batch + per_context_token * context_tokens
        return seconds if seconds > LEAST_SECONDS else LEAST_SECONDS

    def observe(self, batch: int, context_tokens: int, seconds: float) -> None:
        self.fit.observe((1.0, float(batch), float(context_tokens)), seconds)
