"""The routes (DESIGN §11)."""

from __future__ import annotations

import asyncio
import importlib.metadata
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router

from moonpool.core.vocabulary import PartKind
from moonpool.errors import PeerUnavailableError
from moonpool.gateway import shown
from moonpool.gateway.access import TENANT, Access
from moonpool.gateway.caching.pages import PATH as CACHING
from moonpool.gateway.caching.pages import CachingPages
from moonpool.gateway.completions import Completions, Desk
from moonpool.gateway.dashboard import dashboard
from moonpool.gateway.front import Front
from moonpool.gateway.live import Board
from moonpool.gateway.meters import Meters
from moonpool.gateway.openapi.document import PATH as OPENAPI
from moonpool.gateway.openapi.document import document
from moonpool.gateway.presence import unless, until_gone
from moonpool.gateway.problem import ApiError, invalid
from moonpool.gateway.registry import InstancePages, Registry
from moonpool.gateway.turns import Check

T = TypeVar("T")
Part = tuple[str, str, dict[str, float]]
"""Id, kind, counters."""

POSTS = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize")


INSTANCES = "/cluster/instances"


def make_app(desk: Desk, meters: Meters, registry: Registry | None = None) -> Front:
    """The gateway as an ASGI application. `registry`: of external instances, where it serves from such."""
    pages = Pages(desk, meters)
    caching = CachingPages(desk)
    instances = InstancePages(registry, desk.bodies)
    gets = {
        "/health": pages.health,
        "/ready": pages.ready,
        "/version": pages.version,
        OPENAPI: pages.openapi,
        "/metrics": pages.metrics,
        "/cluster": pages.cluster,
        "/cluster/requests/{request:path}": pages.request,
        "/cluster/blocks": pages.blocks,
        "/cluster/keys": pages.keys,
        "/cluster/live": Board(desk, meters).page,
        **dashboard(),
        "/v1/models": pages.models,
        "/v1/models/{model:path}": pages.model,
    }
    routes = [
        Route(POSTS[0], Completions(desk, chat=True), methods=["POST"]),
        Route(POSTS[1], Completions(desk, chat=False), methods=["POST"]),
        Route(POSTS[2], pages.tokenize, methods=["POST"]),
        Route(POSTS[3], pages.detokenize, methods=["POST"]),
        Route(CACHING, caching.all, methods=["GET", "POST"]),
        Route(CACHING + "/{context}", caching.one, methods=["GET", "PATCH", "PUT", "DELETE"]),
        Route(INSTANCES, instances.all, methods=["GET", "POST"]),
        Route(INSTANCES + "/{instance}", instances.one, methods=["DELETE"]),
        *(Route(path, page, methods=["GET"]) for path, page in gets.items()),
    ]
    router = Router(routes, redirect_slashes=False)
    posts = frozenset({*POSTS, CACHING, INSTANCES})
    return Front(router, desk.config, Access(desk.keyring), meters, frozenset({*posts, *gets}), posts)


