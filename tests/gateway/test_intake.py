"""Large bodies: they delay no small ones, are dropped with their clients, and are bounded in number and bytes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Callable

import httpx
import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer

from moonpool.gateway import intake as intake_module
from moonpool.gateway.answers import conversation_ids
from moonpool.gateway.bodies import SMALL_BYTES, Bodies, Body
from moonpool.gateway.config import GatewayConfig
from moonpool.gateway.fields import read_object
from moonpool.gateway.outline import count_outside_strings, exceeds
from moonpool.gateway.problem import ApiError, ClientGoneError
from moonpool.gateway.schema import ChatMessage
from moonpool.gateway.tokenizer import MARGIN_TOKENS, Tokenizer, TooLongError
from moonpool.gateway.turns import Check, Turns
from tests.gateway.conftest import Open
from tests.gateway.kit import CONTEXT, END, HANG, Stage, run, until

LARGE = SMALL_BYTES + 1
BODIES = GatewayConfig(model_path="", served_model_name="")


def body(bodies: Bodies, size: int = LARGE) -> Body:
    made = Body(bodies)
    made.add(b"x" * size)
    return made


class Shut:
    """Work that waits for a door."""

    def __init__(self) -> None:
        self.door = threading.Event()
        self.begun = 0

    def __call__(self, data: bytes | bytearray, check: Check) -> int:
        self.begun += 1
        assert self.door.wait(HANG)
        check()
        return len(data)


@contextlib.asynccontextmanager
async def one_thread(most_waiting: int = 9) -> AsyncIterator[tuple[Turns, Shut, Bodies]]:
    made, work, bodies = Turns("requests", 1, most_waiting), Shut(), Bodies(BODIES)
    try:
        yield made, work, bodies
        made.check_integrity()
    finally:
        work.door.set()
        made.close()


# ---- turns on threads


def test_bodies_count_until_their_work_has_ended() -> None:
    async def test() -> None:
        async with one_thread() as (made, work, bodies):
            tasks = [asyncio.create_task(made.run(body(bodies), work)) for _ in range(3)]
            await until(lambda: work.begun)
            assert (made.waiting, bodies.held) == (2, 3 * LARGE)
            work.door.set()
            assert await asyncio.gather(*tasks) == [LARGE] * 3
            assert (made.waiting, bodies.held) == (0, 0)

    run(test())


def test_work_that_has_not_begun_is_dropped_with_its_client() -> None:
    async def test() -> None:
        async with one_thread() as (made, work, bodies):
            first, second, third = (asyncio.create_task(made.run(body(bodies), work)) for _ in range(3))
            await until(lambda: work.begun)
            second.cancel()
            first.cancel()
            await asyncio.wait((first, second))
            assert (made.waiting, bodies.held) == (1, 2 * LARGE), "the first has begun: its body is still in use"
            work.door.set()
            assert await third == LARGE
            assert (work.begun, bodies.held) == (2, 0)

    run(test())


def test_work_that_has_begun_can_see_that_its_client_is_gone() -> None:
    async def test() -> None:
        async with one_thread() as (made, work, bodies):
            seen: list[bool] = []

            def look(data: bytes | bytearray, check: Check) -> None:
                work(data, lambda: None)
                try:
                    check()
                except ClientGoneError:
                    seen.append(True)
                    raise

            task = asyncio.create_task(made.run(body(bodies), look))
            await until(lambda: work.begun)
            task.cancel()
            await asyncio.wait((task,))
            work.door.set()
            await until(lambda: seen and not bodies.held)

    run(test())


def test_more_than_may_wait_is_refused_and_the_body_stays_with_its_owner() -> None:
    async def test() -> None:
        async with one_thread(most_waiting=1) as (made, work, bodies):
            tasks = [asyncio.create_task(made.run(body(bodies), work)) for _ in range(2)]
            await until(lambda: work.begun and made.waiting)
            with body(bodies) as another, pytest.raises(ApiError, match="1 requests wait") as refused:
                await made.run(another, work)
            assert refused.value.status == 429
            assert int(refused.value.headers["retry-after"]) >= 1
            assert bodies.held == 2 * LARGE
            work.door.set()
            await asyncio.gather(*tasks)

    run(test())


def test_closing_leaves_nobody_waiting() -> None:
    async def test() -> None:
        async with one_thread() as (made, work, bodies):
            tasks = [asyncio.create_task(made.run(body(bodies), work)) for _ in range(2)]
            await until(lambda: work.begun)
            made.close()
            done, _ = await asyncio.wait(tasks, timeout=HANG)
            assert all(task.cancelled() for task in done)
            assert (len(done), work.begun) == (2, 1)

    run(test())


# ---- texts that are too long


class Counting(Tokenizer):
    """Counts the characters that it is asked to tokenize."""

    def __init__(self, like: Tokenizer) -> None:
        self.__dict__.update(like.__dict__)
        self.asked = 0

    def encode(self, text: str, *, special_tokens: bool) -> list[int]:
        self.asked += len(text)
        return super().encode(text, special_tokens=special_tokens)


def found(tokenizer: Tokenizer, text: str, most: int) -> list[int] | int:
    """The ids, or how many there are at least."""
    try:
        return tokenizer.encode_up_to(text, most, special_tokens=True)
    except TooLongError as e:
        return e.at_least


@pytest.mark.parametrize("text", ["a", "word ", "🎉", "\n\t", "12ab", "e\u0301", " ", "=" * 70 + "\n"])
def test_only_what_cannot_fit_is_not_tokenized_whole(tokenizer: Tokenizer, text: str) -> None:
    refused = 0
    for most in (1, 100, 900):
        for length in (1, 900, 4000, 12_000, 30_000):
            whole = text * (length // len(text) + 1)
            ids = tokenizer.encode(whole, special_tokens=True)
            answer = found(tokenizer, whole, most)
            if isinstance(answer, int):
                refused += 1
                assert most < answer <= len(ids)
            else:
                assert answer == ids
    assert refused or text == " ", "which makes one token with many others"


def test_a_text_that_cannot_fit_costs_no_more_than_the_limit(tokenizer: Tokenizer) -> None:
    counting = Counting(tokenizer)
    with pytest.raises(TooLongError, match="at least"):
        counting.encode_up_to("river stone " * 100_000, 100, special_tokens=True)
    assert counting.asked < 20 * (100 + MARGIN_TOKENS)


def test_tokens_that_take_the_spaces_before_them_make_no_text_too_long(tokenizer: Tokenizer) -> None:
    fast = FastTokenizer.from_str(tokenizer._fast.to_str())
    fast.add_tokens([AddedToken("<eat>", lstrip=True)])
    greedy = Tokenizer(fast, None, {}, fast.get_vocab_size())
    text = "x" + " \n" * 50_000 + "<eat>"
    assert len(greedy.encode_up_to(text, 10, special_tokens=False)) == 2


def test_a_conversation_is_measured_with_its_remembered_answers(tokenizer: Tokenizer) -> None:
    counting = Counting(tokenizer)
    texts = ("Hi", "Hello", "long " * 200_000)
    messages = tuple(ChatMessage("assistant" if i % 2 else "user", text) for i, text in enumerate(texts))
    with pytest.raises(TooLongError) as caught:
        conversation_ids(counting, messages, {1: (5,) * 700}, 1000)
    assert caught.value.at_least > 1000
    assert counting.asked < 20 * 1000
    with pytest.raises(TooLongError):
        conversation_ids(counting, messages, {1: (5,) * 1001}, 1000)


# ---- bodies of many values


@pytest.mark.parametrize("text", ["", "[", '"', "\\", "\\\\", '\\"[', '"[\\', "ö[\n{", '\\\\"[,', "\U0001f389"])
@pytest.mark.parametrize("ascii_only", [True, False])
def test_structure_is_counted_outside_strings(text: str, ascii_only: bool) -> None:
    value = {text: [text, {"a": text}, [], [text, text]], "b": text}
    data = json.dumps(value, ensure_ascii=ascii_only).encode()
    assert count_outside_strings(data, b"[{") == 5
    assert count_outside_strings(bytearray(data), b",") == 5
    assert exceeds(data, b"[{", 4)
    assert not exceeds(data, b"[{", 5)


def test_bodies_of_very_many_arrays_are_refused_unparsed() -> None:
    with pytest.raises(ApiError, match="more than 100000 arrays and objects"):
        read_object(b'{"prompt": [' + b"[]," * 100_000 + b"[]]}")
    text = "[{" * 100_000
    assert read_object(json.dumps({"prompt": text}).encode()) == {"prompt": text}


# ---- the whole gateway


class Door:
    """Holds whoever tokenizes a long text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._encode = tokenizer.encode
        self._open = threading.Event()
        self.asked = 0

    def encode(self, text: str, *, special_tokens: bool) -> list[int]:
        if len(text) > 1000:
            self.asked += 1
            assert self._open.wait(HANG)
        return self._encode(text, special_tokens=special_tokens)

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def door(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Door:
    made = Door(tokenizer)
    monkeypatch.setattr(tokenizer, "encode", made.encode)
    return made


Ask = Callable[[Stage], "asyncio.Task[httpx.Response]"]
TEXT = "x" * LARGE
ASKS: dict[str, Ask] = {
    "completion": lambda s: asyncio.create_task(s.complete(TEXT)),
    "chat": lambda s: asyncio.create_task(s.chat(TEXT)),
    "tokenize": lambda s: asyncio.create_task(s.post("/tokenize", {"prompt": TEXT})),
}


@pytest.mark.parametrize("ask", ASKS.values(), ids=ASKS.keys())
def test_small_requests_pass_large_ones_and_those_of_gone_clients_are_dropped(
    opened: Open, door: Door, ask: Ask
) -> None:
    async def test() -> None:
        async with opened(answer=lambda work: [END]) as s:
            try:
                tasks = [ask(s) for _ in range(4)]
                await until(lambda: door.asked and s.gateway.intake.waiting == 3)
                held = s.gateway.bodies.held
                assert held > 4 * LARGE
                assert (await s.complete()).status_code == 200
                assert (await s.post("/tokenize", {"prompt": "Hi"})).json()["count"] == 1
                assert (await s.post("/detokenize", {"tokens": [5]})).status_code == 200
                for task in tasks:
                    task.cancel()
                await until(lambda: s.gateway.intake.waiting == 0)
                await until(lambda: s.gateway.seats.taken == 0)
                assert s.gateway.bodies.held == held // 4, "one has begun"
            finally:
                door.open()
            await until(lambda: s.gateway.bodies.held == 0)
            assert door.asked == 1

    run(test())


def test_large_requests_leave_half_of_the_seats(opened: Open, door: Door) -> None:
    async def test() -> None:
        async with opened(answer=lambda work: [END], max_requests=5) as s:
            try:
                tasks = [ASKS["completion"](s) for _ in range(3)]
                await until(lambda: door.asked and s.gateway.intake.waiting == 2)
                refused = await s.complete(TEXT)
                assert refused.status_code == 429
                assert refused.headers["x-moonpool-reason"] == "queue-full"
                assert int(refused.headers["retry-after"]) >= 1
                assert (await s.complete()).status_code == 200
            finally:
                door.open()
            answers = await asyncio.gather(*tasks)
            assert [answer.status_code for answer in answers] == [400] * 3
            assert all("at least" in answer.json()["error"]["message"] for answer in answers)
            assert s.gateway.bodies.held == 0

    run(test())


def test_what_counts_tokens_counts_up_to_a_limit(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake_module, "MOST_COUNTED", CONTEXT + 1)

    async def test() -> None:
        async with opened() as s:
            most = CONTEXT + 1
            exact = await s.post("/tokenize", {"prompt": "a " * (most - 1) + "b", "return_token_strs": True})
            assert exact.json()["count"] == len(exact.json()["token_strs"]) <= most
            for size, words in ((most, "has"), (10 * most, "has at least")):
                error = (await s.post("/tokenize", {"prompt": " b c" * size})).json()["error"]
                assert (error["param"], error["message"].startswith(f"prompt {words}")) == ("prompt", True)
                assert str(most) in error["message"]
            assert (await s.post("/detokenize", {"tokens": [5] * most})).status_code == 200
            error = (await s.post("/detokenize", {"tokens": [5] * most + [-1]})).json()["error"]
            assert error["param"] == "tokens"
            assert f"{most + 1}" in error["message"]

    run(test())


def test_a_refusal_names_what_was_sent_and_what_is_a_default(opened: Open) -> None:
    async def test() -> None:
        async with opened() as s:
            almost = [5] * (CONTEXT - 1)
            cases = [
                (s.complete(almost), "prompt", ("max_tokens is 16 by default", f"{CONTEXT + 15} in all")),
                (s.complete(almost, max_tokens=3), "prompt", ("max_tokens is 3:",)),
                (s.chat(max_completion_tokens=CONTEXT), "messages", (f"max_completion_tokens is {CONTEXT}",)),
                (s.complete(min_tokens=20), "min_tokens", ("16 by default",)),
                (s.chat(min_tokens=9, max_completion_tokens=5), "min_tokens", ("max_completion_tokens (5)",)),
            ]
            for asked, param, words in cases:
                error = (await asked).json()["error"]
                assert error["param"] == param
                assert all(word in error["message"] for word in words), error["message"]

    run(test())
