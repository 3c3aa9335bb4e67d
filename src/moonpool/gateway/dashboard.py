"""The files of /dashboard: static, of the package, the same for everybody. What they show comes from /cluster/live."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from importlib import resources

from starlette.requests import Request
from starlette.responses import Response

Page = Callable[[Request], Awaitable[Response]]

FILES = {
    "": ("dashboard.html", "text/html; charset=utf-8"),
    "/dashboard.css": ("dashboard.css", "text/css; charset=utf-8"),
    "/dashboard.js": ("dashboard.js", "text/javascript; charset=utf-8"),
    "/figures.js": ("figures.js", "text/javascript; charset=utf-8"),
    "/decisions.js": ("decisions.js", "text/javascript; charset=utf-8"),
    "/tables.js": ("tables.js", "text/javascript; charset=utf-8"),
    "/charts.js": ("charts.js", "text/javascript; charset=utf-8"),
    "/explain.js": ("explain.js", "text/javascript; charset=utf-8"),
    "/say.js": ("say.js", "text/javascript; charset=utf-8"),
    "/uplot.js": ("uplot/uPlot.iife.min.js", "text/javascript; charset=utf-8"),
    "/uplot.css": ("uplot/uPlot.min.css", "text/css; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
"""By what follows /dashboard."""
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
"""Nothing inline and nothing of another host; asked for again, and answered with 304, each time."""


def dashboard() -> dict[str, Page]:
    """By path. Raises OSError where the package was installed without them."""
    folder = resources.files("moonpool.gateway") / "page"
    return {"/dashboard" + path: _page((folder / name).read_bytes(), kind) for path, (name, kind) in FILES.items()}


def _page(body: bytes, kind: str) -> Page:
    tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'

    async def page(request: Request) -> Response:
        headers = HEADERS | {"etag": tag}
        if tag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(body, media_type=kind, headers=headers)

    return page
