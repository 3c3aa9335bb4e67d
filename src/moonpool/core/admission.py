"""Whether a request is taken at all. A refusal is a value with a reason, a message and a computed wait.

`early` is the paper's early rejection (PAPER §5): at arrival, on the larger of prefill load and current
decode load, each a predicted time over its SLO. Without an SLO only the bounds apply.
"""

from __future__ import annotations

from typing import Literal, get_args

from msgspec import Struct

from moonpool.core.vocabulary import RejectReason, Slo

AdmissionPolicy = Literal["none", "early"]
ADMISSION_POLICIES: tuple[AdmissionPolicy, ...] = get_args(AdmissionPolicy)
LEAST_RETRY_SECONDS = 1.0
MOST_RETRY_SECONDS = 600.0


class Refusal(Struct, frozen=True):
    reason: RejectReason
    message: str
    retry_after: float | None = None
    """Seconds; None where waiting does not help."""


class Prediction(Struct, frozen=True):
    """What the chosen placement would give."""

    ttft_seconds: float
    """From arrival, time already waited included."""
    tbt_seconds: float
    decode_ends_in: float
    """Until the decode instance has probably finished one of its requests."""


def admit(policy: AdmissionPolicy, predicted: Prediction, slo: Slo) -> Refusal | None:
    match policy:
        case "none":
            return None
        case "early":
            return admit_early(predicted, slo)


def admit_early(predicted: Prediction, slo: Slo) -> Refusal | None:
    """Refuses above a load of 1; exactly at its limit a request is taken."""
    prefill = predicted.ttft_seconds / slo.ttft if slo.ttft is not None else 0.0
    decode = predicted.tbt_seconds / slo.tbt if slo.tbt is not None else 0.0
    if max(prefill, decode) <= 1.0:
        return None
    if slo.ttft is not None and prefill >= decode:
        return Refusal(
            RejectReason.TTFT_SLO,
            f"the first token is predicted after {predicted.ttft_seconds:.2f} s, the limit is {slo.ttft:g} s; "
            "retry later, or allow a longer time to first token",
            clamp_retry(predicted.ttft_seconds - slo.ttft),
        )
    return Refusal(
        RejectReason.TBT_SLO,
        f"tokens are predicted {predicted.tbt_seconds:.3f} s apart, the limit is {slo.tbt:g} s; "
        "retry later, or allow a longer time between tokens",
        clamp_retry(predicted.decode_ends_in),
    )


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
