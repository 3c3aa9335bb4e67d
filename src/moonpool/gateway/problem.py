"""Everything that can be wrong with a request, in OpenAI's error shape."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from moonpool.core.vocabulary import RejectReason
from moonpool.errors import MoonpoolError
from moonpool.gateway.shown import Error, Problem

REASON_HEADER = "x-moonpool-reason"

_STATUS = {
    RejectReason.QUEUE_FULL: 429,
    RejectReason.DISPLACED: 429,
    RejectReason.KV_ROOM: 429,
    RejectReason.TTFT_SLO: 429,
    RejectReason.TBT_SLO: 429,
    RejectReason.CONTEXT: 400,
    RejectReason.NEVER_FITS: 400,
    RejectReason.UNSERVABLE: 400,
    RejectReason.NO_INSTANCE: 503,
    RejectReason.ATTEMPTS: 503,
    RejectReason.DEADLINE: 504,
}
_TYPES = {403: "permission_error", 429: "rate_limit_error"}


class ApiError(MoonpoolError):
    """Answered with `status` and `{"error": {message, type, param, code}}`."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> bytes:
        kind = _TYPES.get(self.status) or ("server_error" if self.status >= 500 else "invalid_request_error")
        return msgspec.json.encode(Problem(Error(self.message, kind, self.param, self.code)))


class ClientGoneError(MoonpoolError):
    """Nobody waits for the answer any more."""


def invalid(param: str, message: str, code: str | None = None) -> ApiError:
    """400: the client's fault; `param` is the field."""
    return ApiError(400, message, param=param, code=code)


def refused(reason: RejectReason, message: str, retry_after: float | None) -> ApiError:
    """A rejection as docs/protocol.md maps it. `retry_after` in seconds is rounded up: clients read whole seconds."""
    status = _STATUS[reason]
    headers = {REASON_HEADER: reason.value}
    if retry_after is not None and status != 400:  # to repeat a request that can never be served helps nobody
        headers |= again_after(retry_after)
    code = "context_length_exceeded" if reason is RejectReason.CONTEXT else reason.value.replace("-", "_")
    return ApiError(status, message, code=code, headers=headers)


def wrong_key(message: str) -> ApiError:
    """401: the request comes without an API key, or with one that is not, or no more, valid."""
    return ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})


def revoked_key(id_: str) -> ApiError:
    return wrong_key(f"the API key mp-{id_}-… is wrong, or has been revoked")


def over_quota(quota: str, message: str, wait: float) -> ApiError:
    """429: a quota of the request's API key, as the keys file calls it. `wait` in seconds."""
    headers = {REASON_HEADER: quota, **again_after(wait)}
    return ApiError(429, message, code=quota.replace("-", "_"), headers=headers)


def again_after(seconds: float) -> dict[str, str]:
    """The header that says so."""
    return {"retry-after": str(max(1, math.ceil(seconds)))}


_BOUNDS = "the model's own, or what the workers' pages or a node's DRAM hold"


def beyond_context(
    where: str, prompt: int | str, context: int, output: int = 0, output_field: str | None = None
) -> ApiError:
    """400: `prompt` tokens (or words for them, as `at least 5000`) and `output` more do not fit into `context`.

    `output_field` named the output; None: it is the default. `param` is the prompt's field.
    """
    if not output or isinstance(prompt, str):
        message = f"{where} has {prompt} tokens, and the context is {context} tokens, prompt and output: {_BOUNDS}"
    else:
        given = f"{output_field} is {output}" if output_field else f"max_tokens is {output} by default"
        message = (
            f"{where} has {prompt} tokens and {given}: {prompt + output} in all, "
            f"but the context is {context} tokens ({_BOUNDS}); shorten the prompt or ask for fewer tokens"
        )
    return invalid(where.partition("[")[0], message, "context_length_exceeded")
