"""Every mistake gets an OpenAI-shaped error that names the field, and the gateway goes on."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from moonpool.core.events import RequestArrived
from moonpool.core.vocabulary import PriorityClass
from tests.gateway.conftest import Open
from tests.gateway.kit import CONTEXT, END, MODEL, POST_HEAD, chat_body, connected, run, until

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"

USER = {"role": "user", "content": "Hi"}

CHAT_MISTAKES: list[tuple[dict[str, object], str]] = [
    ({"n": 2}, "n"),
    ({"n": True}, "n"),
    ({"best_of": 3}, "best_of"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"functions": [{}]}, "functions"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"logit_bias": {"5": 1}}, "logit_bias"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"prediction": {}}, "prediction"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"chat_template": "{{ x }}"}, "chat_template"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"prompt_logprobs": 1}, "prompt_logprobs"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.01}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 1.5}, "min_p"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": -2.5}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": 1e-40}, "repetition_penalty"),
    ({"repetition_penalty": 0.0099}, "repetition_penalty"),
    ({"repetition_penalty": 100.1}, "repetition_penalty"),
    ({"seed": "x"}, "seed"),
    ({"seed": 1 << 63}, "seed"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"stop": {"a": 1}}, "stop"),
    ({"stop_token_ids": [49152]}, "stop_token_ids"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 1.0}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
    ({"min_tokens": 9, "max_tokens": 5}, "min_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 2047}, "min_tokens"),
    ({"logprobs": 3}, "logprobs"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"stream": True, "stream_options": {"nonsense": 1}}, "stream_options.nonsense"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"priority": 1.5}, "priority"),
    ({"priority": "a\nb"}, "priority"),
    ({"cache_salt": 5}, "cache_salt"),
    ({"cache_salt": "x" * 257}, "cache_salt"),
    ({"temprature": 1}, "temprature"),
    ({"model": 5}, "model"),
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": ["Hi"]}, "messages[0]"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"content": "Hi"}]}, "messages[0].role"),
    ({"messages": [USER, {"role": "tool", "content": "x"}]}, "messages[1].role"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": "user", "content": "x", "colour": 1}]}, "messages[0].colour"),
]

TEXT_MISTAKES: list[tuple[dict[str, object], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["a", ""]}, "prompt[1]"),
    ({"prompt": 7}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [49152]}, "prompt"),
    ({"prompt": [1, True]}, "prompt"),
    ({"prompt": [1, 2.0]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [[1], [99999999]]}, "prompt[1]"),
    ({"prompt": ["a", 5]}, "prompt[1]"),
    ({"prompt": ["a"] * 129}, "prompt"),
    ({"echo": True}, "echo"),
    ({"suffix": "x"}, "suffix"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"messages": []}, "messages"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": CONTEXT}, "prompt"),
    ({"prompt": [5] * CONTEXT}, "prompt"),
]


def check(response: httpx.Response, status: int, param: str | None) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert error["message"]
    assert "Traceback" not in response.text
    return error


def test_mistakes_in_fields(opened: Open) -> None:
    async def test() -> None:
        async with opened() as s:
            for fields, param in CHAT_MISTAKES:
                check(await s.post(CHAT, chat_body() | fields), 400, param)
            for fields, param in TEXT_MISTAKES:
                check(await s.post(TEXT, {"model": MODEL, "prompt": "Hi"} | fields), 400, param)
            assert s.got("conductor", RequestArrived) == []

    run(test())


def test_messages_name_limits_and_the_way_out(opened: Open) -> None:
    async def test() -> None:
        async with opened() as s:
            error = check(await s.chat(temprature=1), 400, "temprature")
            assert "did you mean temperature?" in error["message"]
            error = check(await s.complete([7] * 1000, max_tokens=1500), 400, "prompt")
            assert all(number in error["message"] for number in ("1000", "1500", "2500", str(CONTEXT)))
            assert error["code"] == "context_length_exceeded"
            error = check(await s.complete([7] * 3000), 400, "prompt")
            assert "3000" in error["message"]
            assert str(CONTEXT) in error["message"]
            error = check(await s.chat(model="gpt-9"), 404, "model")
            assert error["code"] == "model_not_found"
            assert "gpt-9" in error["message"]

    run(test())


def test_what_is_harmless_or_neutral_passes(opened: Open) -> None:
    harmless: dict[str, Any] = {
        "user": "me",
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "flex",
        "safety_identifier": "x",
        "prompt_cache_key": "y",
    }
    neutral: dict[str, Any] = {
        "n": 1,
        "best_of": 1,
        "tools": [],
        "tool_choice": "none",
        "logit_bias": {},
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "audio": None,
        "stop": None,
        "temperature": None,
        "max_tokens": None,
        "seed": None,
        "logprobs": False,
        "top_logprobs": None,
        "functions": None,
        "parallel_tool_calls": False,
        "top_k": -1,
        "length_penalty": 1.0,
    }

    async def test() -> None:
        async with opened(answer=lambda work: [END]) as s:
            for name, value in (harmless | neutral).items():
                response = await s.chat(**{name: value})
                assert response.status_code == 200, (name, response.text)
            parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
            for role in ("system", "developer", "user", "assistant"):
                message = {"role": role, "content": parts, "name": "x", "refusal": None}
                response = await s.post(CHAT, {"messages": [message]})
                assert response.status_code == 200, response.text

    run(test())


RAW: list[tuple[bytes, str | None]] = [
    (b"", None),
    (b"{", None),
    (b"nonsense", None),
    (b"[]", None),
    (b'"text"', None),
    (b"null", None),
    (b'{"temperature": NaN}', "temperature"),
    (b'{"temperature": Infinity}', "temperature"),
    (b'{"logit_bias": {"5": -Infinity}}', "logit_bias.5"),
    (b'{"model": "smollm2",}', None),
    (b'{"temperature": 1e999}', "temperature"),
    (b'{"seed": ' + b"9" * 400 + b"}", "seed"),
    (b'{"seed": ' + b"9" * 5000 + b"}", "seed"),
    (b'{"messages": [{"role": "user", "content": "a\\ud800b"}]}', "messages[0].content"),
    (b'{"prompt": "\\udc00"}', "prompt"),
    (b'{"a\\ud800": 1}', "a?"),
    (b'{"user": "\xff\xfe"}', None),
    (b"[" * 50_000, None),
    (b"[" * 200_000, None),
    (b'{"user": ' + b"1," * 200_000 + b"}", None),
    (b'{"seed": Infinity, "user": "' + b"," * 200_000 + b'"}', "seed"),
    (b'{"a":' * 50_000 + b"1" + b"}" * 50_000, None),
    (b'{"messages": ' + b"[" * 900 + b"]" * 900 + b"}", "messages[0]"),
]


def test_bodies_that_are_no_proper_json(opened: Open) -> None:
    async def test() -> None:
        async with opened(answer=lambda work: [END]) as s:
            headers = {"content-type": "application/json; charset=utf-8"}
            for body, param in RAW:
                response = await s.client.post(s.url + CHAT, content=body, headers=headers)
                check(response, 400, param)
            body = b'{"model": "x", "model": "smollm2", "messages": [{"role": "user", "content": "\\ud83d\\ude00"}]}'
            response = await s.client.post(s.url + CHAT, content=body, headers=headers)
            assert response.status_code == 200, "duplicate keys: the last counts; surrogate pairs are text"

    run(test())


def test_content_type_host_path_and_method(opened: Open) -> None:
    async def test() -> None:
        async with opened(answer=lambda work: [END], allowed_hosts=("pool.example",)) as s:
            body = json.dumps(chat_body())
            for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
                response = await s.client.post(s.url + CHAT, content=body, headers={"content-type": kind})
                check(response, 415, "content-type")
            for host in (
                "evil.example",
                "evil.example:8000",
                "localhost.evil.example",
                "127.0.0.1.evil",
                "10.0.0.1",
                "",
            ):
                check(await s.post(CHAT, chat_body(), host=host), 400, "host")
            for host in ("localhost", "localhost:1", "127.0.0.9:80", "[::1]:8000", "pool.example", "Pool.Example:8000"):
                assert (await s.post(CHAT, chat_body(), host=host)).status_code == 200
            response = await s.client.get(s.url + "/cluster", headers={"host": "evil.example"})
            check(response, 400, "host")
            check(await s.client.get(s.url + "/nothing"), 404, None)
            check(await s.client.post(s.url + "/v1/chat/completions/", json={}), 404, None)
            response = await s.client.get(s.url + CHAT)
            check(response, 405, None)
            assert response.headers["allow"] == "POST"
            check(await s.client.post(s.url + "/health", json={}), 405, None)

    run(test())


def test_two_host_headers_are_refused(opened: Open) -> None:
    async def test() -> None:
        async with opened() as s:
            for start in (b"GET /health HTTP/1.1\r\nHost: localhost\r\n", POST_HEAD + b"Content-Length: 0\r\n"):
                async with connected(s) as talk:
                    await talk.send(start + b"Host: evil.example\r\n\r\n")
                    head, _, body = (await talk.answer()).partition(b"\r\n\r\n")
                    assert b" 400 " in head.split(b"\r\n")[0]
                    assert json.loads(body)["error"]["param"] == "host"

    run(test())


def test_request_ids_cannot_inject_headers(opened: Open) -> None:
    async def raw(port: int, value: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(
            b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nX-Request-Id: " + value + b"\r\n\r\n"
        )
        answer = await reader.read()
        writer.close()
        await writer.wait_closed()
        return answer

    async def test() -> None:
        async with opened() as s:
            port = int(s.url.rsplit(":", 1)[1])
            for value in (
                b"a b",
                b"a\tb",
                b"\xc3\xa9",
                b"x" * 129,
                b"",
                b"a\x7f",
                b"a\x0bb",
                b"a\rX-Evil: 1",
                b"a\x00b",
            ):
                answer = await raw(port, value)
                assert answer.startswith(b"HTTP/1.1 400"), (value, answer)
                assert b"evil" not in answer.lower()
            answer = await raw(port, b"a\nX-Evil: 1")
            assert b"evil" not in answer.lower()
            answer = await raw(port, b"good-id_1!")
            assert answer.startswith(b"HTTP/1.1 200")
            assert b"x-request-id: good-id_1!\r\n" in answer
            drawn = (await s.client.get(s.url + "/health")).headers["x-request-id"]
            assert drawn.startswith("req-")
            response = await s.chat(temperature=9)
            assert response.headers["x-request-id"].startswith("req-")
            error = check(await s.post(CHAT, chat_body(), x_request_id="a b"), 400, "x-request-id")
            assert "128" in error["message"]

    run(test())


def test_a_priority_class_that_is_not_there_is_named(opened: Open) -> None:
    async def test() -> None:
        async with opened(classes=(PriorityClass("high"),)) as s:
            error = check(await s.chat(priority="hihg"), 400, "priority")
            assert "'hihg'; name one of high, batch" in error["message"]

    run(test())


@pytest.mark.parametrize("name", ["x_slo_ttft_ms", "x_slo_tpot_ms"])
def test_slo_headers(opened: Open, name: str) -> None:
    async def test() -> None:
        async with opened() as s:
            for value in ("0", "-5", "abc", "nan", "inf", "1_000", "1e3", "", "99999999999"):
                check(await s.post(CHAT, chat_body(), **{name: value}), 400, name.replace("_", "-"))

    run(test())


def test_a_body_too_large_is_refused_while_it_is_read(opened: Open) -> None:
    async def stream() -> Any:
        for _ in range(64):
            yield b" " * (64 << 10)

    async def test() -> None:
        async with opened(max_body_bytes=1 << 20) as s:
            error = check(await s.chat("x" * (1 << 20)), 413, None)
            assert str(1 << 20) in error["message"]
            headers = {"content-type": "application/json"}
            check(await s.client.post(s.url + CHAT, content=stream(), headers=headers), 413, None)

    run(test())


def test_a_body_that_does_not_come_frees_its_seat(opened: Open) -> None:
    async def test() -> None:
        async with opened(body_timeout=0.2) as s:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(s.url.rsplit(":", 1)[1]))
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\ncontent-type: application/json\r\n"
                b"content-length: 100\r\n\r\n{"
            )
            answer = await reader.readuntil(b"}}")
            assert b" 408 " in answer.split(b"\r\n")[0]
            writer.close()
            await writer.wait_closed()
            await until(lambda: s.gateway.seats.taken == 0)

    run(test())


def test_a_megabyte_in_one_line_does_not_stop_the_others(opened: Open) -> None:
    async def test() -> None:
        async with opened(answer=lambda work: [END]) as s:
            await s.complete()
            loop = asyncio.get_running_loop()
            asked = asyncio.create_task(s.complete("a" * 1_000_000))
            worst, last = 0.0, loop.time()
            while not asked.done():
                await asyncio.sleep(0.001)
                worst, last = max(worst, loop.time() - last), loop.time()
            error = check(await asked, 400, "prompt")
            assert "at least" in error["message"]
            assert str(CONTEXT) in error["message"]
            assert worst < 0.4, f"the event loop stood still for {worst:.3f} s"

    run(test())
