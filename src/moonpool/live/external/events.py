"""vLLM's KV events: which blocks are in a server's own cache, in our keys.

Batches are `[ts, events, data_parallel_rank]`. An event is a map with its kind under `type` (vLLM 0.32) or an array
that begins with it (before); which fields it has, has changed over the versions. Nothing here waits or sends.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from moonpool.core.blocks import extend_keys
from moonpool.core.vocabulary import BlockKey, KeySpace

_FIELDS: Mapping[str, tuple[str, ...]] = {
    "BlockStored": (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
        "group_idx",
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}
"""In the order of the arrays."""
OWN_MEDIUM = "GPU"
"""The server's own cache, on CPUs too; others are tiers below it."""

Hash = bytes | int


class Stored(Struct, frozen=True):
    hashes: tuple[Hash, ...]
    parent: Hash | None
    tokens: tuple[int, ...]
    block_tokens: int
    salt: str
    """Of a prompt's first block."""
    is_plain: bool
    """Its KV depends on its tokens and salt only; no adapter, no image."""


class Removed(Struct, frozen=True):
    hashes: tuple[Hash, ...]


class Cleared(Struct, frozen=True):
    pass


KvEvent = Stored | Removed | Cleared


def events_in(payload: bytes) -> Iterator[KvEvent]:
    """Of one batch, those of the server's own cache. Raises ValueError for what is no batch."""
    try:
        batch = msgspec.msgpack.decode(payload)
        events = batch["events"] if isinstance(batch, dict) else batch[1]
        for event in events:
            if (found := _event(event)) is not None:
                yield found
    except (msgspec.MsgspecError, LookupError, TypeError, AttributeError) as e:
        raise ValueError(f"no batch of KV events: {type(e).__name__}: {e}") from None


def _event(event: Any) -> KvEvent | None:
    if isinstance(event, dict):
        kind, fields = event["type"], event
    else:
        kind = event[0]
        fields = dict(zip(_FIELDS.get(kind, ()), event[1:], strict=False))
    if kind == "AllBlocksCleared":
        return Cleared()
    if (
        kind not in _FIELDS
        or fields.get("medium") not in (None, OWN_MEDIUM)
        or fields.get("group_idx") not in (None, 0)
    ):
        return None
    hashes = tuple(fields["block_hashes"])
    if kind == "BlockRemoved":
        return Removed(hashes)
    parent = fields.get("parent_block_hash")
    salt, is_plain = _extra(fields.get("extra_keys"), is_first=parent is None)
    has_adapter = fields.get("lora_id") is not None or fields.get("lora_name") is not None
    tokens = tuple(fields["token_ids"])
    return Stored(hashes, parent, tokens, fields["block_size"], salt, is_plain and not has_adapter)


def _extra(extra: Sequence[Sequence[Any] | None] | None, is_first: bool) -> tuple[str, bool]:
    """What the blocks' hashes cover beside tokens; only a salt, with a prompt's first block, is known here."""
    keys = [tuple(each or ()) for each in extra or ()]
    if not any(keys):
        return "", True
    first, *others = keys
    if is_first and len(first) == 1 and isinstance(first[0], str) and not any(others):
        return first[0], True
    return "", False


class Known(Struct, frozen=True):
    """What an event changed."""

    came: tuple[BlockKey, ...] = ()
    went: tuple[BlockKey, ...] = ()


class BlockTable:
    """The blocks of one server by its own hashes, with our keys."""

    def __init__(self, space: KeySpace) -> None:
        self._space = space
        self._keys: dict[Hash, BlockKey] = {}
        self.unknown = 0
        """Blocks whose keys cannot be told: of an adapter or an image, or of a parent that is not known."""

    def __len__(self) -> int:
        return len(self._keys)

    def apply(self, event: KvEvent) -> Known:
        match event:
            case Stored():
                return self._stored(event)
            case Removed(hashes):
                went = [self._keys.pop(each) for each in hashes if each in self._keys]
                return Known(went=tuple(went))
            case Cleared():
                return self.clear()

    def clear(self) -> Known:
        went = tuple(self._keys.values())
        self._keys.clear()
        return Known(went=went)

    def _stored(self, event: Stored) -> Known:
        size = self._space.block_tokens
        parent = self._keys.get(event.parent) if event.parent is not None else None
        is_whole = event.block_tokens == size and len(event.tokens) == size * len(event.hashes)
        if not event.is_plain or not is_whole or (event.parent is not None and parent is None):
            self.unknown += len(event.hashes)
            return Known()
        if parent is None:
            keys = extend_keys((), event.tokens, self._space, event.salt)
        else:
            # Of what is before, the key alone counts.
            keys = extend_keys((parent,), (*(0,) * size, *event.tokens), self._space)[1:]
        came = tuple([key for each, key in zip(event.hashes, keys, strict=True) if each not in self._keys])
        self._keys.update(zip(event.hashes, keys, strict=True))
        return Known(came=came)
