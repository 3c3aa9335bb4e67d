"""Bytes that leave one engine's pages and enter another's are the same KV; hooks, bounds, and device copies."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from moonpool.engine.engine import Row
from moonpool.engine.pages import DevicePages, Pages
from moonpool.engine.runner import TorchEngine
from moonpool.errors import ModelError
from moonpool.wire.messages import Sampling

GREEDY = Sampling(seed=0, temperature=0.0)


def prompt_of(length: int) -> list[int]:
    rng = random.Random(length)
    return [rng.randrange(100, 40_000) for _ in range(length)]


def fresh(engine: TorchEngine, pages: list[int]) -> None:
    for page in pages:
        engine.clear(page)


def test_kv_moved_by_runs_and_tail_continues_exactly(engine: TorchEngine) -> None:
    """A prompt of two blocks and a tail goes to other, poisoned pages; the next token is the same, bit for bit."""
    prompt = [*prompt_of(150), 17]
    source, target = [1, 2, 3], [9, 30, 4]
    fresh(engine, source)
    engine.step([Row(prompt, 151, 0, 150, source)])
    stay = engine.logits([Row(prompt, 151, 150, 1, source, GREEDY)])
    for page in target:
        engine.poison_page(page)
    engine.clear(target[2])
    space = engine.space
    for layer in range(space.runs):
        for old, new in zip(source[:2], target[:2], strict=True):
            run = engine.run(layer, old)
            assert run.nbytes == space.run_bytes
            engine.run(layer, new)[:] = run
        halves = engine.tail_runs(layer, source[2], 22)
        assert sum(half.nbytes for half in halves) == space.tail_run_bytes(22)
        for half, into in zip(halves, engine.tail_runs(layer, target[2], 22), strict=True):
            into[:] = half
    moved = engine.logits([Row(prompt, 151, 150, 1, target, GREEDY)])
    assert torch.equal(stay, moved)
    engine.run(11, target[0])[5003] ^= 0x80  # the sign of one number
    assert not torch.equal(stay, engine.logits([Row(prompt, 151, 150, 1, target, GREEDY)]))


def test_hook_sees_each_layer_complete_and_its_exception_passes_through(engine: TorchEngine) -> None:
    prompt = prompt_of(64)
    fresh(engine, [0, 1])
    engine.step([Row(prompt, 64, 0, 64, [1])])
    seen: list[int] = []

    def compare(layer: int) -> None:
        seen.append(layer)
        assert np.array_equal(engine.run(layer, 0), engine.run(layer, 1))
        if layer + 1 < engine.space.runs:
            assert not engine.run(layer + 1, 0).any()

    engine.step([Row(prompt, 64, 0, 64, [0])], compare)
    assert seen == list(range(engine.space.runs))

    class CancelledError(Exception):
        pass

    def cancel(layer: int) -> None:
        if layer == 3:
            raise CancelledError

    fresh(engine, [0])
    with pytest.raises(CancelledError):
        engine.step([Row(prompt, 64, 0, 64, [0])], cancel)
    assert engine.run(3, 0).any()
    assert not engine.run(4, 0).any()


def test_rows_outside_their_pages_or_the_context_are_refused(engine: TorchEngine) -> None:
    prompt = prompt_of(65)
    with pytest.raises(ValueError, match="needs 65 tokens of pages"):
        engine.step([Row(prompt, 65, 0, 65, [0])])
    with pytest.raises(ValueError, match=r"0\.\.66 of 65"):
        engine.step([Row(prompt, 65, 0, 66, [0, 1])])
    long = [5] * (engine.context_tokens + 1)
    with pytest.raises(ValueError, match="the context is 8192"):
        engine.step([Row(long, len(long), len(long) - 1, 1, list(range(129)))])


def test_untouched_pages_cost_no_memory() -> None:
    before = _resident()
    pages = _pages(Pages, page_count=20_000)
    assert pages.run_bytes * 20_000 * 2 > 300 << 20
    pages.run(1, 19_999)[:] = 1
    assert _resident() - before < 50 << 20


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def _pages(kind: type[Pages], page_count: int = 4) -> Pages:
    return kind(
        layers=2,
        page_count=page_count,
        block_tokens=16,
        kv_heads=2,
        head_dim=32,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def _row(pages: list[int]) -> Row:
    return Row([1], 1, 0, 1, pages)


def test_device_pages_take_what_a_view_was_filled_with_and_keep_what_was_only_read() -> None:
    """The copies of an accelerator's pages, here with the CPU as the device."""
    pages = _pages(DevicePages)
    pages.run(1, 2)[:] = 1
    pages.run(0, 3)
    pages.slots(0)[3, 0, 0] = 5.0  # a step writes page 3 after someone has read it
    pages.settle([_row([2, 3])])
    assert pages.rows(1)[4].view(torch.uint8).eq(1).all()
    assert float(pages.rows(0)[6, 0, 0, 0]) == 5.0
    assert pages.run(0, 3).view(np.float32)[0] == 5.0
    pages.run(0, 3)[:] = 7
    pages.clear(3)
    pages.settle([_row([3])])
    assert not pages.rows(0)[6].any()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_continues_what_the_cpu_computed(engine: TorchEngine, smollm2: Path) -> None:
    device = TorchEngine(smollm2, page_count=4, device="cuda")
    prompt = prompt_of(65)
    fresh(engine, [0, 1])
    fresh(device, [0, 1])
    engine.step([Row(prompt, 65, 0, 64, [0, 1])])
    for layer in range(engine.space.runs):
        device.run(layer, 0)[:] = engine.run(layer, 0)
    row = [Row(prompt, 65, 64, 1, [0, 1], GREEDY)]
    assert torch.allclose(engine.logits(row), device.logits(row).cpu(), atol=1e-2)


def test_unknown_dtype_is_named(smollm2: Path) -> None:
    with pytest.raises(ModelError, match="dtype float8 is unknown; choose one of float32"):
        TorchEngine(smollm2, page_count=2, dtype="float8")