class Pages:
    """Everything but the completions."""

    def __init__(self, desk: Desk, meters: Meters) -> None:
        self._desk = desk
        self._meters = meters
        self._created = int(time.time())
        self._document = document(desk.intake.limits, version())

    async def health(self, request: Request) -> Response:
        return _json(shown.Health())

    async def ready(self, request: Request) -> Response:
        lacks = self._desk.cluster.fleet.lacks
        return _json(shown.Readiness(True)) if lacks is None else _json(shown.Readiness(False, lacks), 503)

    async def version(self, request: Request) -> Response:
        return _json(shown.Version(version()))

    async def openapi(self, request: Request) -> Response:
        return Response(self._document, media_type="application/json")

    async def models(self, request: Request) -> Response:
        return _json(shown.ModelList([self._model()]))

    async def model(self, request: Request) -> Response:
        name = request.path_params["model"]
        if name != self._desk.config.served_model_name:
            message = f"the model {name[:128]!r} does not exist here"
            raise ApiError(404, message, param="model", code="model_not_found")
        return _json(self._model())

    async def tokenize(self, request: Request) -> Response:
        context = self._desk.cluster.fleet.context_tokens
        found = await self._take_in(request, partial(self._desk.intake.tokenize, context_tokens=context))
        return _json(shown.TokenList(len(found.ids), context, found.ids, found.names))

    async def detokenize(self, request: Request) -> Response:
        context = self._desk.cluster.fleet.context_tokens
        text = await self._take_in(request, partial(self._desk.intake.detokenize, context_tokens=context))
        return _json(shown.DetokenizedText(text))

    async def _take_in(self, request: Request, work: Callable[[bytes | bytearray, Check], T]) -> T:
        desk = self._desk
        request.scope[TENANT].begin_request()
        with await desk.bodies.read(request.headers, request.receive) as body:
            gone = asyncio.create_task(until_gone(request.receive))
            try:
                return await unless(gone, desk.intake.run(body, work))
            finally:
                gone.cancel()

    async def cluster(self, request: Request) -> Response:
        """The Conductor's state with this gateway's numbers; 503 within 2 s when it does not answer."""
        desk = self._desk
        try:
            state = msgspec.json.decode(await desk.cluster.describe(), type=dict[str, msgspec.Raw])
        except PeerUnavailableError as e:
            raise ApiError(503, str(e), code="no_conductor") from None
        own = {
            "seats_taken": desk.seats.taken,
            "running": desk.cluster.running,
            "waiting": desk.cluster.waiting,
            "answers_remembered": len(desk.answers),
            "context_tokens": desk.cluster.fleet.context_tokens,
            "cached_contexts": len(desk.keeper.book),
            **desk.cluster.totals,
            **desk.keeper.totals,
        }
        return _json(state | {"gateway": own})

    async def request(self, request: Request) -> Response:
        """The stories of one request, by its id or its x-request-id: why it was placed where it was, or refused."""
        name = request.path_params["request"]
        try:
            stories = await self._desk.cluster.describe(name) if name else b"[]"
        except PeerUnavailableError as e:
            raise ApiError(503, str(e), code="no_conductor") from None
        if stories == b"[]":
            message = (
                f"no request {name[:128]!r} is remembered: give an x-request-id or a request's own id; "
                "only the most recent ones are kept, `moonpool explain` also looks into the journal"
            )
            raise ApiError(404, message, code="request_not_found")
        return Response(stories, media_type="application/json")

    async def blocks(self, request: Request) -> Response:
        """A page of the blocks in the pool: which node has which, in which tier; `after` is the `next` of another."""
        after = request.query_params.get("after", "")
        try:
            page = await self._desk.cluster.describe(blocks_after=after)
        except PeerUnavailableError as e:
            raise ApiError(503, str(e), code="no_conductor") from None
        if page == b"null":
            raise invalid("after", f"no page of blocks begins at {after[:128]!r}: take the `next` of the page before")
        return Response(page, media_type="application/json")

    async def keys(self, request: Request) -> Response:
        """What each API key has used at this gateway."""
        if self._desk.keyring is None:
            raise ApiError(404, "this gateway asks for no API keys; --keys FILE has it ask", code="no_keys")
        return _json(shown.KeyList(self._desk.keyring.usage()))

    async def metrics(self, request: Request) -> Response:
        """The gateway's own, and, while the Conductor answers, the counters of all parts."""
        desk = self._desk
        try:
            parts = counters_in(await desk.cluster.describe())
        except PeerUnavailableError:
            parts = []
        fleet = desk.cluster.fleet.latest
        pages = sum(p.capacity.pages for p in fleet.parts if p.kind.decodes) if fleet is not None else 0
        decoding = [kind.value for kind in PartKind if kind.decodes]
        used = sum(values.get("pages_used", 0.0) for _, kind, values in parts if kind in decoding)
        self._meters.kv_usage.set(used / pages if pages else 0.0)
        return Response(self._meters.page(parts), media_type="text/plain; version=0.0.4; charset=utf-8")

    def _model(self) -> shown.Model:
        name, context = self._desk.config.served_model_name, self._desk.cluster.fleet.context_tokens
        return shown.Model(name, self._created, context)


def version() -> str:
    try:
        return importlib.metadata.version("moonpool")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


class _DescribedPart(msgspec.Struct):
    """The numbers of `core.state.PartState` that are worth a metric."""

    id: str
    kind: str
    queued: int | None = None
    running: int | None = None
    assigned: int | None = None
    pages_free: int | None = None
    used_bytes: int | None = None
    rooms: int | None = None
    room_bytes: int | None = None
    blocks: dict[str, float] = {}


class _DescribedClass(msgspec.Struct):
    name: str
    queued: int = 0


class _Described(msgspec.Struct):
    parts: list[_DescribedPart] = []
    counters: dict[str, dict[str, float]] = {}
    decisions: dict[str, object] = {}
    classes: list[_DescribedClass] = []


def counters_in(state: bytes) -> list[Part]:
    """The numbers of all parts, and the Conductor's own decisions, in its description (`core.state.ConductorState`)."""
    described = msgspec.json.decode(state, type=_Described)
    decisions = {name: float(n) for name, n in described.decisions.items() if isinstance(n, int | float)}
    parts: list[Part] = [("conductor", "conductor", decisions | described.counters.get("conductor", {}))]
    counted = described.decisions.get("classes")
    for each in described.classes:
        own = counted.get(each.name) if isinstance(counted, dict) else None
        found = {name: float(n) for name, n in own.items()} if isinstance(own, dict) else {}
        parts.append((each.name, "class", {"queued": each.queued} | found))
    for part in described.parts:
        gauges = {name: n for name, n in msgspec.structs.asdict(part).items() if isinstance(n, int)}
        blocks = {f"blocks_{tier}": n for tier, n in part.blocks.items()}
        parts.append((part.id, part.kind, gauges | blocks | described.counters.get(part.id, {})))
    return parts


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")
