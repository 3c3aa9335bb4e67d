"""Workers that fail, clients that leave or do not read, limits: each request ends once and leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from moonpool.core.actions import Cancel, ExpectEnd, RegisterAgain, ReleaseRoom
from moonpool.core.events import PlacedBefore, RequestArrived, RequestCancelled
from moonpool.core.vocabulary import Incarnation, RejectReason
from moonpool.gateway import cluster as cluster_module
from moonpool.gateway import completions as completions_module
from moonpool.gateway.bodies import LARGEST_AT_ONCE
from moonpool.gateway.tokenizer import Tokenizer
from moonpool.wire import membership as membership_module
from moonpool.wire.messages import PrefillOrder, Tokens
from tests.gateway.conftest import Open
from tests.gateway.kit import END, MODEL, POST_HEAD, SPACE, Stage, chat_body, connected, events, run, until

IDS = [*range(100, 140), END]


def text_of(response: httpx.Response) -> str:
    return "".join(c["choices"][0]["text"] for c in events(response.text) if c["choices"])


def test_a_resubmitted_stream_neither_repeats_nor_skips(opened: Open, tokenizer: Tokenizer) -> None:
    async def test() -> None:
        async with opened() as s:
            asked = asyncio.create_task(s.complete([7] * 130, max_tokens=100, stream=True, seed=5))
            first = await s.arrival()
            s.place(first)
            old = await s.order()
            s.say(old, IDS[:10])
            await until(lambda: s.gateway.cluster.totals["tokens"] == 10)
            s.resubmit(first)
            s.resubmit(first)
            second = await s.arrival(2)
            assert (second.attempt, second.prompt_tokens, second.output_tokens) == (2, 140, 10)
            assert second.max_output_tokens == 90
            assert second.request == first.request
            assert second.chains[0].keys == first.chains[0].keys
            s.place(first)
            s.place(second)
            new = await s.order(2)
            assert list(new.tokens) == [7] * 130 + IDS[:10]
            assert new.prompt_tokens == 130
            assert new.sampling == old.sampling
            s.say(old, IDS[10:14], start=10)
            s.decode.post(s.front, Tokens(tuple(s.token(new, n, 999) for n in range(10))))
            await until(lambda: s.gateway.cluster.totals["tokens_dropped"] == 14)
            s.say(new, IDS[10:])
            assert text_of(await asked) == tokenizer.decode(IDS)
            assert len(s.got("conductor", RequestArrived)) == 2
            assert s.got("conductor", RequestCancelled) == []

    run(test())


def test_the_first_token_may_be_overtaken(opened: Open, tokenizer: Tokenizer) -> None:
    """It comes from the prefill worker, over another connection than the rest."""

    async def test() -> None:
        async with opened() as s:
            s.places = True
            asked = asyncio.create_task(s.complete(max_tokens=100))
            work = await s.order()
            s.say(work, IDS[1:], start=1)
            await asyncio.sleep(0.05)
            assert not asked.done()
            s.say(work, IDS[:1])
            body = (await asked).json()
            assert body["choices"][0]["text"] == tokenizer.decode(IDS)

    run(test())


def test_a_gap_that_stays_ends_the_attempt(opened: Open, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_module, "GAP_SECONDS", 0.05)

    async def test() -> None:
        async with opened() as s:
            s.places = True
            asked = asyncio.create_task(s.complete(max_tokens=100))
            work = await s.order()
            s.say(work, IDS[:3])
            s.say(work, IDS[4:8], start=4)
            again = await s.order(2)
            assert again.attempt == 2
            assert list(again.tokens[again.prompt_tokens :]) == IDS[:3]
            await until(lambda: s.got("prefill-0", Cancel) and s.got("decode-0", Cancel))
            assert s.got("decode-0", Cancel)[0].attempt == 1
            s.say(again, IDS[3:])
            assert (await asked).json()["choices"][0]["text"] == tokenizer.decode(IDS)

    run(test())


def test_an_unreachable_prefill_worker_is_reported(opened: Open) -> None:
    async def test() -> None:
        async with opened() as s:
            asked = asyncio.create_task(s.complete(max_tokens=5))
            arrived = await s.arrival()
            with socket.socket() as nobody:
                nobody.bind(("127.0.0.1", 0))
                address = f"tcp://127.0.0.1:{nobody.getsockname()[1]}"
                there = s.prefill.me
                s.prefill.me = replace(there, incarnation=Incarnation("gone"), address=address)
                s.place(arrived)
                failed = await s.failure()
                s.prefill.me = there
            assert (failed.request, failed.attempt, failed.instance) == (arrived.request, 1, "prefill-0")
            s.resubmit(arrived)
            s.place(await s.arrival(2))
            s.say(await s.order(), [50] * 5)
            assert (await asked).status_code == 200

    run(test())


def test_an_unreachable_prefill_worker_is_given_up_where_no_conductor_hears_of_it(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_module, "GAP_SECONDS", 0.1)
    # Nor is it missed: it is in the fleet, and yet takes nothing.
    monkeypatch.setattr(membership_module, "ABSENCE_SECONDS", 1000.0)

    async def test() -> None:
        async with opened() as s:
            asked = asyncio.create_task(s.complete(max_tokens=5))
            arrived = await s.arrival()
            with socket.socket() as nobody:
                nobody.bind(("127.0.0.1", 0))
                there = s.prefill.me
                s.prefill.me = replace(there, address=f"tcp://127.0.0.1:{nobody.getsockname()[1]}")
                s.place(arrived)
                await s.failure()
                s.prefill.me = there
            again = await s.arrival(2)
            assert again.attempt == 2
            s.place(again)
            s.say(await s.order(), [50] * 5)
            assert (await asked).status_code == 200

    run(test())


def test_late_orders_for_an_ended_request_are_answered(opened: Open) -> None:
    async def test() -> None:
        async with opened(answer=lambda work: [END]) as s:
            await s.complete()
            arrived = await s.arrival()
            s.place(arrived)
            s.resubmit(arrived)
            s.reject(arrived, RejectReason.KV_ROOM)
            await until(lambda: len(s.got("conductor", RequestCancelled)) == 2)
            assert {c.request for c in s.got("conductor", RequestCancelled)} == {arrived.request}

    run(test())


def test_a_rejection_after_the_start_is_an_event(opened: Open) -> None:
    async def test() -> None:
        async with opened() as s:
            asked = asyncio.create_task(s.complete(max_tokens=100, stream=True))
            arrived = await s.arrival()
            s.place(arrived)
            s.say(await s.order(), IDS[:3])
            await until(lambda: s.gateway.cluster.totals["tokens"] == 3)
            await asyncio.sleep(0.02)
            s.resubmit(arrived)
            s.reject(await s.arrival(2), RejectReason.ATTEMPTS)
            documents = events((await asked).text)
            assert documents[0]["choices"][0]["text"]
            assert documents[-1]["error"]["code"] == "attempts"
            assert documents[-1]["error"]["type"] == "server_error"

    run(test())


def test_one_rejected_choice_ends_the_others(opened: Open) -> None:
    async def test() -> None:
        async with opened() as s:
            asked = asyncio.create_task(s.complete(["a", "b", "c"], max_tokens=100))
            s.place(await s.arrival(1))
            s.reject(await s.arrival(2), RejectReason.KV_ROOM)
            response = await asked
            assert response.status_code == 429
            others = {(await s.arrival(n)).request for n in (1, 3)}
            await until(lambda: {c.request for c in s.got("conductor", RequestCancelled)} == others)

    run(test())


# ---- clients that leave


class Caller:
    """A bare connection that sends a request and can vanish."""

    def __init__(self, s: Stage, body: dict[str, object], *, buffer: int | None = None) -> None:
        self.socket = socket.socket()
        if buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        host, port = s.url.removeprefix("http://").split(":")
        self.socket.settimeout(20)
        self.socket.connect((host, int(port)))
        data = json.dumps(body).encode()
        self.socket.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\ncontent-type: application/json\r\n"
            + f"content-length: {len(data)}\r\n\r\n".encode()
            + data
        )

    def close(self) -> None:
        self.socket.close()


@contextlib.contextmanager
def caller(s: Stage, **fields: Any) -> Iterator[Caller]:
    c = Caller(s, chat_body(max_tokens=1000, **fields))
    try:
        yield c
    finally:
        c.close()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stage_reached", ["waiting", "held", "placed", "decoding"])
def test_a_client_that_leaves_cancels_everywhere(opened: Open, stream: bool, stage_reached: str) -> None:
    async def test() -> None:
        async with opened() as s:
            with caller(s, stream=stream):
                arrived = await s.arrival()
                if stage_reached != "waiting":
                    s.place(arrived)
                    work = await s.order()
                    if stage_reached == "decoding":
                        s.say(work, IDS[:5])
                        await until(lambda: s.gateway.cluster.totals["tokens"] == 5)
            if stage_reached in ("waiting", "held") and not s.got("prefill-0", object):
                await until(lambda: s.got("conductor", RequestCancelled))
            else:
                await s.cancelled_everywhere()
                assert s.got("decode-0", Cancel)[0].attempt == 1
            assert [c.request for c in s.got("conductor", RequestCancelled)] == [arrived.request]
            await until(lambda: s.gateway.seats.taken == 0)

    run(test())


def test_a_client_that_leaves_while_its_prompt_is_read(opened: Open) -> None:
    async def test() -> None:
        async with opened() as s:
            with caller(s):
                host, port = s.url.removeprefix("http://").split(":")
                half = socket.create_connection((host, int(port)))
                half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\ncontent-type: application/json\r\n")
                half.sendall(b"content-length: 500000\r\n\r\n" + b" " * 100_000)
                await until(lambda: s.gateway.bodies.held == 100_000)
                await until(lambda: s.gateway.seats.taken == 1)
                half.close()
                await until(lambda: s.gateway.bodies.held == 0)
            await until(lambda: s.gateway.seats.taken == 0)

    run(test())


def test_a_client_that_leaves_during_tokenizing_is_not_left_with_the_conductor(opened: Open) -> None:
    async def test() -> None:
        async with opened() as s:
            with caller(s, stop="x", user="y" * 100, metadata={"long": "a b " * 500_000}):
                await until(lambda: s.gateway.seats.taken == 1)
            await until(lambda: s.gateway.seats.taken == 0)
            with contextlib.closing(Caller(s, chat_body(max_tokens=5))):
                # Messages keep their order: once this request has arrived, what the first led to has too.
                await until(lambda: [a for a in s.got("conductor", RequestArrived) if a.max_output_tokens == 5])
                gone = {c.request for c in s.got("conductor", RequestCancelled)}
                left = [a for a in s.got("conductor", RequestArrived) if a.request not in gone]
                assert [a.max_output_tokens for a in left] == [5]

    run(test())


# ---- readers that do not read


@pytest.mark.parametrize(("buffer", "drain", "at_least"), [(10, 30.0, 3.9), (100_000, 0.6, 4.5)])
def test_a_reader_that_does_not_read_is_cut_off(
    opened: Open, monkeypatch: pytest.MonkeyPatch, buffer: int, drain: float, at_least: float
) -> None:
    """With a full buffer at the deadline at once, else after a moment more."""
    monkeypatch.setattr(completions_module, "DRAIN_SECONDS", drain)

    async def test() -> None:
        async with opened(request_timeout=4.0, stream_buffer=buffer, default_max_tokens=10**6) as s:
            s.places = True
            body = chat_body(max_tokens=1900, stream=True, logprobs=True, top_logprobs=20)
            began = time.monotonic()
            slow = await asyncio.to_thread(Caller, s, body, buffer=4096)
            try:
                work = await s.order()
                for start in range(0, 1850, 50):
                    ids = [30_000 + n for n in range(50)]
                    s.say(work, ids, start=start or None)
                    await asyncio.sleep(0)
                await s.cancelled_everywhere()
                await until(lambda: s.gateway.seats.taken == 0)
                seconds = time.monotonic() - began
                assert at_least <= seconds < 20
            finally:
                slow.close()

    run(test())


def test_a_slow_reader_still_gets_everything_before_the_deadline(opened: Open, tokenizer: Tokenizer) -> None:
    async def test() -> None:
        async with opened(stream_buffer=10) as s:
            s.places = True
            body = chat_body(max_tokens=1500, stream=True)
            ids = [*(1000 + n for n in range(1400)), END]
            s.answer = lambda work: ids
            async with s.client.stream("POST", s.url + "/v1/chat/completions", json=body) as response:
                await until(lambda: s.gateway.cluster.totals["tokens"] == len(ids))
                await response.aread()
            said = "".join(c["choices"][0]["delta"].get("content", "") for c in events(response.text))
            assert said == tokenizer.decode(ids)

    run(test())


# ---- limits


def test_more_than_the_bound_gets_429_at_once(opened: Open) -> None:
    async def test() -> None:
        async with opened(max_requests=3) as s:
            asked = [asyncio.create_task(s.complete(max_tokens=5)) for _ in range(3)]
            await s.arrival(3)
            began = time.monotonic()
            response = await s.complete(max_tokens=5)
            assert time.monotonic() - began < 5.0
            assert response.status_code == 429
            assert response.headers["x-moonpool-reason"] == "queue-full"
            assert int(response.headers["retry-after"]) >= 1
            assert "3" in response.json()["error"]["message"]
            for n in (1, 2, 3):
                s.place(await s.arrival(n))
                s.say(await s.order(n), [50] * 5)
            assert [r.status_code for r in await asyncio.gather(*asked)] == [200] * 3
            response = await s.complete(["a", "b", "c", "d"], max_tokens=5)
            assert response.status_code == 429
            assert len(s.got("conductor", RequestArrived)) == 3
            assert (await s.client.get(s.url + "/health")).status_code == 200

    run(test())


def test_clients_that_send_no_body_keep_nobody_out(opened: Open) -> None:
    async def test() -> None:
        async with (
            opened(max_requests=2, answer=lambda work: [END], body_timeout=0.2) as s,
            contextlib.AsyncExitStack() as idle,
        ):
            for _ in range(3):
                talk = await idle.enter_async_context(connected(s))
                await talk.send(POST_HEAD + b"content-length: 100\r\n\r\n")
            assert (await s.complete()).status_code == 200
            assert s.gateway.seats.taken == 0

    run(test())


def test_a_full_gateway_refuses_before_the_body_has_come(opened: Open) -> None:
    async def test() -> None:
        async with opened(max_requests=1) as s:
            with caller(s):
                await s.arrival()
                async with connected(s) as talk:
                    await talk.send(POST_HEAD + b"content-length: 100\r\n\r\n")
                    assert b" 429 " in (await talk.answer()).split(b"\r\n")[0]

    run(test())


def test_large_bodies_are_bounded_together(opened: Open) -> None:
    large = 100_000

    async def test() -> None:
        async with (
            opened(max_body_bytes=large, answer=lambda work: [END]) as s,
            contextlib.AsyncExitStack() as open_ones,
        ):
            for _ in range(LARGEST_AT_ONCE):
                talk = await open_ones.enter_async_context(connected(s))
                await talk.send(POST_HEAD + b"content-length: 100000\r\n\r\n" + b" " * (large - 1))
            await until(lambda: s.gateway.bodies.held == LARGEST_AT_ONCE * (large - 1))
            talk = await open_ones.enter_async_context(connected(s))
            await talk.send(POST_HEAD + b"content-length: 100000\r\n\r\n" + b" " * (large - 1))
            answer = await talk.answer()
            assert b" 429 " in answer.split(b"\r\n")[0]
            assert b"retry-after: 1\r\n" in answer
            assert (await s.complete()).status_code == 200, "small bodies are always read"
            await open_ones.aclose()
            await until(lambda: s.gateway.bodies.held == 0)

    run(test())


@pytest.mark.parametrize("placed", [False, True])
def test_past_the_deadline_504(opened: Open, placed: bool) -> None:
    async def test() -> None:
        async with opened(request_timeout=0.3) as s:
            s.places = placed
            response = await s.complete()
            assert response.status_code == 504
            assert response.headers["x-moonpool-reason"] == "deadline"
            assert "0.3 s" in response.json()["error"]["message"]
            await until(lambda: s.got("conductor", RequestCancelled))
            if placed:
                await s.cancelled_everywhere()

    run(test())


def test_past_the_deadline_a_started_stream_ends_with_an_error(opened: Open) -> None:
    async def test() -> None:
        async with opened(request_timeout=0.5) as s:
            s.places = True
            asked = asyncio.create_task(s.complete(max_tokens=100, stream=True))
            s.say(await s.order(), IDS[:4])
            documents = events((await asked).text)
            assert documents[0]["choices"][0]["text"]
            assert documents[-1]["error"]["code"] == "deadline"
            await s.cancelled_everywhere()

    run(test())


# ---- the cluster around it


def test_a_new_conductor_learns_of_the_waiting_requests(opened: Open) -> None:
    async def test() -> None:
        async with opened() as s:
            asked = asyncio.create_task(s.complete(max_tokens=5))
            first = await s.arrival()
            await s.restart_conductor()
            s.announce()
            second = await s.arrival(2)
            assert (second.request, second.attempt) == (first.request, 2)
            await until(lambda: s.got("prefill-0", ReleaseRoom))
            (release,) = s.got("prefill-0", ReleaseRoom)
            assert (release.request, release.attempt) == (first.request, 1), "what the old one may have reserved"
            s.place(first)
            s.place(second)
            s.say(await s.order(), [50] * 5)
            assert (await asked).status_code == 200
            assert [order.work.attempt for order in s.got("prefill-0", PrefillOrder)] == [2]

    run(test())


@pytest.mark.parametrize("tokens", [0, 1, 3])
def test_a_new_conductor_learns_of_what_is_placed_when_it_knows_the_workers(opened: Open, tokens: int) -> None:
    async def test() -> None:
        async with opened() as s:
            s.places = True
            asked = asyncio.create_task(s.complete([7] * 130, max_tokens=20))
            work = await s.order()
            s.say(work, IDS[:tokens])
            await until(lambda: s.gateway.cluster.totals["tokens"] == tokens)
            await s.restart_conductor()
            needed = [s.decode] if tokens > 1 else [s.prefill, s.decode]
            s.announce(parts=needed[:-1])
            await until(lambda: len(s.gateway.cluster.fleet.latest.parts) == len(needed))
            await asyncio.sleep(0.05)
            assert s.got("conductor", PlacedBefore) == []
            s.announce(parts=needed)
            await until(lambda: s.got("conductor", PlacedBefore))
            s.announce()
            s.say(work, IDS[tokens:20], start=tokens)
            assert (await asked).status_code == 200
            (told,) = s.got("conductor", PlacedBefore)
            assert (told.place, told.tokens) == (work.place, tokens)
            assert (told.arrived.prompt_tokens, told.arrived.max_output_tokens) == (130 + tokens, 20 - tokens)
            assert told.arrived.attempt == 1
            assert len(s.got("prefill-0", PrefillOrder)) == 1

    run(test())


def test_a_worker_that_died_without_a_conductor_is_missed(
    opened: Open, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership_module, "ABSENCE_SECONDS", 0.1)
    monkeypatch.setattr(cluster_module, "WATCH_SECONDS", 0.05)

    async def test() -> None:
        async with opened() as s:
            s.places = True
            asked = asyncio.create_task(s.complete(max_tokens=100))
            s.say(await s.order(), IDS[:5])
            await until(lambda: s.gateway.cluster.totals["tokens"] == 5)
            s.announce(parts=[s.decode])
            await asyncio.sleep(0.3)
            assert len(s.got("prefill-0", PrefillOrder)) == 1, "it is decode's alone by now"
            await s.restart_conductor()
            s.announce(parts=[s.prefill])
            again = await s.order(2)
            assert (again.attempt, list(again.tokens[again.prompt_tokens :])) == (2, IDS[:5])
            s.announce()
            s.say(again, IDS[5:])
            assert (await asked).json()["choices"][0]["text"] == tokenizer.decode(IDS)

    run(test())


def test_a_last_token_that_does_not_come_ends_the_attempt(
    opened: Open, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_module, "GAP_SECONDS", 0.1)

    async def test() -> None:
        async with opened() as s:
            s.places = True
            asked = asyncio.create_task(s.complete(max_tokens=100))
            work = await s.order()
            s.say(work, IDS[:-1])
            await until(lambda: s.gateway.cluster.totals["tokens"] == len(IDS) - 1)
            s.conductor.post(s.front, ExpectEnd(work.request, 9, s.front))
            s.conductor.post(s.front, ExpectEnd(work.request, 1, s.front))
            again = await s.order(2)
            assert (again.attempt, list(again.tokens[again.prompt_tokens :])) == (2, IDS[:-1])
            s.say(again, IDS[-1:])
            s.conductor.post(s.front, ExpectEnd(work.request, 2, s.front))
            assert (await asked).json()["choices"][0]["text"] == tokenizer.decode(IDS)
            await asyncio.sleep(0.3)
            assert len(s.got("conductor", RequestArrived)) == 2

    run(test())


def test_a_gateway_that_was_taken_for_dead_begins_anew(opened: Open, tokenizer: Tokenizer) -> None:
    async def test() -> None:
        async with opened() as s:
            placed = asyncio.create_task(s.complete(max_tokens=100))
            s.place(await s.arrival())
            s.say(await s.order(), IDS[:5])
            waiting = asyncio.create_task(s.complete(max_tokens=5))
            await s.arrival(2)
            await until(lambda: s.gateway.cluster.totals["tokens"] == 5)
            for _ in range(2):
                s.conductor.post(s.front, RegisterAgain(s.front))
            again = [await s.arrival(3), await s.arrival(4)]
            assert [(a.attempt, a.output_tokens) for a in again] == [(2, 5), (2, 0)]
            for arrived in again:
                s.place(arrived)
            s.say(await s.order(2), IDS[5:])
            s.say(await s.order(3), [50] * 5)
            assert (await placed).json()["choices"][0]["text"] == tokenizer.decode(IDS)
            assert (await waiting).status_code == 200

    run(test())


def test_the_fleet_may_lose_everything(opened: Open) -> None:
    async def test() -> None:
        async with opened() as s:
            ready = s.url + "/ready"
            assert (await s.client.get(ready)).status_code == 200
            asked = asyncio.create_task(s.complete([7] * 70, max_tokens=5))
            arrived = await s.arrival()
            s.place(arrived)
            s.say(await s.order(), [50])
            s.announce(parts=(), spaces=())
            await until(lambda: s.gateway.cluster.fleet.lacks)
            response = await s.client.get(ready)
            assert response.status_code == 503
            assert "prefill" in response.json()["reason"]
            s.resubmit(arrived)
            again = await s.arrival(2)
            assert again.chains[0].space == SPACE.id
            s.announce()
            s.place(again)
            s.say(await s.order(2), [51] * 4)
            assert (await asked).status_code == 200

    run(test())


def test_before_there_is_a_fleet_503(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    announce = Stage.announce
    monkeypatch.setattr(Stage, "announce", lambda self: announce(self, spaces=()))
    monkeypatch.setattr(Stage, "will_be_ready", False)

    async def test() -> None:
        async with opened() as s:
            response = await s.complete()
            assert response.status_code == 503
            assert response.headers["x-moonpool-reason"] == "no-instance"

    run(test())


def test_unexpected_messages_change_nothing(opened: Open) -> None:
    async def test() -> None:
        async with opened() as s:
            s.places = True
            asked = asyncio.create_task(s.complete(max_tokens=5))
            work = await s.order()
            arrived = await s.arrival()
            s.reject(replace(arrived, attempt=9), RejectReason.CONTEXT)
            s.decode.post(s.front, Cancel(work.request, 1, s.front))
            s.decode.post(s.front, Tokens(()))
            s.conductor.post(s.front, work.place)
            s.say(work, [50] * 5)
            assert (await asked).status_code == 200
            assert len(s.got("prefill-0", object)) == 1

    run(test())


def test_many_at_once_with_random_ends_leave_nothing(opened: Open) -> None:
    async def one(s: Stage, n: int) -> None:
        body = {"model": MODEL, "prompt": [n + 5] * (n % 70 + 1), "max_tokens": n % 9 + 1, "stream": n % 2 == 0}
        with contextlib.suppress(httpx.TimeoutException):
            await s.client.post(s.url + "/v1/completions", json=body, timeout=0.05 if n % 3 == 0 else 20)

    async def test() -> None:
        async with opened(answer=lambda work: [40] * 20) as s:
            await asyncio.gather(*(one(s, n) for n in range(100)))
            await until(lambda: s.gateway.seats.taken == 0)
            s.gateway.check_integrity()

    run(test())
