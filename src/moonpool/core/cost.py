"""Seconds that prefill, decode steps and transfers take: linear models, corrected by what is measured.

prefill  c0 + a(n − p) + b(n² − p²)   n prompt tokens, p of them cached (PAPER §7)
decode   d0 + d1·batch + d2·context   context: tokens of KV that the batch holds
transfer latency + bytes / bandwidth

The first two are fitted per instance by recursive least squares on relative errors with forgetting. Plain
Python arithmetic, so that a journal replays to the same bits on any machine.
"""

from __future__ import annotations

import math
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

_Three = tuple[float, float, float]
_Six = tuple[float, float, float, float, float, float]
_NOTHING: _Six = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


class PrefillCoefficients(Struct, frozen=True):
    """Initial values: a 135M model on two CPU cores."""

    fixed: float = 0.02
    per_token: float = 1 / 440
    per_token_squared: float = 1e-7

    def shared(self, share: float) -> PrefillCoefficients:
        """Of a stage with this share of the layers. Each step has the fixed part in each stage."""
        return PrefillCoefficients(self.fixed, self.per_token * share, self.per_token_squared * share)


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
    """Recursive least squares for seconds = Σ cᵢ·xᵢ with three cᵢ ≥ 0, in information form.

    Works in units of the initial coefficients (each starts at 1) and on relative errors, so that a short
    and a long prompt weigh the same. Observations are forgotten, the prior is not: where nothing varies,
    what cannot be told apart stays near its initial value instead of drifting.
    """

    initial: _Three
    observations: int = 0
    coefficients: tuple[float, ...] = field(init=False)
    _information: _Six = _NOTHING
    """Σ x·xᵀ of the weighted rows, without the prior: 00, 01, 02, 11, 12, 22."""
    _target: _Three = (0.0, 0.0, 0.0)
    """Σ x·y."""

    def __post_init__(self) -> None:
        self.coefficients = self.initial

    def predict(self, x: float, y: float, z: float) -> float:
        a, b, c = self.coefficients
        seconds = a * x + b * y + c * z
        return seconds if seconds > LEAST_SECONDS else LEAST_SECONDS

    def observe(self, x: float, y: float, z: float, seconds: float) -> None:
        """So many seconds were measured. Written out for three: it is done for every prompt."""
        if not LEAST_SECONDS <= seconds < math.inf:
            return
        # Relative to the larger of both: a measurement far off in either direction has an error below 1.
        unit = max(seconds, self.predict(x, y, z)) * NOISE
        initial = self.initial
        p, q, r, t = initial[0] * x / unit, initial[1] * y / unit, initial[2] * z / unit, seconds / unit
        keep = FORGETTING
        m00, m01, m02, m11, m12, m22 = self._information
        self._information = information = (
            m00 * keep + p * p,
            m01 * keep + p * q,
            m02 * keep + p * r,
            m11 * keep + q * q,
            m12 * keep + q * r,
            m22 * keep + r * r,
        )
        t0, t1, t2 = self._target
        self._target = target = t0 * keep + p * t, t1 * keep + q * t, t2 * keep + r * t
        try:
            scale = _least_nonnegative(information, target)
        except ZeroDivisionError:
            # Numbers so far apart that rounding leaves nothing of the rest are no measurements: it begins anew.
            self._information, self._target, self.coefficients = _NOTHING, (0.0, 0.0, 0.0), initial
            return
        self.coefficients = (
            initial[0] * min(scale[0], CLAMP),
            initial[1] * min(scale[1], CLAMP),
            initial[2] * min(scale[2], CLAMP),
        )
        self.observations += 1


def _least_nonnegative(information: _Six, target: _Three) -> _Three:
    """The s ≥ 0 that minimises s·M·s − 2·t·s, where M and t are those given and the prior.

    M is positive definite: where the solution for all of them has no negative sᵢ there is none better. Else each set of
    positive sᵢ is tried.
    """
    prior = SPREAD**-2
    m00, m01, m02, m11, m12, m22 = information
    m00, m11, m22 = m00 + prior, m11 + prior, m22 + prior
    t0, t1, t2 = target[0] + prior, target[1] + prior, target[2] + prior
    # Gaussian elimination, which needs no pivoting here.
    f, g = m01 / m00, m02 / m00
    n11, n12, n22 = m11 - f * m01, m12 - f * m02, m22 - g * m02
    u1, u2 = t1 - f * t0, t2 - g * t0
    f = n12 / n11
    s2 = (u2 - f * u1) / (n22 - f * n12)
    s1 = (u1 - n12 * s2) / n11
    s0 = (t0 - m01 * s1 - m02 * s2) / m00
    if s0 >= 0.0 and s1 >= 0.0 and s2 >= 0.0:
        return s0, s1, s2
    return _best_without_one((m00, m01, m02, m11, m12, m22), (t0, t1, t2))


def _best_without_one(matrix: _Six, target: _Three) -> _Three:
    """As above, with one or two of them 0. At a solution the objective is −t·s."""
    m00, m01, m02, m11, m12, m22 = matrix
    t0, t1, t2 = target
    best, most = (0.0, 0.0, 0.0), 0.0
    for i, (m, t) in enumerate(((m00, t0), (m11, t1), (m22, t2))):
        if t > 0.0 and t * t / m > most:
            best, most = (t / m if i == 0 else 0.0, t / m if i == 1 else 0.0, t / m if i == 2 else 0.0), t * t / m
    for absent, m, n, across, t, u in (
        (2, m00, m11, m01, t0, t1),
        (1, m00, m22, m02, t0, t2),
        (0, m11, m22, m12, t1, t2),
    ):
        f = across / m
        second = (u - f * t) / (n - f * across)
        first = (t - across * second) / m
        if first >= 0.0 and second >= 0.0 and t * first + u * second > most:
            most = t * first + u * second
            best = (
                (0.0, first, second) if absent == 0 else (first, 0.0, second) if absent == 1 else (first, second, 0.0)
            )
    return best


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
        self.fit.observe(1.0, tokens - cached, tokens * tokens - cached * cached, seconds)


class DecodeCost:
    """Of one decode instance."""

    __slots__ = ("fit",)

    def __init__(self, initial: DecodeCoefficients) -> None:
        self.fit = Fit((initial.fixed, initial.per_request, initial.per_context_token))

    def seconds(self, batch: int, context_tokens: int) -> float:
        """Of one step."""
        fixed, per_request, per_token = self.fit.coefficients
        seconds = fixed + per_request * batch + per_token * context_tokens
        return seconds if seconds > LEAST_SECONDS else LEAST_SECONDS

    def observe(self, batch: int, context_tokens: int, seconds: float) -> None:
        self.fit.observe(1.0, batch, context_tokens, seconds)
