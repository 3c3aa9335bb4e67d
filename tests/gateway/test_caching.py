"""Cached contexts at the gateway: the book, the files, how requests name them, and every mistake."""

from __future__ import annotations

import stat
import time
from pathlib import Path
from typing import Any

import pytest

from moonpool.command.caching import caching_directory
from moonpool.core.events import RequestArrived
from moonpool.errors import ConfigError
from moonpool.gateway.caching.book import MOST_CONTEXTS, Book, Held
from moonpool.gateway.caching.context import Context, packed_ids
from moonpool.gateway.caching.files import Files
from moonpool.gateway.caching.reference import Reference, read_reference
from moonpool.gateway.keys.secret import id_of as id_of_key
from moonpool.gateway.problem import ApiError
from moonpool.gateway.schema import ChatMessage
from tests.gateway.conftest import Open
from tests.gateway.kit import CONTEXT, END, MODEL, Stage, chat_body, run, until
from tests.keys import bearer, make_key, revoke

ME, YOU = "me", "you"
USER = {"role": "user", "content": "Hi"}


def id_of(n: int) -> str:
    return f"cache-{n:024x}"


def context(n: int, owner: str = "", **fields: Any) -> Context:
    defaults = {"tokens": packed_ids(range(70)), "pinned_tokens": 64, "created": n, "expires": time.time() + 600}
    return Context(**{"id": id_of(n), "owner": owner, "model": MODEL, "vocabulary": 49152, **defaults, **fields})


# ---- the book


def test_others_contexts_look_as_if_there_were_none() -> None:
    book = Book(time.time, None)
    book.add(held := Held(context(1, "me")))
    assert book.find(id_of(1), ME) is held
    with pytest.raises(ApiError) as foreign:
        book.find(id_of(1), YOU)
    with pytest.raises(ApiError) as unknown:
        book.find(id_of(2), YOU)
    assert foreign.value.status == unknown.value.status == 404
    assert foreign.value.body() == unknown.value.body().replace(id_of(2).encode(), id_of(1).encode())
    assert book.of(YOU) == []


def test_what_is_over_is_gone_for_its_owner_and_unknown_to_others() -> None:
    now = [100.0]
    book = Book(lambda: now[0], None)
    book.add(held := Held(context(1, "me", expires=200.0)))
    now[0] = 200.0
    for _ in range(2):
        with pytest.raises(ApiError) as mine:
            book.find(id_of(1), ME)
        assert (mine.value.status, mine.value.code) == (410, "context_expired")
        with pytest.raises(ApiError) as foreign:
            book.find(id_of(1), YOU)
        assert foreign.value.status == 404
        assert book.of(ME) == []
        assert book.expired() == [held] * book.has(held)
        if book.has(held):
            book.remove(held, is_expired=True)
    book.check_integrity()


def test_a_quota_counts_what_is_there_and_what_is_coming() -> None:
    book = Book(time.time, 1000)
    book.add(Held(context(1, "me", pinned_tokens=600)))
    with book.reserve(ME, 300):
        book.check_integrity()
        with pytest.raises(ApiError) as beyond, book.reserve(ME, 101):
            pass
        assert (beyond.value.status, beyond.value.code) == (429, "caching_quota_exceeded")
        assert "101 tokens on top of 900" in beyond.value.message
        with book.reserve(ME, 100), book.reserve(YOU, 1000):
            pass
    book.replace(next(iter(book)), context(1, "me", pinned_tokens=1000))
    with pytest.raises(ApiError), book.reserve(ME, 1):
        pass
    book.remove(next(iter(book)))
    with book.reserve(ME, 1000):
        book.check_integrity()
    book.check_integrity()
    assert book.tokens == 0


def test_there_are_only_so_many() -> None:
    book = Book(time.time, None)
    for n in range(MOST_CONTEXTS):
        book.add(Held(context(n)))
    with pytest.raises(ApiError) as full, book.reserve(YOU, 1):
        pass
    assert (full.value.status, full.value.code) == (429, "caching_full")


# ---- the files


