"""What clients may do with a connection before it has a request, and with its head."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import socket

import pytest

from moonpool.core.events import RequestArrived
from moonpool.errors import ConfigError
from moonpool.gateway import connection as connection_module
from tests.gateway.conftest import Open
from tests.gateway.kit import END, POST_HEAD, connected, run, until

BODY = b'{"prompt": [5], "max_tokens": 3}'
LENGTH = b"content-length: %d\r\n" % len(BODY)
UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQBAAAAAAIAAAAA\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = b"transfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)


def status(answer: bytes) -> int:
    return int(answer.split(b" ")[1])


def check_error(answer: bytes, expected: int) -> None:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert status(answer) == expected
    assert b"content-type: application/json" in head
    assert b"connection: close" in head
    assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("piece", [1, 7, 100_000])
@pytest.mark.parametrize("rest", [LENGTH + b"\r\n" + BODY, CHUNKED], ids=["length", "chunked"])
def test_an_offer_to_upgrade_is_declined_and_the_request_served(opened: Open, rest: bytes, piece: int) -> None:
    """As Java's client and `curl --http2` make it; a second request follows on the same connection."""

    async def test() -> None:
        async with opened(answer=lambda work: [*work.tokens, END]) as s, connected(s) as talk:
            data = POST_HEAD + UPGRADE + rest + HEALTH + UPGRADE + b"\r\n"
            for at in range(0, len(data), piece):
                await talk.send(data[at : at + piece])
            assert status(answer := await talk.answer()) == 200, answer
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["usage"]["prompt_tokens"] == 1
            assert status(await talk.answer()) == 200

    run(test())


def test_what_is_no_request_gets_an_error_in_shape(opened: Open) -> None:
    async def test() -> None:
        async with opened() as s:
            for junk in (
                b"\x16\x03\x01\x02\x00\x01\r\n\r\n",
                b"CONNECT a.example:443 HTTP/1.1\r\nHost: a.example\r\n\r\n",
            ):
                async with connected(s) as talk:
                    await talk.send(junk)
                    check_error(await talk.answer(), 400)
                    assert await talk.closed()

    run(test())


def test_the_time_in_which_a_body_comes_counts_as_waiting(opened: Open) -> None:
    async def test() -> None:
        async with opened(answer=lambda work: [50, END]) as s, connected(s) as talk:
            body = b'{"prompt": [5], "max_tokens": 3}'
            await talk.send(POST_HEAD + b"content-length: %d\r\n\r\n" % len(body) + body[:9])
            await asyncio.sleep(0.2)
            await talk.send(body[9:])
            assert status(await talk.answer()) == 200
            (arrived,) = s.got("conductor", RequestArrived)
            assert arrived.waited >= 0.19

    run(test())


