"""What vLLM hands to a connector, as recorded from vLLM 0.32 on CPU; and both halves around a node, without vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch

from moonpool.connectors.counters import Counters
from moonpool.connectors.identity import Model, Shape, Spaces
from moonpool.connectors.link import NodeLink
from moonpool.connectors.pages import Pages
from moonpool.connectors.settings import ConnectorSettings
from moonpool.connectors.working import WorkerHalf

from ..store.kit import eventually

SIZE = 16
"""Tokens of a block; vLLM's own on CPU is 128."""
LAYERS, BLOCKS, HEADS, HEAD_DIM = 3, 12, 3, 64
NAMES = tuple(f"model.layers.{number}.self_attn.attn" for number in range(LAYERS))
RUN_BYTES = HEADS * SIZE * 2 * HEAD_DIM * 4
MODEL = Model("weights", "settings", "auto, torch.float32", SIZE, HEADS, HEAD_DIM)
SHAPE = Shape(LAYERS, RUN_BYTES, "as recorded")


@dataclass
class Request:
    """vllm.v1.request.Request"""

    request_id: str
    prompt_token_ids: list[int] | None
    cache_salt: str | None = None
    lora_request: SimpleNamespace | None = None
    mm_features: list[object] = field(default_factory=list)
    prompt_embeds: object | None = None
    prompt_is_token_ids: list[bool] | None = None
    pooling_params: object | None = None
    skip_reading_prefix_cache: bool = False
    kv_transfer_params: dict[str, object] | None = None
    output: list[int] = field(default_factory=list)

    @property
    def all_token_ids(self) -> list[int]:
        return (self.prompt_token_ids or []) + self.output

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


def step(
    new: Sequence[tuple[str, list[int], int, int]] = (),
    more: Sequence[tuple[str, list[int] | None, int, int]] = (),
    resumed: Sequence[str] = (),
) -> SimpleNamespace:
    """vllm.v1.core.sched.output.SchedulerOutput. Of each request: id, blocks, tokens computed before, and in it."""
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, block_ids=(blocks,), num_computed_tokens=computed)
            for name, blocks, computed, _ in new
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[name for name, *_ in more],
            resumed_req_ids=set(resumed),
            new_block_ids=[None if blocks is None else (blocks,) for _, blocks, *_ in more],
            num_computed_tokens=[computed for _, _, computed, _ in more],
        ),
        num_scheduled_tokens={name: count for name, _, _, count in (*new, *more)},
    )


def caches(seed: int) -> dict[str, torch.Tensor]:
    """As `register_kv_caches` gets them: (blocks, heads, tokens, key and value), layer names in any order."""
    generator = torch.Generator().manual_seed(seed)
    shape = (BLOCKS, HEADS, SIZE, 2 * HEAD_DIM)
    return {name: torch.randn(shape, generator=generator) for name in reversed(NAMES)}


def spaces(ranks: int = 1, model: Model = MODEL) -> Spaces:
    known = Spaces(model)
    known.learn({(0, rank): SHAPE for rank in range(ranks)})
    return known


class Worker:
    """The worker's half of one rank, joined to a node."""

    def __init__(self, socket_path: str, seed: int, rank: int = 0, ranks: int = 1, **settings: float) -> None:
        self.caches = caches(seed)
        self.counters = Counters()
        self.link = NodeLink(socket_path, f"test {seed}", self.counters)
        self.half = WorkerHalf(
            ConnectorSettings(node=socket_path, name="vllm", **{"save_seconds": 20.0, "load_seconds": 20.0} | settings),
            self.link,
            self.counters,
            rank,
            ranks,
        )
        self.half.pages = Pages(self.caches, BLOCKS)
        eventually(lambda: self.link.client is not None, "the node lets it in")

    def block(self, number: int) -> torch.Tensor:
        """Of all layers."""
        return torch.stack([self.caches[name][number] for name in NAMES])

    def close(self) -> None:
        self.half.close()
        self.link.close()