def test_files_are_private_and_read_again(tmp_path: Path) -> None:
    directory = tmp_path / "a" / "caching"
    files = Files(str(directory))
    assert files.load() == []
    assert not directory.exists()
    messages = (ChatMessage("system", "Be kind."), ChatMessage("assistant", "Yes", "x"))
    first = context(2, messages=messages, known={1: (5, 6)}, metadata={"a": "b"}, salt="s", node="node-1")
    files.write(context(3, expires=1.5))
    files.write(first)
    files.write(context(3))
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in directory.iterdir()} == {0o600}
    with pytest.raises(ConfigError, match=r"another gateway keeps its cached contexts in .*--caching-dir"):
        Files(str(directory)).load()
    files.close()
    again = Files(str(directory))
    found = again.load()
    assert found[0] == first
    assert [c.id for c in found] == [id_of(2), id_of(3)]
    assert found[1].expires > 1.5
    assert found[0].token_ids() == tuple(range(70))
    again.remove(found[0])
    again.remove(found[0])
    assert [c.id for c in again.load()] == [id_of(3)]
    again.close()


def test_damaged_files_are_passed_over_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = Files(str(tmp_path))
    files.write(context(1))
    data = (tmp_path / f"{id_of(1)}.json").read_bytes()
    (tmp_path / f"{id_of(2)}.json").write_bytes(data[:-9])
    (tmp_path / f"{id_of(3)}.json").write_bytes(data)  # another one's name
    (tmp_path / f"{id_of(4)}.json").write_bytes(b"\xff{}")
    (tmp_path / f"{id_of(5)}.new").write_bytes(data)  # cut off before it was whole
    assert [c.id for c in files.load()] == [id_of(1)]
    assert caplog.text.count("damaged: passed over") == 3
    assert not (tmp_path / f"{id_of(5)}.new").exists()
    files.close()


def test_a_directory_that_cannot_be_had_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    files = Files(str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"--caching-dir .*file: File exists; give another, or `off`"):
        files.load()


def test_a_gateway_goes_on_with_the_contexts_of_its_model(smollm2: Path, opened: Open, tmp_path: Path) -> None:
    files = Files(str(tmp_path))
    files.write(context(1))
    files.write(context(2, model="another"))
    files.write(context(3, vocabulary=7))
    files.write(context(4, expires=1.0))
    files.close()

    async def test() -> None:
        async with opened(caching_dir=str(tmp_path)) as s:
            await until(lambda: len(s.gateway.keeper.book) == 1)  # the one whose time is over goes by itself
            listed = (await s.client.get(f"{s.url}/v1/caching")).json()
            assert [(c["id"], c["status"]) for c in listed["data"]] == [(id_of(1), "pending")]
            gone = await s.client.get(f"{s.url}/v1/caching/{id_of(4)}")
            assert gone.status_code in (404, 410)

    run(test())
    assert {file.name for file in tmp_path.glob("*.json")} == {f"{id_of(n)}.json" for n in (1, 2, 3)}


def test_where_they_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONPOOL_HOME", str(tmp_path))
    assert caching_directory(None, "gateway-0", 8000) == str(tmp_path / "caching" / "gateway-0-8000")
    assert caching_directory("off", "gateway-0", 8000) is None
    monkeypatch.chdir(tmp_path)
    assert caching_directory("mine", "gateway-0", 8000) == str(tmp_path / "mine")


# ---- how requests name them


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("cache_id=cache-1", Reference("cache-1")),
        ("cache-1", Reference("cache-1")),
        ("cache_id=cache-1;reset_ttl=3600", Reference("cache-1", 3600)),
        (" cache-1 ; reset_ttl=1 ;", Reference("cache-1", 1)),
    ],
)
def test_references(text: str, wanted: Reference) -> None:
    assert read_reference(text, "it") == wanted


@pytest.mark.parametrize(
    "text",
    [
        *("", ";", "cache_id=", "reset_ttl=5", "tag=x", "cache-1;dry_run=1", "cache-1;cache_id=cache-1"),
        *("cache-1;reset_ttl=", "cache-1;reset_ttl=0", "cache-1;reset_ttl=-1", "cache-1;reset_ttl=1.5"),
        *("cache-1;reset_ttl=2592001", "cache-1;reset_ttl=٣", "cache-1;reset_ttl=1;reset_ttl=2", "x" * 257),
    ],
)
def test_references_that_are_none(text: str) -> None:
    with pytest.raises(ApiError) as wrong:
        read_reference(text, "it")
    assert (wrong.value.status, wrong.value.param) == (400, "it")


def with_context(s: Stage, n: int = 1, **fields: Any) -> Held:
    held = Held(context(n, **fields))
    held.retry_at = float("inf")
    s.gateway.keeper.book.add(held)
    return held