def test_junk_during_a_stream_puts_no_error_page_into_it(opened: Open) -> None:
    async def test() -> None:
        async with opened() as s, connected(s) as talk:
            s.places = True
            body = b'{"prompt": [5], "max_tokens": 3, "stream": true}'
            await talk.send(POST_HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
            s.say(await s.order(), [50])
            await talk.until(b'"choices"')
            await talk.send(b"\x00junk\r\n\r\n")
            assert b"HTTP/1.1" not in await talk.rest()

    run(test())


@pytest.mark.parametrize("before", [b"G", HEALTH, HEALTH + b"\r\n", POST_HEAD + UPGRADE])
def test_a_head_that_does_not_come_is_answered_and_ends_the_connection(
    opened: Open, monkeypatch: pytest.MonkeyPatch, before: bytes
) -> None:
    monkeypatch.setattr(connection_module, "HEAD_SECONDS", 0.2)

    async def test() -> None:
        async with opened() as s, connected(s) as talk:
            await talk.send(before)
            if before.count(b"\r\n\r\n"):
                assert status(await talk.answer()) == 200
                await talk.send(b"G")
            answer = await talk.answer()
            check_error(answer, 408)
            assert b"the request's head did not come within 0.2 s" in answer
            assert await talk.closed()

    run(test())


def test_a_head_that_comes_a_byte_at_a_time_has_no_longer(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "HEAD_SECONDS", 0.5)

    async def test() -> None:
        async with opened() as s, connected(s) as talk:

            async def trickle() -> None:
                with contextlib.suppress(ConnectionError):
                    while True:
                        await talk.send(b"x")
                        await asyncio.sleep(0.02)

            await talk.send(b"GET /health HTTP/1.1\r\na: ")
            trickling = asyncio.create_task(trickle())
            check_error(await talk.answer(), 408)
            trickling.cancel()
            await asyncio.wait([trickling])

    run(test())


@pytest.mark.parametrize("before", [b"", HEALTH + b"content-length: 9\r\n\r\n{"], ids=["nothing", "a body"])
def test_a_connection_on_which_no_head_has_begun_just_ends(
    opened: Open, monkeypatch: pytest.MonkeyPatch, before: bytes
) -> None:
    monkeypatch.setattr(connection_module, "HEAD_SECONDS", 0.2)

    async def test() -> None:
        async with opened() as s, connected(s) as talk:
            await talk.send(before)
            if before:
                assert status(await talk.answer()) == 200
                await talk.send(b"G")
            assert await talk.closed()

    run(test())


def test_a_request_may_take_longer_than_its_head(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "HEAD_SECONDS", 0.1)

    async def test() -> None:
        async with opened(request_timeout=0.5) as s:
            assert (await s.complete()).status_code == 504

    run(test())


@pytest.mark.parametrize(
    "start",
    [
        HEALTH + b"a: ",
        b"GET /",
        POST_HEAD + b"transfer-encoding: chunked\r\n\r\n0\r\na: ",
        POST_HEAD + UPGRADE + b"a: ",
    ],
    ids=["header", "url", "trailer", "upgrade"],
)
def test_a_head_that_is_too_large_is_refused(opened: Open, start: bytes) -> None:
    async def test() -> None:
        async with opened() as s, connected(s) as talk:
            await talk.send(start + b"x" * (connection_module.HEAD_BYTES + 1))
            check_error(await talk.answer(), 431)

    run(test())


def test_large_bodies_are_no_heads(opened: Open) -> None:
    async def test() -> None:
        async with opened(answer=lambda work: [END]) as s:
            assert (await s.complete("Hi", user="x" * (4 * connection_module.HEAD_BYTES))).status_code == 200

    run(test())


@pytest.mark.parametrize("reads", [True, False])
def test_who_takes_nothing_of_a_complete_answer_is_cut_off_and_who_is_slow_is_not(
    opened: Open, monkeypatch: pytest.MonkeyPatch, reads: bool
) -> None:
    monkeypatch.setattr(connection_module, "TAKE_SECONDS", 0.3)
    monkeypatch.setattr(connection_module, "TAKE_BYTES", 1)
    fields = {"prompt": [[5], [6], [7], [8]], "max_tokens": 1900, "logprobs": 5, "return_token_ids": True}
    body = json.dumps(fields).encode()
    close = b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body)

    async def test() -> None:
        async with opened(answer=lambda work: range(1000, 2900)) as s:
            loop, connections = asyncio.get_running_loop(), s.gateway._server.server_state.connections
            with socket.socket() as reader:
                reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                reader.setblocking(False)
                host, port = s.url.removeprefix("http://").split(":")
                await loop.sock_connect(reader, (host, int(port)))
                await loop.sock_sendall(reader, POST_HEAD + close + body)
                await until(lambda: s.gateway.cluster.totals["tokens"] == 4 * 1900)
                answer = b""
                while reads and (data := await loop.sock_recv(reader, 4096)):
                    answer += data
                    await asyncio.sleep(0.01)
                await until(lambda: not connections)
                if reads:
                    assert len(json.loads(answer.partition(b"\r\n\r\n")[2])["choices"]) == 4

    run(test())


@pytest.mark.parametrize(
    ("limits", "requests", "most", "raised"),
    [
        ((1024, 100_000), 512, 4096, 5120),
        ((1024, 100_000), 10_000, 20_000, 21_024),
        ((20_000, 20_000), 10_000, 18_976, None),
        ((1024, 1024), 512, 512, None),
        ((1024, resource.RLIM_INFINITY), 512, 4096, 5120),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), 3000, 6000, None),
    ],
)
def test_open_files_are_raised_for_the_requests_in_flight(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], requests: int, most: int, raised: int | None
) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _, wanted: asked.append(wanted))
    assert connection_module.most_connections(requests) == most
    assert [soft for soft, _ in asked if soft != limits[0]] == ([] if raised is None else [raised])


def test_more_requests_than_files_are_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (4096, 4096))
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    assert connection_module.most_connections(3072) == 3072
    with pytest.raises(ConfigError, match=r"--max-requests 3073: .* 4096 files.*ulimit -Hn 4097.*--max-requests 3072"):
        connection_module.most_connections(3073)


def test_connections_are_bounded(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "MAX_CONNECTIONS", 2)
    monkeypatch.setattr(connection_module, "SPARE_CONNECTIONS", 1)

    async def test() -> None:
        async with opened(max_requests=1) as s, connected(s) as first, connected(s) as second:
            for talk in (first, second):
                await talk.send(HEALTH + b"\r\n")
                assert status(await talk.answer()) == 200
            async with connected(s) as third, connected(s) as fourth:
                assert await fourth.closed()
                await third.send(HEALTH + b"\r\n")
                check_error(await third.answer(), 503)
                assert await third.closed()
            await first.send(HEALTH + b"\r\n")
            assert status(await first.answer()) == 200

    run(test())
