"""A cluster of processes that publishes: the subscriber of the docs ends with the blocks that /cluster/blocks shows."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moonpool.core.blocks import block_keys
from moonpool.messenger.questions import YES, Marks, Remove, packed
from tests.live.kit import (
    BLOCK,
    HANG,
    complete,
    counters,
    eventually,
    key_space_of,
    node_client,
    output_ids,
    part_state,
    random_prompt,
    shown_blocks,
)
from tests.live.parts import Parts, separate_parts

from .example import Example, example
from .kit import quiet_port

pytestmark = pytest.mark.live

Told = set[tuple[str, int]]


class Published:
    """Parts whose Conductor publishes, and subscribers."""

    def __init__(self, parts: Parts, ports: tuple[int, int], folder: Path) -> None:
        self.parts = parts
        self._addresses = [f"tcp://127.0.0.1:{port}" for port in ports]
        self._folder = folder

    def subscriber(self, name: str) -> contextlib.AbstractContextManager[Example]:
        folder = self._folder / name
        folder.mkdir()
        return example(folder, *self._addresses)

    def told(self) -> Told:
        """By the directory; all of it is to be published."""
        shown = shown_blocks(self.parts)
        dram = {("CPU", block["hash"]) for block in shown if block["dram"]}
        return dram | {("STORAGE", block["hash"]) for block in shown if block["ssd"]}

    def all_know(self, *followers: Example, that: Callable[[Told], bool] = bool) -> Told:
        """Wait until what is shown is so, and all know exactly that."""
        until = time.monotonic() + HANG / 2
        while True:
            told = self.told()
            if that(told) and all(each.blocks() == told for each in followers) and self.told() == told:
                return told
            assert time.monotonic() < until, f"{len(told)} blocks, known {[len(each.blocks()) for each in followers]}"
            time.sleep(0.05)


@contextlib.contextmanager
def published(tmp_path: Path, **more: object) -> Iterator[Published]:
    ports = quiet_port(), quiet_port()
    config: dict[str, object] = {
        "engine": "timed",
        "kv-events-port": ports[0],
        "kv-events-replay-port": ports[1],
        **more,
    }
    with separate_parts(config) as parts:
        for node in ("node-0", "node-1"):
            parts.start_node(node)
        parts.start_worker("prefill", "prefill-0", "node-0")
        parts.start_worker("decode", "decode-0", "node-1")
        parts.wait_ready()
        yield Published(parts, ports, tmp_path)


def is_exact(parts: Parts, node: str) -> bool:
    try:
        return bool(part_state(parts, node).get("index") == "exact")
    except OSError:
        return False


def hashes(prompt: list[int], parts: Parts) -> set[int]:
    return {int.from_bytes(key[-8:], "big") for key in block_keys(prompt, key_space_of(parts))}


def test_a_subscriber_ends_with_what_the_cluster_shows(smollm2: Path, tmp_path: Path) -> None:
    """Puts, evictions, tiers, removals, a node and the Conductor killed; late and early subscribers."""
    # A block of the timed engine is 32 KiB: DRAM has 32 of them.
    with (
        published(tmp_path, **{"dram-per-node": "1MiB", "ssd-per-node": "4MiB", "ssd-dir": str(tmp_path)}) as p,
        p.subscriber("early") as early,
    ):
        prompt = random_prompt(5 * BLOCK + 7, seed=1)
        answer = output_ids(complete(p.parts, prompt, BLOCK))
        whole = hashes([*prompt, *answer][: 6 * BLOCK], p.parts)
        told = p.all_know(early, that=lambda told: {each for _, each in told} >= whole)
        assert len({each for _, each in told}) == len(whole)

        for seed in range(2, 8):
            complete(p.parts, random_prompt(7 * BLOCK, seed=seed), 2, cache_salt="tenant" if seed % 2 else "")
        told = p.all_know(early, that=lambda told: {medium for medium, _ in told} == {"CPU", "STORAGE"})
        assert len([medium for medium, _ in told if medium == "CPU"]) <= 64
        assert any(not block["dram"] for block in shown_blocks(p.parts))
        assert counters(p.parts)["conductor"]["kv_events_blocks"] == len(told)

        with p.subscriber("late") as late:
            p.all_know(early, late)
            keys = block_keys(random_prompt(7 * BLOCK, seed=6), key_space_of(p.parts))
            with node_client(p.parts, "node-0") as client:
                reply = client.ask(Remove(key_space_of(p.parts).id, packed(keys))).result(HANG)
            assert isinstance(reply, Marks)
            gone = {int.from_bytes(key[-8:], "big") for key, mark in zip(keys, reply.marks, strict=True) if mark == YES}
            assert gone
            p.all_know(early, late, that=lambda told: not gone & {each for _, each in told})

            p.parts.kill("node-1")
            p.parts.report_lost("node-1")
            p.all_know(
                early,
                late,
                that=lambda told: all(set(b["dram"] + b["ssd"]) == {"node-0"} for b in shown_blocks(p.parts)),
            )

            left = p.all_know(early, late)
            p.parts.kill("conductor")
            p.parts.start_conductor()
            eventually(lambda: is_exact(p.parts, "node-0"), "the directory is exact")
            assert p.all_know(early, late) == left
            p.parts.start_worker("decode", "decode-1", "node-0")
            complete(p.parts, random_prompt(3 * BLOCK, seed=99), 2)
            p.all_know(early, late, that=lambda told: told != left)