def test_a_request_by_id_is_the_request_in_full(opened: Open) -> None:
    """Token by token: with the role, with the header, and with all of it sent."""
    cached = (ChatMessage("system", "You are kind."), ChatMessage("user", "One?"), ChatMessage("assistant", "Two."))
    sent = [{"role": m.role, "content": m.content} for m in cached]

    async def test() -> None:
        async with opened(answer=lambda work: [END]) as s:
            with_context(s, messages=cached, salt="pepper")
            ref = {"role": "cache", "content": f"cache_id={id_of(1)}"}
            body = {"model": MODEL, "max_tokens": 4}
            path = "/v1/chat/completions"
            by_role = await s.post(path, {**body, "messages": [ref, USER]})
            by_header = await s.post(path, {**body, "messages": [USER]}, x_moonpool_cache=id_of(1))
            in_full = await s.post(path, {**body, "messages": [*sent, USER], "cache_salt": "pepper"})
            assert [r.status_code for r in (by_role, by_header, in_full)] == [200] * 3
            works = [await s.order(n) for n in (1, 2, 3)]
            assert works[0].tokens == works[1].tokens == works[2].tokens
            assert works[0].keys == works[1].keys == works[2].keys
            assert works[0].salt == "pepper"

    run(test())


def test_a_prompts_tokens_go_before_each_prompt(opened: Open) -> None:
    async def test() -> None:
        async with opened(answer=lambda work: [END]) as s:
            with_context(s)
            answer = await s.post(
                "/v1/completions",
                {"model": MODEL, "prompt": [[7, 8], [9]], "max_tokens": 4},
                x_moonpool_cache=f"{id_of(1)};reset_ttl=5000",
            )
            assert answer.status_code == 200
            assert answer.json()["usage"]["prompt_tokens"] == 70 + 2 + 70 + 1
            tokens = {(await s.order(n)).tokens for n in (1, 2)}
            assert tokens == {(*range(70), 7, 8), (*range(70), 9)}
            left = s.gateway.keeper.book.find(id_of(1), "").context.expires - time.time()
            assert 4900 < left <= 5000

    run(test())


# ---- whose they are


