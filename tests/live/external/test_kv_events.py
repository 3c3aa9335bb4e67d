"""vLLM's KV events, as it encodes them and did before, over real sockets; and roles."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from moonpool.core.blocks import block_keys
from moonpool.core.vocabulary import BlockKey
from moonpool.live.external.cache import space_of
from moonpool.live.external.events import BlockTable, events_in
from moonpool.live.external.follower import Follower

from .fake import BLOCK, MODEL, answer_to, fakes
from .kit import front, instances, run
from .test_external import prompt

SPACE = space_of(MODEL, BLOCK)
TOKENS = prompt(4, 3 * BLOCK)


def stored(hashes: list[bytes], parent: bytes | None, tokens: list[int], **more: Any) -> dict[str, Any]:
    """As vLLM 0.32 publishes it: a map, all required fields in it."""
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": BLOCK,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None] * len(hashes),
        "group_idx": 0,
        **more,
    }


def as_array(event: dict[str, Any]) -> list[Any]:
    """As versions before did."""
    names = {
        "BlockStored": ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"),
        "BlockRemoved": ("block_hashes", "medium"),
        "AllBlocksCleared": (),
    }
    return [event["type"], *(event[name] for name in names[event["type"]])]


def batch(*events: object) -> bytes:
    return msgspec.msgpack.encode([1.5, list(events), 0])


FIRST = stored([b"h0", b"h1"], None, TOKENS[: 2 * BLOCK])
SECOND = stored([b"h2"], b"h1", TOKENS[2 * BLOCK :])
REMOVED = {"type": "BlockRemoved", "block_hashes": [b"h2", b"h9"], "medium": "GPU", "group_idx": 0}
CLEARED = {"type": "AllBlocksCleared"}


def apply(table: BlockTable, *payloads: bytes) -> tuple[list[BlockKey], list[BlockKey]]:
    came: list[BlockKey] = []
    went: list[BlockKey] = []
    for payload in payloads:
        for event in events_in(payload):
            known = table.apply(event)
            came += known.came
            went += known.went
    return came, went


@pytest.mark.parametrize("encoded", [dict, as_array])
def test_both_encodings_give_our_keys(encoded: Callable[[dict[str, Any]], object]) -> None:
    table = BlockTable(SPACE)
    keys = list(block_keys(TOKENS, SPACE))
    assert apply(table, batch(encoded(FIRST)), batch(encoded(SECOND), encoded(REMOVED))) == (keys, keys[2:])
    # Told twice it is there once.
    assert apply(table, batch(encoded(FIRST), encoded(CLEARED))) == ([], keys[:2])
    assert len(table) == 0


def test_a_batch_may_be_a_map_too() -> None:
    payload = msgspec.msgpack.encode({"ts": 1.0, "events": [FIRST], "data_parallel_rank": None})
    assert len(apply(BlockTable(SPACE), payload)[0]) == 2


def test_salts_and_integer_hashes() -> None:
    table = BlockTable(SPACE)
    salted = stored([1, 2], None, TOKENS[: 2 * BLOCK], extra_keys=[["tenant"], None])  # type: ignore[list-item]
    after = stored([3], 2, TOKENS[2 * BLOCK :])  # type: ignore[list-item,arg-type]
    assert apply(table, batch(salted, after))[0] == list(block_keys(TOKENS, SPACE, "tenant"))


@pytest.mark.parametrize(
    "changed",
    [
        {"lora_name": "a"},
        {"lora_id": 1},
        {"block_size": BLOCK * 2},
        {"extra_keys": [["image", 3], None]},
        {"extra_keys": [None, ["salt"]]},
        {"parent_block_hash": b"never told of"},
    ],
)
def test_what_is_no_plain_prefix_is_counted_and_left_out(changed: dict[str, object]) -> None:
    table = BlockTable(SPACE)
    assert apply(table, batch({**FIRST, **changed})) == ([], [])
    assert table.unknown == 2


def test_other_tiers_and_groups_are_not_its_cache() -> None:
    table = BlockTable(SPACE)
    assert apply(table, batch({**FIRST, "medium": "CPU"}, {**FIRST, "group_idx": 1}, ["NewKind", 1])) == ([], [])
    assert table.unknown == 0


@pytest.mark.parametrize("payload", [b"", b"\xc1", msgspec.msgpack.encode([1]), batch({"type": "BlockStored"})])
def test_what_is_no_batch(payload: bytes) -> None:
    with pytest.raises(ValueError, match="no batch"):
        list(events_in(payload))


class Publisher:
    """As `ZmqEventPublisher`: PUB, and a ROUTER for replays."""

    def __init__(self) -> None:
        self._context = zmq.asyncio.Context()
        self._pub = self._context.socket(zmq.XPUB)
        self._replay = self._context.socket(zmq.ROUTER)
        self.address = f"tcp://127.0.0.1:{self._pub.bind_to_random_port('tcp://127.0.0.1')}"
        self.replay_address = f"tcp://127.0.0.1:{self._replay.bind_to_random_port('tcp://127.0.0.1')}"
        self.seq = 0
        self.kept: deque[tuple[int, bytes]] = deque(maxlen=100)
        self._answering = asyncio.create_task(self._answer())

    async def subscribed(self) -> None:
        assert (await self._pub.recv())[:1] == b"\x01"

    async def publish(self, *events: object, lost: bool = False) -> None:
        seq, payload = self.seq, batch(*events)
        self.seq += 1
        self.kept.append((seq, payload))
        if not lost:
            await self._pub.send_multipart([b"kv", seq.to_bytes(8, "big"), payload])

    async def _answer(self) -> None:
        while True:
            client, _, first = await self._replay.recv_multipart()
            for seq, payload in list(self.kept):
                if seq >= int.from_bytes(first, "big"):
                    await self._replay.send_multipart([client, b"", b"kv", seq.to_bytes(8, "big"), payload])
            await self._replay.send_multipart([client, b"", b"", (-1).to_bytes(8, "big", signed=True), b""])

    async def close(self) -> None:
        self._answering.cancel()
        await asyncio.wait([self._answering])
        self._context.destroy(linger=0)


def test_gaps_are_replayed_and_what_cannot_be_is_forgotten() -> None:
    async def work() -> None:
        publisher = Publisher()
        held: dict[BlockKey, None] = {}
        changed = asyncio.Event()

        def tell(known: Any) -> None:
            for key in known.went:
                del held[key]
            held.update(dict.fromkeys(known.came))
            changed.set()

        follower = Follower(publisher.address, publisher.replay_address, BlockTable(SPACE), tell)
        keys = block_keys(TOKENS, SPACE)
        await publisher.publish(FIRST)  # before anybody listened
        following = asyncio.create_task(follower.run())
        try:

            async def until(wanted: tuple[BlockKey, ...]) -> None:
                while tuple(held) != wanted:
                    changed.clear()
                    await changed.wait()

            await publisher.subscribed()
            await until(keys[:2])
            await publisher.publish(SECOND, lost=True)
            await publisher.publish()
            await until(keys)
            # The empty batch comes after what was waited for.
            assert (follower.gaps, follower.batches) in ((0, 2), (0, 3))
            publisher.kept.clear()
            await publisher.publish(CLEARED, lost=True)
            publisher.kept.clear()
            await publisher.publish(FIRST)
            await until(keys[:2])
            assert follower.gaps == 1
            # A new server.
            publisher.seq = 0
            publisher.kept.clear()
            await publisher.publish(stored([b"x"], None, TOKENS[:BLOCK]))
            await until(keys[:1])
        finally:
            following.cancel()
            await asyncio.wait([following])
            await publisher.close()

    run(work())


def test_a_server_that_connects_is_listened_to(tmp_path: Path) -> None:
    async def work() -> None:
        address = f"ipc://{tmp_path}/kv"
        told = asyncio.Event()
        follower = Follower(address, None, BlockTable(SPACE), lambda known: told.set(), listens=True)
        following = asyncio.create_task(follower.run())
        context = zmq.asyncio.Context()
        try:
            publisher = context.socket(zmq.XPUB)
            publisher.connect(address)
            assert (await publisher.recv())[:1] == b"\x01"
            await publisher.send_multipart([b"", (41).to_bytes(8, "big"), batch(FIRST)])
            await told.wait()
            assert follower.counters()["kv_event_gaps"] == 0
        finally:
            following.cancel()
            await asyncio.wait([following])
            context.destroy(linger=0)

    run(work())


def test_what_a_server_tells_counts_as_a_hit_there() -> None:
    """Though nothing was sent there from here."""

    async def work() -> None:
        publisher = Publisher()
        async with fakes(2) as servers:
            one, other = instances(servers)
            told = msgspec.structs.replace(
                other, kv_events=publisher.address, kv_events_replay=publisher.replay_address
            )
            try:
                async with front([one, told]) as gate:
                    await publisher.subscribed()
                    await publisher.publish(FIRST, SECOND)
                    await gate.until(
                        lambda state: state["counters"].get("vllm-1.cache", {}).get("blocks_known") == 3, "it is told"
                    )
                    answer = await gate.ask([*TOKENS, 5], 4)
                    assert len(servers[1].bodies) == 1
                    assert answer.cached_tokens == 3 * BLOCK
                    part = await gate.part("vllm-1.cache")
                    assert (part["blocks"]["dram"], part["index"]) == (3, "exact")
                    # It knows better than the model of what was sent there.
                    await publisher.publish(CLEARED)
                    await gate.until(
                        lambda state: state["counters"]["vllm-1.cache"]["blocks_known"] == 0, "all is cleared"
                    )
            finally:
                await publisher.close()

    run(work())


def test_prefill_and_decode_instances_share_a_request() -> None:
    async def work() -> None:
        async with fakes(2) as servers:
            servers[0].cached_tokens, servers[1].cached_tokens = BLOCK, 3 * BLOCK
            served = [
                msgspec.structs.replace(instance, role=role)
                for instance, role in zip(instances(servers), ("prefill", "decode"), strict=True)
            ]
            async with front(served) as gate:
                answers = [await gate.ask(prompt(seed), 6) for seed in range(3)]
                assert [a.tokens for a in answers] == [answer_to(prompt(seed), 6) for seed in range(3)]
                assert [body["max_tokens"] for body in servers[0].bodies] == [1, 1, 1]
                assert [body["prompt"] for body in servers[1].bodies] == [prompt(seed) for seed in range(3)]
                # What prefill found, not what decode got from it.
                assert [a.cached_tokens for a in answers] == [BLOCK] * 3
                one = await gate.ask(prompt(9), 1)
                assert (one.finish, len(servers[1].bodies)) == ("length", 3)
                # Decode dies: prefill computes again, with the tokens so far.
                servers[1].dies_after = 2
                pending = gate.submit(prompt(5), 8)
                await pending.until(3)
                servers[1].dies_after = None
                answer = await pending.answer()
                assert answer.tokens == answer_to(prompt(5), 8)

    run(work())
