"""Whether a request is taken at all. A refusal is a value with a reason, a message and a computed wait.

`baseline`, `early` and `predictive` are the paper's (PAPER §5): they refuse above a load of 1, which is a predicted
time over its limit. They differ in the decode load that they look at (`gate.py`): none before prefill, what runs now,
or what will run when this prefill ends. `forecast` looks at the chosen instance when this very request joins it, and
keeps the margin below the limits that its own errors have taught it. Without an SLO only the bounds apply.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

from msgspec import Struct

from moonpool.core.vocabulary import RejectReason, Slo

AdmissionPolicy = Literal["none", "baseline", "early", "predictive", "forecast"]
ADMISSION_POLICIES: tuple[AdmissionPolicy, ...] = get_args(AdmissionPolicy)
DearFirst = Literal["auto", "always", "never"]
DEAR_FIRST: tuple[DearFirst, ...] = get_args(DearFirst)
LEAST_RETRY_SECONDS = 1.0
MOST_RETRY_SECONDS = 600.0


class Refusal(Struct, frozen=True):
    reason: RejectReason
    message: str
    retry_after: float | None = None
    """Seconds; None where waiting does not help."""


class DecodeLoad(Struct, frozen=True):
    """Of a decode instance (or the mean of all) with the request in its batch."""

    tbt_seconds: float
    room: float = 0.0
    """KV pages, or slots, over what there is of them; the larger share."""

    def over(self, tbt: float | None) -> float:
        """1: exactly at its limits."""
        return max(self.room, self.tbt_seconds / tbt if tbt is not None else 0.0)


class Prediction(Struct, frozen=True):
    """What the chosen placement would give."""

    ttft_seconds: float
    """From arrival, time already waited included."""
    decode: DecodeLoad = DecodeLoad(0.0)
    alone_seconds: float = 0.0
    """Of `ttft_seconds`, what no waiting makes shorter."""


class Margin(Struct, frozen=True):
    """Shares of the limits that stay unused."""

    ttft: float = 0.0
    decode: float = 0.0


NO_MARGIN = Margin()


FitsIn = Callable[[], float | None]
"""Seconds until the decode instance could take it if nothing else arrived; None: not within sight."""


def admit(predicted: Prediction, slo: Slo, fits_in: FitsIn, margin: Margin = NO_MARGIN) -> Refusal | None:
    """Refuses where a load is above 1 less the margin; exactly at that a request is taken."""
    prefill = predicted.ttft_seconds / slo.ttft / (1.0 - margin.ttft) if slo.ttft is not None else 0.0
    decode = predicted.decode.over(slo.tbt) / (1.0 - margin.decode)
    if max(prefill, decode) <= 1.0:
        return None
    wait = _wait(predicted, slo, fits_in, margin)
    if slo.ttft is not None and prefill >= decode:
        return Refusal(
            RejectReason.TTFT_SLO,
            f"the first token is predicted after {predicted.ttft_seconds:.2f} s, the limit is {slo.ttft:g} s"
            f"{_below(margin.ttft)}; {_advice(wait, 'time to first token')}",
            wait,
        )
    if slo.tbt is not None and predicted.decode.tbt_seconds / slo.tbt >= predicted.decode.room:
        return Refusal(
            RejectReason.TBT_SLO,
            f"tokens are predicted {predicted.decode.tbt_seconds:.3f} s apart, the limit is {slo.tbt:g} s"
            f"{_below(margin.decode)}; {_advice(wait, 'time between tokens')}",
            wait,
        )
    return Refusal(
        RejectReason.KV_ROOM,
        f"its decode instance would be {predicted.decode.room:.0%} full when it joins{_below(margin.decode)}; "
        "retry later, or add a decode instance",
        wait,
    )


def _wait(predicted: Prediction, slo: Slo, fits_in: FitsIn, margin: Margin) -> float | None:
    """Until both limits would be kept if nothing else arrived: a queue goes down by a second each second."""
    late = 0.0
    if slo.ttft is not None:
        limit = slo.ttft * (1.0 - margin.ttft)
        late = max(predicted.ttft_seconds - limit, 0.0)
        if predicted.alone_seconds > limit:
            return None
    if predicted.decode.over(slo.tbt) <= 1.0 - margin.decode:
        return clamp_retry(late)
    fits = fits_in()
    return None if fits is None else clamp_retry(max(late, fits))


def _below(margin: float) -> str:
    return f" less a margin of {margin:.0%}" if margin >= 0.005 else ""


def _advice(wait: float | None, what: str) -> str:
    return f"allow a longer {what}" if wait is None else f"retry later, or allow a longer {what}"


def check_queue(waiting: int, bound: int, backlog_seconds: float) -> Refusal | None:
    """`waiting` requests are held or in prefill; `backlog_seconds` until all of them are computed.

    The advice is the time in which half of the backlog goes: sooner, all who were refused would meet again.
    """
    if waiting < bound:
        return None
    return Refusal(
        RejectReason.QUEUE_FULL,
        f"{waiting} requests wait already, the queue takes {bound}; retry later, or raise the queue bound",
        clamp_retry(backlog_seconds / 2),
    )


def check_context(prompt: int, output: int, limit: int) -> Refusal | None:
    """`limit` tokens is the most that any pair of instances takes."""
    if prompt + output <= limit:
        return None
    return Refusal(
        RejectReason.CONTEXT,
        f"{prompt} prompt tokens and {output} output tokens make {prompt + output}, the context takes {limit}; "
        "shorten the prompt or ask for fewer tokens",
    )


def check_room(what: str, needed: int, limit: int) -> Refusal | None:
    """For requests that could never fit: `limit` is the most that any instance (or node) has in total."""
    if needed <= limit:
        return None
    return Refusal(
        RejectReason.NEVER_FITS,
        f"the request needs {needed} {what}, the largest has {limit}; "
        "shorten the prompt, ask for fewer tokens, or give the cluster more memory",
    )


def clamp_retry(seconds: float) -> float:
    return min(max(seconds, LEAST_RETRY_SECONDS), MOST_RETRY_SECONDS)
