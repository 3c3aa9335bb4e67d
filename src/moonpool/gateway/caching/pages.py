"""`/v1/caching`: the owner's cached contexts, made, listed, extended and deleted (docs/caching.md)."""

from __future__ import annotations

import asyncio
from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from moonpool.core.vocabulary import RejectReason
from moonpool.gateway.access import TENANT
from moonpool.gateway.caching.book import Held
from moonpool.gateway.caching.schema import read_change
from moonpool.gateway.completions import Desk
from moonpool.gateway.fields import Fields, read_object
from moonpool.gateway.front import LABEL
from moonpool.gateway.intake import Wanted
from moonpool.gateway.keys.tenant import Tenant, Use
from moonpool.gateway.presence import unless, until_gone
from moonpool.gateway.problem import ApiError, ClientGoneError, invalid, refused, revoked_key
from moonpool.gateway.shown import CachedContext, CachedContexts, DeletedContext

PATH = "/v1/caching"
MOST_LISTED = 1000
DEFAULT_LISTED = 20


class CachingPages:
    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    async def all(self, request: Request) -> Response:
        """GET: a page of them. POST: one more."""
        return await (self._make(request) if request.method == "POST" else self._list(request))

    async def one(self, request: Request) -> Response:
        """GET, PATCH (or PUT, as elsewhere), DELETE."""
        keeper, owner, id_ = self._desk.keeper, _begin(request).rights.group, request.path_params["context"]
        match request.method:
            case "PATCH" | "PUT":
                with await self._desk.bodies.read(request.headers, request.receive) as body:
                    change = await self._desk.intake.run(
                        body, lambda data, check: read_change(Fields(read_object(data)))
                    )
                held = keeper.book.find(id_, owner)
                await keeper.change(held, change)
            case "DELETE":
                await keeper.delete(keeper.book.find(id_, owner))
                return _json(DeletedContext(id_))
            case _:
                held = keeper.book.find(id_, owner)
        return _json(shown(held))

    async def _make(self, request: Request) -> Response:
        desk = self._desk
        desk.seats.check()
        tenant = _begin(request)
        body = await desk.bodies.read(request.headers, request.receive)
        revoked: list[str] = []

        def revoke(key: str) -> None:
            revoked.append(key)
            watch.cancel()

        with body, desk.seats.take(), tenant.stream(revoke) as use:
            watch = asyncio.create_task(until_gone(request.receive))
            try:
                if not desk.cluster.fleet.context_tokens:
                    raise refused(RejectReason.NO_INSTANCE, desk.cluster.fleet.lacks or "the cluster is not ready", 1.0)
                read = partial(desk.intake.context, tenant=tenant, context_tokens=desk.cluster.fleet.context_tokens)
                new = await unless(watch, desk.intake.run(body, read))
                use.admit([new.context.count])
                return _json(shown(await unless(watch, self._charged(new, use, request.scope[LABEL]))))
            except ClientGoneError:
                if revoked:
                    raise revoked_key(revoked[0]) from None
                raise
            finally:
                watch.cancel()

    async def _charged(self, new: Wanted, use: Use, label: str) -> Held:
        """Its tokens are the client's, unless it is refused."""
        try:
            return await self._desk.keeper.make(new.context, new.ttl, label, new.priority)
        except ApiError:
            use.settle(0, new.context.count)
            raise

    async def _list(self, request: Request) -> Response:
        own = self._desk.keeper.book.of(_begin(request).rights.group)
        limit, after = request.query_params.get("limit", str(DEFAULT_LISTED)), request.query_params.get("after")
        if not (limit.isascii() and limit.isdigit() and len(limit) <= 9 and 1 <= int(limit) <= MOST_LISTED):
            raise invalid("limit", f"limit must be a whole number from 1 to {MOST_LISTED}")
        if after is not None:
            begin = next((i + 1 for i, held in enumerate(own) if held.context.id == after), None)
            if begin is None:
                raise invalid("after", f"after: there is no cached context {after[:64]!r}")
            own = own[begin:]
        page = [shown(held) for held in own[: int(limit)]]
        return _json(CachedContexts(page, has_more=len(own) > len(page)))


def _begin(request: Request) -> Tenant:
    """Raises ApiError where its tenant has made too many requests."""
    tenant: Tenant = request.scope[TENANT]
    tenant.begin_request()
    return tenant


def shown(held: Held) -> CachedContext:
    """As its owner sees it."""
    context = held.context
    return CachedContext(
        id=context.id,
        model=context.model,
        status="ready" if held.is_ready else "pending",
        problem=held.problem or None,
        name=context.name,
        metadata=context.metadata,
        tokens=context.count,
        pinned_tokens=context.pinned_tokens,
        bytes=context.nbytes,
        created_at=context.created,
        expired_at=int(context.expires),
    )


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
