"""What the gateway answers besides completions: the structs that are encoded, and that /openapi.json describes."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType, field

from moonpool.core.state import ConductorState
from moonpool.wire.story import Brief


class Error(Struct):
    """OpenAI's form."""

    message: str
    type: str
    param: str | None
    """The field or header at fault."""
    code: str | None


class Problem(Struct):
    """What every error is answered with."""

    error: Error


class Health(Struct):
    status: Literal["ok"] = "ok"


class Readiness(Struct):
    ready: bool
    reason: str | UnsetType = UNSET
    """What is lacking."""


class Version(Struct):
    version: str


class Model(Struct):
    id: str
    created: int
    max_model_len: int
    """Tokens, prompt and answer; 0 while there is no worker."""
    object: Literal["model"] = "model"
    owned_by: str = "moonpool"


class ModelList(Struct):
    data: list[Model]
    object: Literal["list"] = "list"


class TokenList(Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None
    """As the vocabulary spells them, where that was asked for."""


class DetokenizedText(Struct):
    prompt: str


class KeyUsage(Struct):
    """Since this gateway's start, or since the key has come."""

    id: str
    name: str
    group: str
    requests: int
    prompt_tokens: int
    output_tokens: int
    over_quota: int
    streams: int
    """Under way."""


class KeyList(Struct):
    keys: list[KeyUsage]


class PoolBlock(Struct):
    """A block in the pool, as the Conductor's directory knows it."""

    key: str
    """Hex."""
    space: str
    dram: list[str]
    """Nodes that have it there."""
    ssd: list[str]
    hash: int
    """Its name in KV events."""
    published: bool | UnsetType = UNSET
    """Whether KV events have told of it; only where there are any."""


class BlockList(Struct):
    blocks: list[PoolBlock]
    next: str | None
    """`after` of the next page; null: this is the last."""


class ClusterState(ConductorState, frozen=True):
    """The Conductor's state with this gateway's numbers."""

    recent: tuple[Brief, ...] = ()
    gateway: dict[str, int] = field(default_factory=dict)


class CachedContext(Struct):
    id: str
    model: str
    status: Literal["ready", "pending"]
    problem: str | None
    name: str
    metadata: dict[str, str]
    tokens: int
    pinned_tokens: int
    bytes: int
    created_at: int
    """Unix time, as `expired_at`."""
    expired_at: int
    object: Literal["context_cache_object"] = "context_cache_object"


class CachedContexts(Struct):
    data: list[CachedContext]
    has_more: bool
    object: Literal["list"] = "list"


class DeletedContext(Struct):
    id: str
    object: Literal["context_cache_object.deleted"] = "context_cache_object.deleted"
    deleted: bool = True
