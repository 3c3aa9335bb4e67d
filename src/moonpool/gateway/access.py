"""Who may do what at this gateway: every request is asked here, and nowhere else.

Without a keys file, which is possible on loopback only, anyone may do anything but change the cluster.
"""

from __future__ import annotations

from starlette.datastructures import Headers

from moonpool.core.classes import Classes
from moonpool.core.vocabulary import Slo
from moonpool.gateway.keys.keyring import Keyring
from moonpool.gateway.keys.tenant import ANYONE, Tenant
from moonpool.gateway.problem import ApiError

TENANT = "moonpool.tenant"
"""Key of the request's tenant in the ASGI scope."""
OPEN = frozenset({"/health", "/ready", "/version", "/metrics", "/openapi.json"})
"""For load balancers, Prometheus and tools; nothing there tells of single tenants."""
CLUSTER = "/cluster"
DASHBOARD = "/dashboard"
"""Files of the package; what they show is below CLUSTER."""


class Access:
    def __init__(self, keyring: Keyring | None) -> None:
        """None: no keys are asked for."""
        self._keyring = keyring
        self._anyone = Tenant(ANYONE, Classes((), Slo()), lambda quota: None)

    async def admit(self, method: str, path: str, headers: Headers) -> Tenant:
        """Whose request it is. Raises ApiError (401, 403, 503)."""
        if is_open(path) or self._keyring is None:
            tenant = self._anyone
        else:
            tenant = await self._keyring.tenant_of(headers.getlist("authorization"))
        if is_of_cluster(path):
            rights, only_looks = tenant.rights, method in ("GET", "HEAD")
            if not (rights.may_look if only_looks else rights.may_change):
                raise ApiError(403, _needs_admin(rights.id), code="admin_key_required")
        return tenant


def is_open(path: str) -> bool:
    """To anyone, without a key."""
    return path in OPEN or _is_below(DASHBOARD, path)


def is_of_cluster(path: str) -> bool:
    return _is_below(CLUSTER, path)


def _is_below(base: str, path: str) -> bool:
    return path == base or path.startswith(base + "/")


def _needs_admin(id_: str) -> str:
    if id_:
        return f"cluster paths need an admin key, and {id_} is none: `moonpool keys add NAME --admin` makes one"
    return "the cluster can only be changed with an admin key: start the gateway with --keys FILE"
