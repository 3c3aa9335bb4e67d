"""What can be asked of a gateway: each method of each path, with what it takes and answers."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from moonpool.gateway import replies, shown
from moonpool.gateway.caching.pages import MOST_LISTED
from moonpool.gateway.caching.reference import HEADER as CACHE_HEADER
from moonpool.gateway.caching.reference import MAX_REFERENCE_CHARS
from moonpool.gateway.dashboard import FILES
from moonpool.gateway.live import Live
from moonpool.gateway.openapi.described import Schema
from moonpool.wire.story import Story

POSTED = (408, 413, 415, 429)
"""Errors of all that take a body."""


class Parameter(Struct, frozen=True):
    """Of the query, or a header."""

    name: str
    schema: Schema
    text: str
    where: str = "header"


class Operation(Struct, frozen=True):
    method: str
    path: str
    """As the routes have it."""
    tag: str
    id: str
    text: str
    answer: Any
    """A type that msgspec encodes; a media type, for text; None: nothing."""
    status: int = 200
    others: dict[int, Any] = {}
    """Answers that are no errors and have other statuses."""
    errors: tuple[int, ...] = ()
    """Besides those that every operation has."""
    body: str | None = None
    """Component; `object` where only what serves knows more."""
    events: str | None = None
    """Component: of each event where a stream is asked for."""
    parameters: tuple[Parameter, ...] = ()


_MILLISECONDS: Schema = {"type": "string", "pattern": r"^[0-9]{1,9}(\.[0-9]{1,9})?$"}
_ASKED = (
    Parameter("x-slo-ttft-ms", _MILLISECONDS, "Milliseconds that the first token may take, above 0."),
    Parameter("x-slo-tpot-ms", _MILLISECONDS, "Milliseconds between tokens, above 0."),
    Parameter(
        CACHE_HEADER,
        {"type": "string", "maxLength": MAX_REFERENCE_CHARS},
        "A cached context to begin with: its id, and `;reset_ttl=SECONDS` if it is to live on.",
    ),
)
_PAGE = (
    Parameter("limit", {"type": "integer", "minimum": 1, "maximum": MOST_LISTED}, "Most to be listed.", "query"),
    Parameter("after", {"type": "string"}, "Id of the last one of the page before.", "query"),
)
_AFTER = (Parameter("after", {"type": "string"}, "`next` of the page before.", "query"),)
_COMPLETING = (*POSTED, 403, 404, 410, 504)
_SINCE = (
    Parameter(
        "after",
        {"type": "string", "pattern": "^[0-9]{1,12}$"},
        "Number of the newest sample that is there already.",
        "query",
    ),
)
_CACHING = "/v1/caching"
_ONE = _CACHING + "/{context}"
_INSTANCES = "/cluster/instances"

OPERATIONS = (
    Operation(
        "POST",
        "/v1/chat/completions",
        "OpenAI",
        "createChatCompletion",
        "Answer messages, at once or as server-sent events.",
        replies.ChatCompletion,
        errors=_COMPLETING,
        body="ChatCompletionRequest",
        events="ChatCompletionChunk",
        parameters=_ASKED,
    ),
    Operation(
        "POST",
        "/v1/completions",
        "OpenAI",
        "createCompletion",
        "Go on from prompts, at once or as server-sent events.",
        replies.TextCompletion,
        errors=_COMPLETING,
        body="CompletionRequest",
        events="TextCompletionChunk",
        parameters=_ASKED,
    ),
    Operation("GET", "/v1/models", "OpenAI", "listModels", "The one model that is served.", shown.ModelList),
    Operation(
        "GET", "/v1/models/{model:path}", "OpenAI", "getModel", "A model by its name.", shown.Model, errors=(404,)
    ),
    Operation(
        "POST",
        "/tokenize",
        "tokens",
        "tokenize",
        "The tokens of a text, or of messages.",
        shown.TokenList,
        errors=(*POSTED, 404),
        body="TokenizeRequest",
    ),
    Operation(
        "POST",
        "/detokenize",
        "tokens",
        "detokenize",
        "The text of tokens.",
        shown.DetokenizedText,
        errors=(*POSTED, 404),
        body="DetokenizeRequest",
    ),
    Operation(
        "POST",
        _CACHING,
        "caching",
        "cacheContext",
        "Compute a prefix and keep it in the pool.",
        shown.CachedContext,
        errors=_COMPLETING,
        body="NewCachedContext",
    ),
    Operation(
        "GET",
        _CACHING,
        "caching",
        "listContexts",
        "Contexts of the key, the newest first.",
        shown.CachedContexts,
        errors=(429,),
        parameters=_PAGE,
    ),
    Operation("GET", _ONE, "caching", "getContext", "One of them.", shown.CachedContext, errors=(404, 429)),
    Operation(
        "PATCH",
        _ONE,
        "caching",
        "changeContext",
        "Another time to live, name or metadata.",
        shown.CachedContext,
        errors=(*POSTED, 404),
        body="CachedContextChange",
    ),
    Operation(
        "PUT",
        _ONE,
        "caching",
        "putContext",
        "As PATCH.",
        shown.CachedContext,
        errors=(*POSTED, 404),
        body="CachedContextChange",
    ),
    Operation(
        "DELETE", _ONE, "caching", "deleteContext", "Keep it no longer.", shown.DeletedContext, errors=(404, 429)
    ),
    Operation("GET", "/health", "service", "getHealth", "Whether the gateway is alive.", shown.Health),
    Operation(
        "GET",
        "/ready",
        "service",
        "getReadiness",
        "Whether the cluster can serve.",
        shown.Readiness,
        others={503: shown.Readiness},
    ),
    Operation("GET", "/version", "service", "getVersion", "Moonpool's version.", shown.Version),
    Operation("GET", "/metrics", "service", "getMetrics", "Metrics in Prometheus's text format.", "text/plain"),
    Operation("GET", "/openapi.json", "service", "getOpenApi", "This document.", dict[str, Any]),
    Operation("GET", "/cluster", "cluster", "getCluster", "The state of all parts.", shown.ClusterState),
    Operation(
        "GET",
        "/cluster/requests/{request:path}",
        "cluster",
        "explainRequest",
        "Why requests with this id or x-request-id were placed where they were, or refused.",
        list[Story],
        errors=(404,),
    ),
    Operation(
        "GET",
        "/cluster/blocks",
        "cluster",
        "listBlocks",
        "A page of the blocks in the pool.",
        shown.BlockList,
        parameters=_AFTER,
    ),
    Operation(
        "GET", "/cluster/keys", "cluster", "listKeys", "What each API key has used.", shown.KeyList, errors=(404,)
    ),
    Operation(
        "GET",
        _INSTANCES,
        "cluster",
        "listInstances",
        "External instances that are served from.",
        dict[str, Any],
        errors=(404,),
    ),
    Operation(
        "POST",
        _INSTANCES,
        "cluster",
        "registerInstance",
        "One more: an entry of the file that --instances names, as JSON (docs/vllm.md).",
        dict[str, Any],
        201,
        errors=(404, 408, 413, 415, 429),
        body="object",
    ),
    Operation(
        "DELETE",
        _INSTANCES + "/{instance}",
        "cluster",
        "removeInstance",
        "Serve from it no more.",
        None,
        204,
        errors=(404,),
    ),
    Operation(
        "GET",
        "/cluster/live",
        "cluster",
        "getLive",
        "What the dashboard shows: the newest state, and samples for its charts.",
        Live,
        parameters=_SINCE,
    ),
    *(
        Operation(
            "GET",
            f"/dashboard{path}",
            "dashboard",
            f"getDashboard{file}",
            "A file of the page that shows the cluster.",
            kind.partition(";")[0],
            others={304: None},
        )
        for path, (file, kind) in FILES.items()
    ),
)
