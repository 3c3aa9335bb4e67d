"""What the scheduler half tells the worker half for one step. It travels with vLLM's own metadata, pickled by vLLM."""

from __future__ import annotations

from msgspec import Struct

from moonpool.core.vocabulary import BlockKey, KeySpace, RequestId


class Load(Struct, frozen=True):
    """Blocks of a request that vLLM waits for."""

    request: RequestId
    space: KeySpace
    keys: tuple[BlockKey, ...]
    blocks: tuple[int, ...]
    """vLLM's numbers of the blocks that they go to, one a key."""


class Save(Struct, frozen=True):
    """The whole blocks of a request, from its first on, that are computed when this step is."""

    request: RequestId
    step: int
    space: KeySpace
    keys: tuple[BlockKey, ...]
    blocks: tuple[int, ...]
    fresh: int
    """So many of them, the last ones, this step completes."""
    tokens: tuple[int, ...] = ()
    """Of these blocks."""


class StepPlan(Struct, frozen=True):
    loads: tuple[Load, ...] = ()
    saves: tuple[Save, ...] = ()