def test_a_key_sees_its_own_contexts_only_and_they_end_with_it(opened: Open, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    keys = [make_key(path), make_key(path)]
    mine, yours = (id_of_key(key) for key in keys)
    assert mine is not None
    assert yours is not None

    async def test() -> None:
        async with opened(answer=lambda work: [END], keys=str(path), caching_dir=str(tmp_path / "caching")) as s:
            with_context(s, 1, owner=mine, salt="derived")
            with_context(s, 2, owner=yours)
            for n, (key, other) in enumerate([keys, keys[::-1]], 1):
                listed = (await s.client.get(f"{s.url}/v1/caching", headers=bearer(key))).json()
                assert [c["id"] for c in listed["data"]] == [id_of(n)]
                where = f"{s.url}/v1/caching/{id_of(n)}"
                own = await s.client.patch(where, json={"name": "x"}, headers=bearer(key))
                assert own.status_code == 200
                unknown = await s.client.get(f"{s.url}/v1/caching/{id_of(9)}", headers=bearer(other))
                for method in ("GET", "PATCH", "DELETE"):
                    foreign = await s.client.request(method, where, json={"ttl": 5}, headers=bearer(other))
                    assert foreign.status_code == 404
                    assert foreign.text == unknown.text.replace(id_of(9), id_of(n))
            body, used = {"model": MODEL, "prompt": [7], "max_tokens": 4}, {"x-moonpool-cache": id_of(1)}
            answers = [
                await s.client.post(f"{s.url}/v1/completions", json=body, headers={**bearer(key), **used})
                for key in keys
            ]
            assert [a.status_code for a in answers] == [200, 404]
            assert (await s.order()).salt == "derived"
            assert (await s.client.get(f"{s.url}/v1/caching")).status_code == 401
            assert len(list((tmp_path / "caching").glob("*.json"))) == 2
            successor = make_key(path, group=yours)
            revoke(path, keys[0])
            revoke(path, keys[1])
            await until(lambda: [h.context.id for h in s.gateway.keeper.book] == [id_of(2)])
            await until(lambda: len(list((tmp_path / "caching").glob("*.json"))) == 1)
            kept = await s.client.get(f"{s.url}/v1/caching/{id_of(2)}", headers=bearer(successor))
            assert kept.status_code == 200, "contexts outlive the change of a key"

    run(test())


def test_making_one_counts_in_the_quotas_of_its_key(opened: Open, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    requests, tokens = make_key(path, requests_per_minute=1), make_key(path, tokens_per_minute=1000)

    async def test() -> None:
        async with opened(keys=str(path)) as s:

            async def make(key: str, **fields: object) -> tuple[int, str]:
                answer = await s.client.post(f"{s.url}/v1/caching", json=PROMPT | fields, headers=bearer(key))
                return answer.status_code, answer.json()["error"]["code"]

            # There is no node that it could be pinned at, so its tokens are given back, each time.
            for _ in range(2):
                assert await make(tokens, prompt=[5] * 900) == (503, "no_node")
            assert await make(requests, ttl=0) == (400, None)
            assert await make(requests) == (429, "requests_per_minute")

    run(test())


# ---- mistakes

PROMPT = {"prompt": list(range(100, 300))}
MAKING: list[tuple[dict[str, Any], str]] = [
    ({}, "messages"),
    ({"messages": [USER], **PROMPT}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": [{"role": "cache", "content": f"cache_id={id_of(1)}"}, USER]}, "messages[0].role"),
    ({"prompt": 7}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [49152]}, "prompt"),
    ({"prompt": ["a", "b"]}, "prompt"),
    ({**PROMPT, "ttl": 0}, "ttl"),
    ({**PROMPT, "ttl": -5}, "ttl"),
    ({**PROMPT, "ttl": 1.5}, "ttl"),
    ({**PROMPT, "ttl": "1h"}, "ttl"),
    ({**PROMPT, "ttl": True}, "ttl"),
    ({**PROMPT, "ttl": 2_592_001}, "ttl"),
    ({**PROMPT, "ttl": 1 << 70}, "ttl"),
    ({**PROMPT, "name": 5}, "name"),
    ({**PROMPT, "name": "x" * 257}, "name"),
    ({**PROMPT, "metadata": []}, "metadata"),
    ({**PROMPT, "metadata": {"a": 1}}, "metadata"),
    ({**PROMPT, "metadata": {"a": "x" * 513}}, "metadata"),
    ({**PROMPT, "metadata": {"x" * 65: "a"}}, "metadata"),
    ({**PROMPT, "metadata": {str(n): "a" for n in range(17)}}, "metadata"),
    ({**PROMPT, "cache_salt": 5}, "cache_salt"),
    ({**PROMPT, "priority": 1.5}, "priority"),
    ({**PROMPT, "tools": [{}]}, "tools"),
    ({**PROMPT, "tags": ["a"]}, "tags"),
    ({**PROMPT, "max_tokens": 5}, "max_tokens"),
    ({**PROMPT, "tll": 5}, "tll"),
    ({**PROMPT, "model": 5}, "model"),
]


def test_mistakes_in_making_one_name_the_field(opened: Open) -> None:
    async def test() -> None:
        async with opened() as s:
            for body, field in MAKING:
                answer = await s.post("/v1/caching", body)
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), (body, answer.text)
            assert (await s.post("/v1/caching", {**PROMPT, "model": "x"})).status_code == 404
            assert s.got("conductor", RequestArrived) == []

    run(test())


def test_times_that_are_no_times_and_names_that_are_no_text(opened: Open) -> None:
    async def test() -> None:
        async with opened() as s:
            with_context(s)
            path = f"{s.url}/v1/caching/{id_of(1)}"
            headers = {"content-type": "application/json"}
            for ttl in ("NaN", "Infinity", "-Infinity", "1e999", "1e400", "-0.0", "3600.0", "1" * 400, "[60]", '"NaN"'):
                answer = await s.client.patch(path, content=f'{{"ttl": {ttl}}}', headers=headers)
                assert answer.status_code == 400, (ttl, answer.text)
            for name in (r'"\ud800"', r'"a\udfff"', '"\x00"', "{}"):
                answer = await s.client.patch(path, content=f'{{"name": {name}}}', headers=headers)
                assert answer.status_code == 400, (name, answer.text)
            before = s.gateway.keeper.book.find(id_of(1), "").context
            assert (before.name, before.metadata) == ("", {})

    run(test())


def test_names_are_any_text(opened: Open, tmp_path: Path) -> None:
    """They come back as they were given, also after a restart."""
    names = [
        "\U0001f9ca" * 256,
        "\u202eevil\u202c",
        "a\u0000b",
        "a\r\nx: y",
        "<script>alert(1)</script>",
        "../../etc",
        " ",
        '"\\',
    ]

    async def test() -> None:
        async with opened(caching_dir=str(tmp_path)) as s:
            for n, name in enumerate(names):
                if not any(held.context.id == id_of(n) for held in s.gateway.keeper.book):
                    with_context(s, n)
                metadata = {name[:64]: name}
                changed = await s.client.patch(
                    f"{s.url}/v1/caching/{id_of(n)}", json={"name": name, "metadata": metadata}
                )
                assert changed.status_code == 200, changed.text
                assert (changed.json()["name"], changed.json()["metadata"]) == (name, metadata)
        async with opened(caching_dir=str(tmp_path)) as s:
            listed = (await s.client.get(f"{s.url}/v1/caching?limit=1000")).json()["data"]
            assert sorted(c["name"] for c in listed) == sorted(names)

    run(test())


def test_thousands_of_them_are_listed_page_by_page(opened: Open) -> None:
    async def test() -> None:
        async with opened() as s:
            for n in range(MOST_CONTEXTS):
                with_context(s, n, name=f"n{n}")
            full = await s.post("/v1/caching", PROMPT)
            assert (full.status_code, full.json()["error"]["code"]) == (429, "caching_full")
            seen: list[str] = []
            more = True
            while more:
                after = f"&after={id_of(int(seen[-1][1:]))}" if seen else ""
                page = (await s.client.get(f"{s.url}/v1/caching?limit=1000{after}")).json()
                seen += [c["name"] for c in page["data"]]
                more = page["has_more"]
            assert seen == [f"n{n}" for n in reversed(range(MOST_CONTEXTS))]

    run(test())


def test_prefixes_that_are_too_short_or_too_long(opened: Open) -> None:
    async def test() -> None:
        async with opened() as s:
            for short in ({"prompt": [5] * 63}, {"messages": [USER]}):
                answer = await s.post("/v1/caching", short)
                assert answer.status_code == 400
                assert answer.json()["error"]["code"] == "context_too_short"
                assert answer.json()["error"]["param"] == next(iter(short))
                assert "whole blocks of 64" in answer.json()["error"]["message"]
            just = await s.post("/v1/caching", {"prompt": [5] * (CONTEXT - 1)})
            assert just.json()["error"]["code"] == "no_node", "a token of output still fits"
            for long in ({"prompt": [5] * CONTEXT}, {"prompt": "a b " * CONTEXT}, {"messages": [USER] * CONTEXT}):
                answer = await s.post("/v1/caching", long)
                assert answer.status_code == 400
                assert answer.json()["error"]["code"] == "context_length_exceeded", answer.text
            with_context(s, tokens=packed_ids([5] * (CONTEXT - 10)))
            body = {"model": MODEL, "prompt": [5] * 10, "max_tokens": 1}
            answer = await s.post("/v1/completions", body, x_moonpool_cache=id_of(1))
            assert answer.json()["error"]["code"] == "context_length_exceeded"

    run(test())


def test_a_node_that_does_not_answer_is_said(opened: Open) -> None:
    async def test() -> None:
        async with opened() as s:
            answer = await s.post("/v1/caching", PROMPT)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_node")
            assert int(answer.headers["retry-after"]) > 0
            assert s.got("conductor", RequestArrived) == [], "computed in vain"
            assert s.gateway.keeper.book.tokens == 0

    run(test())


def test_mistakes_with_one_that_is_there(opened: Open) -> None:
    async def test() -> None:
        async with opened() as s:
            held = with_context(s)
            with_context(s, 2, owner="somebody else")
            with_context(s, 3, messages=(ChatMessage("user", "Hi"),))
            with_context(s, 4, expires=1.0)
            path = f"{s.url}/v1/caching/{id_of(1)}"
            before = held.context
            for change, field in (
                ({}, "ttl"),
                ({"ttl": None}, "ttl"),
                ({"ttl": 0}, "ttl"),
                ({"ttl": "1h"}, "ttl"),
                ({"expired_at": 5}, "expired_at"),
                ({"name": 5}, "name"),
                ({"metadata": {"a": 5}}, "metadata"),
            ):
                for method in ("PATCH", "PUT"):
                    answer = await s.client.request(method, path, json=change)
                    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), change
            assert held.context == before
            assert (await s.client.patch(path, content=b"{}")).status_code == 415
            assert (await s.client.patch(path, json={"ttl": 5}, headers={"host": "evil.example"})).status_code == 400
            for method in ("GET", "DELETE"):
                answer = await s.client.request(method, path, headers={"host": "evil.example"})
                assert answer.status_code == 400, method
            assert (await s.client.post(path, json={})).status_code == 405
            for n, status, code in (
                (2, 404, "context_not_found"),
                (9, 404, "context_not_found"),
                (4, 410, "context_expired"),
            ):
                uses = [
                    await s.client.get(f"{s.url}/v1/caching/{id_of(n)}"),
                    await s.client.delete(f"{s.url}/v1/caching/{id_of(n)}"),
                    await s.client.patch(f"{s.url}/v1/caching/{id_of(n)}", json={"ttl": 5}),
                    await s.post("/v1/completions", {"prompt": [5]}, x_moonpool_cache=id_of(n)),
                    await s.post("/v1/chat/completions", chat_body(), x_moonpool_cache=id_of(n)),
                ]
                assert [(u.status_code, u.json()["error"]["code"]) for u in uses] == [(status, code)] * 5
            for after in ("limit=0", "limit=1001", "limit=x", "limit=", f"after={id_of(2)}", "after=x"):
                assert (await s.client.get(f"{s.url}/v1/caching?{after}")).status_code == 400, after
            wrong = [
                await s.post("/v1/chat/completions", chat_body(), x_moonpool_cache=id_of(1)),
                await s.post("/v1/completions", {"prompt": [5]}, x_moonpool_cache=id_of(3)),
            ]
            assert [w.json()["error"]["code"] for w in wrong] == ["context_mismatch"] * 2
            ref = {"role": "cache", "content": f"cache_id={id_of(3)}"}
            for messages, field in (
                ([ref], "messages"),
                ([USER, ref], "messages[1].role"),
                ([ref, ref, USER], "messages[1].role"),
                ([{"role": "cache", "content": "tag=x"}, USER], "messages[0].content"),
                ([{"role": "cache", "content": [ref]}, USER], "messages[0].content"),
                ([{**ref, "name": "x"}, USER], "messages[0].name"),
                ([{"role": "cache"}, USER], "messages[0].content"),
            ):
                answer = await s.post("/v1/chat/completions", {"messages": messages})
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), messages
            both = await s.post("/v1/chat/completions", {"messages": [ref, USER]}, x_moonpool_cache=id_of(3))
            assert both.json()["error"]["param"] == "x-moonpool-cache"
            salted = await s.post("/v1/chat/completions", {"messages": [ref, USER], "cache_salt": "x"})
            assert salted.json()["error"]["param"] == "cache_salt"
            listed = (await s.client.get(f"{s.url}/v1/caching?limit=1")).json()
            assert ([c["id"] for c in listed["data"]], listed["has_more"]) == ([id_of(3)], True)
            listed = (await s.client.get(f"{s.url}/v1/caching?after={id_of(3)}")).json()
            assert ([c["id"] for c in listed["data"]], listed["has_more"]) == ([id_of(1)], False)
            assert s.got("conductor", RequestArrived) == []

    run(test())


def test_one_that_is_changed_and_deleted(opened: Open, tmp_path: Path) -> None:
    async def test() -> None:
        async with opened(caching_dir=str(tmp_path / "caching")) as s:
            with_context(s)
            path = f"{s.url}/v1/caching/{id_of(1)}"
            changed = await s.client.patch(path, json={"ttl": 5000, "name": "n", "metadata": {"a": "b"}})
            assert changed.status_code == 200
            said = changed.json()
            assert (said["name"], said["metadata"], said["tokens"], said["pinned_tokens"]) == ("n", {"a": "b"}, 70, 64)
            assert 4900 < said["expired_at"] - time.time() <= 5000
            file = tmp_path / "caching" / f"{id_of(1)}.json"
            assert file.exists()
            assert (await s.client.get(path)).json() == said
            gone = await s.client.delete(path)
            assert gone.json() == {"id": id_of(1), "object": "context_cache_object.deleted", "deleted": True}
            assert not file.exists()
            assert (await s.client.delete(path)).status_code == 404

    run(test())
