"""Who may look at the cluster, and who may change it."""

from __future__ import annotations

import hmac

from starlette.requests import Request

from moonpool.gateway.config import GatewayConfig
from moonpool.gateway.problem import ApiError
from moonpool.wire.security import is_loopback


def check_may_look(request: Request, config: GatewayConfig) -> None:
    """On loopback anybody may. Raises ApiError."""
    if not is_loopback(config.host):
        _check_key(request, config, "cluster paths are closed off loopback until an admin key is configured")


def check_may_change(request: Request, config: GatewayConfig) -> None:
    """Only with the admin key, also on loopback. Raises ApiError."""
    _check_key(request, config, "the cluster cannot be changed until an admin key is configured: MOONPOOL_ADMIN_KEY")


def _check_key(request: Request, config: GatewayConfig, closed: str) -> None:
    if config.admin_key is None:
        raise ApiError(403, closed)
    given = request.headers.get("authorization", "")
    if not hmac.compare_digest(given.encode(), f"Bearer {config.admin_key}".encode()):
        raise ApiError(401, "cluster paths need the admin key as a bearer token", code="invalid_api_key")
