"""What every HTTP request passes first (id, API key, Host, content type), and where errors become responses."""

from __future__ import annotations

import logging
import secrets
import time

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.routing import Router
from starlette.types import Message, Receive, Scope, Send

from moonpool.gateway.access import TENANT, Access
from moonpool.gateway.config import GatewayConfig
from moonpool.gateway.meters import Meters
from moonpool.gateway.problem import ApiError, ClientGoneError, invalid
from moonpool.wire.security import is_loopback

log = logging.getLogger(__name__)

REQUEST_ID = "x-request-id"
MAX_ID_CHARS = 128
LABEL = "moonpool.label"
"""Key of the request's id in the ASGI scope."""
SUMMARY = "moonpool.summary"
"""Key of what an endpoint adds to the request's log line."""
_QUIET = frozenset({"/health", "/ready", "/metrics", "/cluster", "/cluster/live"})
"""Asked for again and again by machines: no news."""
_PRIVATE = ("/cluster", "/v1/caching")
"""What a page of another site must not read either, by a name of its own for this host."""
_CHANGED = "/v1/caching/"
"""Where PUT and PATCH are."""
_WITH_BODY = ("POST", "PUT", "PATCH")
_WILDCARDS = ("", "0.0.0.0", "::")


class Front:
    """The outermost ASGI application."""

    def __init__(
        self,
        router: Router,
        config: GatewayConfig,
        access: Access,
        meters: Meters,
        paths: frozenset[str],
        posts: frozenset[str],
    ) -> None:
        self.router = router
        self._access = access
        self._meters = meters
        self._paths = paths
        """The paths there are, for the metrics' labels."""
        self._posts = posts
        """Those that take a JSON body."""
        self._any_host = "*" in config.allowed_hosts
        own = () if config.host in _WILDCARDS else (config.host,)
        self._hosts = frozenset(name.lower().strip("[]") for name in (*own, *config.allowed_hosts))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        began = time.monotonic()
        headers = Headers(scope=scope)
        label = f"req-{secrets.token_hex(8)}"
        status = 0

        async def send_labelled(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID] = label
            await send(message)

        try:
            label = _check_id(headers.get(REQUEST_ID), label)
            scope[LABEL] = label
            scope[SUMMARY] = ""
            _check_path(scope["path"])
            scope["app"] = self  # makes starlette raise where it would answer in plain text
            scope[TENANT] = await self._access.admit(scope["method"], scope["path"], headers)
            self._check(scope["method"], scope["path"], headers)
            await self.router(scope, receive, send_labelled)
        except ApiError as e:
            if not status:
                await respond(send_labelled, e.status, e.body(), e.headers)
        except HTTPException as e:
            problem = _not_routed(e, scope["method"], scope["path"])
            await respond(send_labelled, problem.status, problem.body(), problem.headers)
        except ClientGoneError:
            status = status or 499
        except Exception:
            log.exception("request %s: failed", label)
            if not status:
                await respond(send_labelled, 500, ApiError(500, "the gateway failed; its log says why").body())
        finally:
            self._note(scope, label, status, time.monotonic() - began)

    def _check(self, method: str, path: str, headers: Headers) -> None:
        if len(headers.getlist("host")) > 1:
            raise invalid("host", "a request must have one Host header, not several")
        if method not in ("GET", "HEAD") or path.startswith(_PRIVATE):
            self._check_host(headers.get("host", ""))
        if method in _WITH_BODY:
            kind = headers.get("content-type", "").partition(";")[0].strip().lower()
            is_read = path in self._posts if method == "POST" else path.startswith(_CHANGED)
            if is_read and kind != "application/json":
                shown = f", not {kind[:64]!r}" if kind else ""
                raise ApiError(415, f"the content type must be application/json{shown}", param="content-type")

    def _check_host(self, host: str) -> None:
        name = host_name(host)
        if not (self._any_host or name in self._hosts or is_loopback(name)):
            raise invalid("host", f"this server is not known as {name[:128]!r}: add it to its allowed hosts")

    def _note(self, scope: Scope, label: str, status: int, seconds: float) -> None:
        path = scope["path"] if scope["path"] in self._paths else "other"
        self._meters.answered(path, status)
        level = logging.DEBUG if path in _QUIET else logging.INFO
        shown = path if path != "other" else repr(scope["path"][:128])
        key = scope[TENANT].rights.id if TENANT in scope else ""
        summary = (f", key {key}" if key else "") + scope.get(SUMMARY, "")
        log.log(level, "request %s: %s %s %d in %.3f s%s", label, scope["method"], shown, status, seconds, summary)


def host_name(host: str) -> str:
    """The name or address in a Host header, lower case, without port and brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.rpartition(":")[0].lower() if host.count(":") == 1 else host.lower()


async def respond(
    send: Send, status: int, body: bytes, headers: dict[str, str] | None = None, kind: str = "application/json"
) -> None:
    """A complete response."""
    raw = [(b"content-type", kind.encode()), (b"content-length", str(len(body)).encode())]
    raw += [(name.encode("latin-1"), value.encode("latin-1")) for name, value in (headers or {}).items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body, "more_body": False})


def _not_routed(error: HTTPException, method: str, path: str) -> ApiError:
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        message = f"{method} is not allowed for {path[:128]}: use {allowed}"
        return ApiError(405, message, code="method_not_allowed", headers={"allow": allowed})
    message = (
        f"there is no {path[:128]} here: ask /v1/chat/completions, /v1/completions or /v1/models, or open /dashboard"
    )
    return ApiError(404, message, code="not_found")


def _check_path(path: str) -> None:
    """Raises ApiError. Routes match a path with a line's end behind it as well, and no check here does."""
    if any(c < " " or c == "\x7f" for c in path):
        raise ApiError(404, "there is no path here that has control characters", code="not_found")


def _check_id(given: str | None, drawn: str) -> str:
    """The client's id where it is fit for headers and log lines, a drawn one where there is none. Raises ApiError."""
    if given is None:
        return drawn
    if not 0 < len(given) <= MAX_ID_CHARS or not all("!" <= c <= "~" for c in given):
        raise invalid(REQUEST_ID, f"{REQUEST_ID} must be 1 to {MAX_ID_CHARS} visible ASCII characters without spaces")
    return given
