"""`/cluster/instances`: external instances that are served, registered and taken out while the gateway runs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from moonpool.errors import ConfigError, PeerUnavailableError
from moonpool.gateway.bodies import Bodies
from moonpool.gateway.problem import ApiError


@dataclass(frozen=True, slots=True)
class Registry:
    """Of whoever serves from them. What it gives is shown as JSON."""

    listed: Callable[[], object]
    add: Callable[[bytes], Awaitable[object]]
    """A body. Raises ConfigError for what is not taken, PeerUnavailableError where it has to be asked again."""
    remove: Callable[[str], Awaitable[bool]]
    """By id: whether there was one."""


class InstancePages:
    """All of it answers 404 where there is no registry: the gateway serves from workers."""

    def __init__(self, registry: Registry | None, bodies: Bodies) -> None:
        self._registry = registry
        self._bodies = bodies

    async def all(self, request: Request) -> Response:
        """GET: those there are. POST: one more."""
        if request.method == "POST":
            return await self._register(request)
        return _json({"instances": self._found().listed()})

    async def one(self, request: Request) -> Response:
        """DELETE: it is served from no more."""
        name = request.path_params["instance"]
        if not await self._found().remove(name):
            raise ApiError(404, f"there is no instance {name[:64]!r}", code="instance_not_found")
        return Response(status_code=204)

    async def _register(self, request: Request) -> Response:
        registry = self._found()
        with await self._bodies.read(request.headers, request.receive) as body:
            data = bytes(body.data)
        try:
            return _json(await registry.add(data), 201)
        except ConfigError as e:
            raise ApiError(400, str(e), code="instance_refused") from None
        except PeerUnavailableError as e:
            raise ApiError(503, str(e), headers={"retry-after": "1"}) from None

    def _found(self) -> Registry:
        if self._registry is None:
            raise ApiError(404, "this gateway serves from workers; --instances serves from vLLM servers")
        return self._registry


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")
