"""Prefill and decode servers that hand over to each other by `kv_transfer_params`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from msgspec import structs

from moonpool.core.vocabulary import PartId
from moonpool.live.external.config import Instance

from .fake import FakeVllm, answer_to, fakes
from .kit import Front, front, instances, run

PROMPT = list(range(50, 90))


@asynccontextmanager
async def pair(transfers: bool = True) -> AsyncIterator[tuple[Front, FakeVllm, FakeVllm]]:
    async with fakes(2) as servers:
        servers[0].gives_transfer = transfers
        roles = ("prefill", "decode")
        made = instances(servers, kv_transfer_params=True)
        apart: list[Instance] = [structs.replace(i, role=r) for i, r in zip(made, roles, strict=True)]
        async with front(apart) as f:
            yield f, servers[0], servers[1]


@pytest.mark.parametrize("logprobs", [None, 2])
def test_decode_gets_what_prefill_s_server_gave_and_draws_the_first_token_itself(logprobs: int | None) -> None:
    async def test() -> None:
        async with pair() as (f, prefill, decode):
            prefill.cached_tokens = 16
            answer = await f.ask(PROMPT, 6, logprobs=logprobs)
            assert answer.tokens == answer_to(PROMPT, 6)
            assert answer.cached_tokens == 16, "what prefill found"
            assert [len(drawn.top) for drawn in answer.drawn] == [logprobs or 0] * 6
            (asked,), (went_on,) = prefill.bodies, decode.bodies
            assert (asked["stream"], asked["max_tokens"], asked["prompt"]) == (False, 1, PROMPT)
            assert "stream_options" not in asked
            assert (went_on["prompt"], went_on["max_tokens"]) == (PROMPT, 6)
            transfer = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]], "remote_port": prefill.port}
            assert went_on["kv_transfer_params"] == transfer

    run(test())


def test_one_token_needs_no_decode() -> None:
    async def test() -> None:
        async with pair() as (f, _, decode):
            assert (await f.ask(PROMPT, 1)).tokens == answer_to(PROMPT, 1)
            assert decode.bodies == []

    run(test())


def test_a_decode_server_that_fails_is_gone_on_from_with_a_new_prefill() -> None:
    async def test() -> None:
        async with pair() as (f, prefill, decode):
            decode.dies_after = 3
            pending = f.submit(PROMPT, 8)
            await pending.until(3)
            decode.dies_after = None
            assert (await pending.answer()).tokens == answer_to(PROMPT, 8)
            assert [len(body["prompt"]) for body in prefill.bodies] == [len(PROMPT), len(PROMPT) + 3]
            assert decode.bodies[-1]["kv_transfer_params"]["do_remote_prefill"]

    run(test())


def test_a_prefill_server_that_gives_nothing_to_hand_over_is_at_fault() -> None:
    async def test() -> None:
        async with pair(transfers=False) as (f, _, decode):
            pending = f.submit(PROMPT, 4)
            await f.until_gone(PartId("vllm-0"))
            assert decode.bodies == []
            pending.cancel()

    run(test())
