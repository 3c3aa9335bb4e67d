"""A block of a layer is one run of bytes, in whatever order vLLM keeps its dimensions."""

from __future__ import annotations

import pytest
import torch

from moonpool.connectors.pages import Pages
from moonpool.errors import ConfigError

from .kit import BLOCKS, HEAD_DIM, HEADS, LAYERS, NAMES, RUN_BYTES, SIZE, caches


def test_layers_are_in_order_and_runs_are_the_cache_itself() -> None:
    tensors = caches(1)
    pages = Pages(tensors, BLOCKS)
    assert pages.names == NAMES
    assert (len(pages), pages.run_bytes) == (LAYERS, RUN_BYTES)
    assert pages.run(2, 5).tobytes() == tensors[NAMES[2]][5].numpy().tobytes()
    pages.run(1, 4)[:] = pages.run(2, 5)
    assert torch.equal(tensors[NAMES[1]][4], tensors[NAMES[2]][5])


def test_layers_that_lie_between_each_other_and_tokens_before_heads() -> None:
    memory = torch.arange(BLOCKS * LAYERS * SIZE * HEADS * 8, dtype=torch.bfloat16).view(BLOCKS, LAYERS, SIZE, HEADS, 8)
    views = {name: memory[:, number].transpose(1, 2) for number, name in enumerate(NAMES)}
    pages = Pages(views, BLOCKS)
    assert pages.run(1, 3).tobytes() == memory[3, 1].view(torch.uint8).numpy().tobytes()
    assert pages.layout != Pages(caches(1), BLOCKS).layout


def test_a_block_of_several_of_the_kernels() -> None:
    tensors = caches(1)
    pages = Pages(tensors, BLOCKS // 2)
    assert pages.run(0, 1).tobytes() == tensors[NAMES[0]][2:4].numpy().tobytes()


def test_what_cannot_be_moved_whole_is_refused() -> None:
    whole = torch.zeros(BLOCKS, HEADS, SIZE, 2 * HEAD_DIM)
    gaps = torch.zeros(BLOCKS, HEADS, SIZE, 4 * HEAD_DIM)[..., : 2 * HEAD_DIM]
    refused: list[tuple[dict[str, object], str]] = [
        ({}, "not supported"),
        ({"layers.0.attn": [whole, whole]}, "several tensors"),
        ({"layers.0.attn": gaps}, "one piece"),
        ({"layers.0.attn": whole, "layers.0.cross": whole}, "two caches"),
        ({"encoder": whole}, "no number"),
        ({"layers.0.attn": whole, "layers.1.attn": whole[..., :64].contiguous()}, "differ in size"),
        ({"layers.0.attn": whole, "layers.1.attn": whole.view(BLOCKS, SIZE, HEADS, 2 * HEAD_DIM)}, "differently"),
        ({"layers.0.attn": torch.zeros(BLOCKS, 4, device="meta")}, "on CPUs only"),
    ]
    for tensors, what in refused:
        with pytest.raises(ConfigError, match=what):
            Pages(tensors, BLOCKS)
    with pytest.raises(ConfigError, match="multiple"):
        Pages({"layers.0.attn": whole}, BLOCKS - 1)
