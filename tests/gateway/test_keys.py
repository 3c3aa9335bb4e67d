"""API keys at a gateway: every entrance, every wrong key, revoking, quotas, classes, and what tenants do not share."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from moonpool.core.vocabulary import PartId, PriorityClass, RejectReason, Slo
from moonpool.errors import ConfigError
from moonpool.gateway.config import GatewayConfig
from moonpool.gateway.keys import checks
from moonpool.gateway.keys.secret import hash_of, id_of
from moonpool.gateway.serve import run_gateway
from moonpool.gateway.tokenizer import Tokenizer
from moonpool.wire.link import Link
from tests.gateway.conftest import Open
from tests.gateway.kit import END, MODEL, Stage, chat_body, events, run, until
from tests.keys import bearer, change, make_key, revoke, wrong

COMPLETION = {"model": MODEL, "prompt": [9] * 10}
ENTRANCES: list[tuple[str, str, object]] = [
    ("POST", "/v1/chat/completions", chat_body()),
    ("POST", "/v1/completions", COMPLETION),
    ("POST", "/tokenize", {"prompt": "a"}),
    ("POST", "/detokenize", {"tokens": [9]}),
    ("GET", "/v1/models", None),
    ("GET", f"/v1/models/{MODEL}", None),
    ("HEAD", "/v1/models", None),
    ("GET", "/nothing/here", None),
]
ADMIN: list[tuple[str, str, object]] = [
    ("GET", "/cluster", None),
    ("HEAD", "/cluster", None),
    ("GET", "/cluster/requests/mine%2F1", None),
    ("GET", "/cluster/blocks", None),
    ("GET", "/cluster/keys", None),
    ("GET", "/cluster/instances", None),
    ("POST", "/cluster/instances", {"url": "http://127.0.0.1:1"}),
    ("DELETE", "/cluster/instances/x", None),
    ("GET", "/cluster/nothing", None),
    ("PUT", "/cluster", {}),
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


async def ask(s: Stage, method: str, path: str, body: object, **headers: str) -> httpx.Response:
    return await s.client.request(method, s.url + path, json=body, headers=headers)


async def complete(s: Stage, key: str, prompt: object = COMPLETION["prompt"], **fields: object) -> httpx.Response:
    body = {"model": MODEL, "prompt": prompt, **fields}
    return await s.client.post(s.url + "/v1/completions", json=body, headers=bearer(key))


def quota_of(response: httpx.Response) -> tuple[str, int]:
    """Of a refusal: its quota, and the seconds to wait."""
    assert response.status_code == 429, response.text
    error = response.json()["error"]
    quota = response.headers["x-moonpool-reason"]
    assert (error["type"], error["code"]) == ("rate_limit_error", quota.replace("-", "_"))
    assert quota in error["message"]
    return quota, int(response.headers["retry-after"])


# ---- who gets in


def test_every_entrance_wants_a_key_that_is_right(opened: Open, path: Path) -> None:
    admin, user, gone = make_key(path, admin=True), make_key(path), make_key(path)
    revoke(path, gone)
    unknown = "mp-ffffffffff-" + "0" * 48
    refused = {
        "none": {},
        "empty": {"authorization": ""},
        "no scheme": {"authorization": admin},
        "basic": {"authorization": f"Basic {admin}"},
        "no key": {"authorization": "Bearer"},
        "of another server": bearer("none"),
        "too long": bearer(admin + "0"),
        "cut off": bearer(admin[:-1]),
        "spelt otherwise": bearer(admin.upper()),
        "not text": {"authorization": "Bearer mp-\u00ff\u00e4"},
        "wrong": bearer(wrong(admin)),
        "unknown": bearer(unknown),
        "revoked": bearer(gone),
    }

    async def test() -> None:
        async with opened(answer=lambda work: [END], keys=str(path)) as s:
            for method, where, body in (*ENTRANCES, *ADMIN):
                for why, headers in refused.items():
                    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
                    response = await s.client.request(method, s.url + where, json=body, headers=raw)
                    assert response.status_code == 401, (method, where, why, response.text)
                    assert response.headers["www-authenticate"] == "Bearer"
                    if method != "HEAD":
                        error = response.json()["error"]
                        assert error.keys() == {"message", "type", "param", "code"}
                        assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
                        assert not any(value.rpartition("-")[2] in response.text for value in (admin, gone))
            twice = [("authorization", f"Bearer {admin}")] * 2
            assert (await s.client.get(s.url + "/v1/models", headers=twice)).status_code == 401
            for method, where, body in ENTRANCES:
                response = await ask(s, method, where, body, **bearer(user))
                assert response.status_code == (404 if "nothing" in where else 200), (where, response.text)
            lower = {"authorization": f"bearer  {user}"}
            assert (await s.client.get(s.url + "/v1/models", headers=lower)).status_code == 200
            for method, where, body in ADMIN:
                response = await ask(s, method, where, body, **bearer(user))
                assert response.status_code == 403, (method, where, response.text)
                if method != "HEAD":
                    assert response.json()["error"]["code"] == "admin_key_required"
            statuses = [
                (await ask(s, method, where, body, **bearer(admin))).status_code for method, where, body in ADMIN
            ]
            assert statuses == [200, 200, 200, 200, 200, 404, 404, 404, 404, 405]
            for where in ("/health", "/ready", "/version", "/metrics"):
                assert (await s.client.get(s.url + where)).status_code == 200

    run(test())


def test_without_keys_anyone_on_loopback_may_look_but_not_change(opened: Open) -> None:
    async def test() -> None:
        async with opened(answer=lambda work: [END]) as s:
            assert (await s.complete()).status_code == 200
            assert (await s.client.get(s.url + "/cluster")).status_code == 200
            assert (await s.client.get(s.url + "/cluster/keys")).status_code == 404
            for method, where in (("POST", "/cluster/instances"), ("DELETE", "/cluster/instances/x")):
                refused = await ask(s, method, where, {})
                assert (refused.status_code, "--keys FILE" in refused.text) == (403, True)

    run(test())


def test_off_loopback_there_is_no_gateway_without_keys(opened: Open, smollm2: Path, path: Path) -> None:
    key = make_key(path)

    async def test() -> None:
        link = Link(PartId("gateway-0"), "127.0.0.1", 0, None)
        config = GatewayConfig(host="0.0.0.0", port=0, model_path=str(smollm2), served_model_name=MODEL)
        with pytest.raises(ConfigError, match=r"--host 0.0.0.0 is open to the network .*moonpool keys add"):
            await run_gateway(link, "tcp://127.0.0.1:1", config)
        link.close()
        async with opened(host="0.0.0.0", keys=str(path), allowed_hosts=("*",)) as s:
            s.url = s.url.replace("0.0.0.0", "127.0.0.1")
            assert (await s.client.get(s.url + "/v1/models")).status_code == 401
            assert (await s.client.get(s.url + "/v1/models", headers=bearer(key))).status_code == 200

    run(test())


def test_the_openai_client(opened: Open, tokenizer: Tokenizer, path: Path) -> None:
    ids = [*tokenizer.encode("Paris.", special_tokens=False), END]
    key = make_key(path, requests_per_minute=2)

    async def test() -> None:
        async with opened(answer=lambda work: ids, keys=str(path)) as s:
            messages: Any = [{"role": "user", "content": "Where?"}]

            def client(api_key: str) -> openai.AsyncOpenAI:
                return openai.AsyncOpenAI(base_url=s.url + "/v1", api_key=api_key, max_retries=0, timeout=20)

            async with client(key) as right, client(wrong(key)) as other:
                assert [m.id async for m in right.models.list()] == [MODEL]
                chat = await right.chat.completions.create(model=MODEL, messages=messages)
                assert chat.choices[0].message.content == "Paris."
                stream: Any = await right.chat.completions.create(model=MODEL, messages=messages, stream=True)
                assert "".join([c.choices[0].delta.content or "" async for c in stream]) == "Paris."
                with pytest.raises(openai.RateLimitError, match="requests-per-minute"):
                    await right.chat.completions.create(model=MODEL, messages=messages)
                with pytest.raises(openai.AuthenticationError, match="is wrong, or has been revoked") as told:
                    await other.chat.completions.create(model=MODEL, messages=messages)
                assert told.value.code == "invalid_api_key"

    run(test())


# ---- while the file changes


def test_keys_come_and_go_within_a_second(opened: Open, path: Path) -> None:
    first = make_key(path)

    async def test() -> None:
        async with opened(answer=lambda work: [END], keys=str(path)) as s:
            assert (await complete(s, first)).status_code == 200
            second = await asyncio.to_thread(make_key, path)
            await served(s, second, 200)
            assert (await complete(s, first)).status_code == 200
            await asyncio.to_thread(revoke, path, first)
            began = time.monotonic()
            await served(s, first, 401)
            assert time.monotonic() - began < 1.0
            assert (await complete(s, second)).status_code == 200

    run(test())


async def served(s: Stage, key: str, status: int) -> None:
    """Wait until a request with this key has this status."""
    answers: list[int] = []
    while not answers or answers[-1] != status:
        answers.append((await complete(s, key)).status_code)
        assert len(answers) < 1000, answers
        await asyncio.sleep(0.005)


def test_what_a_revoked_key_has_under_way_ends(opened: Open, path: Path) -> None:
    key = make_key(path)

    async def test() -> None:
        async with opened(keys=str(path)) as s:
            s.places = True
            stream = asyncio.create_task(complete(s, key, max_tokens=50, stream=True))
            s.say(await s.order(1), [50, 51, 52])
            whole = asyncio.create_task(complete(s, key, max_tokens=50))
            s.say(await s.order(2), [50, 51, 52])
            await until(lambda: s.gateway.cluster.totals["tokens"] == 6)
            await asyncio.to_thread(revoke, path, key)
            said = events((await stream).text)
            assert "choices" in said[0]
            assert said[-1]["error"]["code"] == "invalid_api_key"
            assert (await whole).status_code == 401
            await s.cancelled_everywhere()

    run(test())


def test_a_key_that_is_revoked_while_a_body_comes_begins_nothing(opened: Open, path: Path) -> None:
    key = make_key(path)

    async def test() -> None:
        async with opened(answer=lambda work: [END], keys=str(path)) as s:
            assert (await complete(s, key)).status_code == 200
            door = asyncio.Event()

            async def body() -> Any:
                yield b'{"prompt": [9, 9, 9], '
                await door.wait()
                yield b'"max_tokens": 3}'

            headers = {**bearer(key), "content-type": "application/json"}
            late = asyncio.create_task(s.client.post(s.url + "/v1/completions", content=body(), headers=headers))
            keyring = s.gateway.keyring
            assert keyring is not None
            await until(lambda: keyring.usage()[0].requests == 2)
            await asyncio.to_thread(revoke, path, key)
            await until(lambda: not keyring.count)
            door.set()
            assert (await late).status_code == 401
            assert s.gateway.cluster.totals["requests"] == 1

    run(test())


def test_a_file_that_cannot_be_read_leaves_the_keys_of_before(
    opened: Open, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    key = make_key(path)
    good = path.read_text()

    async def test() -> None:
        async with opened(answer=lambda work: [END], keys=str(path)) as s:
            keyring = s.gateway.keyring
            assert keyring is not None
            for spoil in (lambda: replace_text(path, good[:99]), lambda: path.chmod(0o644), path.unlink):
                spoil()
                await until(lambda: keyring.fault)
                assert (await complete(s, key)).status_code == 200
                assert 'api_keys_stale{model_name="smollm2"} 1.0' in (await s.client.get(s.url + "/metrics")).text
                replace_text(path, good)
                await until(lambda: not keyring.fault)
            assert caplog.text.count("the keys of before stay") == 3, "each fault is told once"
            await asyncio.to_thread(revoke, path, key)
            await served(s, key, 401)

    run(test())


def replace_text(path: Path, text: str) -> None:
    """At once: a file that is written in its place can be read half."""
    other = path.with_suffix(".new")
    other.touch(0o600)
    other.write_text(text)
    other.replace(path)


# ---- what a check costs


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The keys that were hashed, as they are."""
    found: list[str] = []
    right = checks.is_hash_of

    def count(known: str, given: str) -> bool:
        found.append(given)
        return right(known, given)

    monkeypatch.setattr(checks, "is_hash_of", count)
    return found


def test_a_right_key_is_hashed_once_and_then_wrong_ones_never(opened: Open, path: Path, hashed: list[str]) -> None:
    key, other = make_key(path), make_key(path)

    async def test() -> None:
        async with opened(answer=lambda work: [END], keys=str(path)) as s:
            answers = await asyncio.gather(*(complete(s, key) for _ in range(20)))
            assert {answer.status_code for answer in answers} == {200}
            assert hashed == [key]
            for _ in range(20):
                assert (await complete(s, wrong(key))).status_code == 401
            assert hashed == [key]
            await asyncio.to_thread(revoke, path, other)
            await served(s, other, 401)
            assert (await complete(s, key)).status_code == 200
            assert hashed.count(key) == 1, "it is not its file but its hash that it was proven by"
            drawn = f"{key[:14]}{'1' * 48}"
            await asyncio.to_thread(change, path, key, hash=hash_of(drawn))
            await served(s, key, 401)
            assert (await complete(s, drawn)).status_code == 200

    run(test())


def test_a_flood_under_the_id_of_an_unused_key_does_not_keep_its_owner_out(
    opened: Open, path: Path, hashed: list[str]
) -> None:
    """Whoever has the id from a log line, from whatever address, has no hash computed by it."""
    target = make_key(path)

    async def test() -> None:
        async with opened(answer=lambda work: [END], keys=str(path)) as s:
            flood = [asyncio.create_task(complete(s, f"{target[:-8]}{n:08x}")) for n in range(40)]
            owner = asyncio.create_task(complete(s, target))
            flood += [asyncio.create_task(complete(s, f"{target[:-8]}{n:08x}")) for n in range(40, 80)]
            assert (await owner).status_code == 200
            assert {response.status_code for response in await asyncio.gather(*flood)} == {401}
            assert hashed == [target]

    run(test())


def test_a_flood_of_wrong_keys_keeps_no_other_out(opened: Open, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the file has hashes without tags, which an earlier version wrote."""
    known, fresh, *targets = (make_key(path) for _ in range(11))
    path.write_text(re.sub(",tag=[0-9a-f]{8}", "", path.read_text()))
    door = threading.Event()
    right = checks.is_hash_of

    def slow(hashed: str, key: str) -> bool:
        assert key in (known, fresh) or door.wait(20)
        return right(hashed, key)

    async def test() -> None:
        async with opened(answer=lambda work: [END], keys=str(path)) as s:
            assert (await complete(s, known)).status_code == 200
            monkeypatch.setattr(checks, "is_hash_of", slow)

            async def guess(key: str, n: int) -> httpx.Response:
                return await complete(s, f"{key[:-8]}{n:08x}")

            flood = [asyncio.create_task(guess(target, n)) for target in targets for n in range(10)]
            try:
                await until(lambda: sum(task.done() for task in flood) >= len(flood) - checks.MOST)
                for response in (task.result() for task in flood if task.done()):
                    assert response.status_code == 503, response.text
                    assert response.json()["error"]["code"] == "keys_busy"
                    assert int(response.headers["retry-after"]) >= 1
                began = time.monotonic()
                for _ in range(5):
                    assert (await complete(s, known)).status_code == 200
                    assert (await complete(s, wrong(known))).status_code == 401
                assert time.monotonic() - began < 10
            finally:
                door.set()
            ends = [response.status_code for response in await asyncio.gather(*flood)]
            assert set(ends) == {401, 503}
            assert ends[:10].count(401) <= checks.MOST_OF_ONE
            assert ends.count(401) <= checks.MOST
            assert (await complete(s, fresh)).status_code == 200

    run(test())


# ---- quotas


def test_requests_a_minute(opened: Open, path: Path) -> None:
    key, other = make_key(path, requests_per_minute=3), make_key(path)

    async def test() -> None:
        async with opened(answer=lambda work: [END], keys=str(path)) as s:
            assert (await complete(s, key)).status_code == 200
            assert (await s.post("/tokenize", {"prompt": "a"}, **bearer(key))).status_code == 200
            assert (await complete(s, key, max_tokens=0)).status_code == 400
            for body in (COMPLETION, {"prompt": 5}):
                quota, wait = quota_of(await s.post("/v1/completions", body, **bearer(key)))
                assert (quota, 18 <= wait <= 20) == ("requests-per-minute", True)
            assert quota_of(await s.post("/detokenize", {"tokens": [9]}, **bearer(key)))[0] == "requests-per-minute"
            assert (await s.client.get(s.url + "/v1/models", headers=bearer(key))).status_code == 200
            assert (await complete(s, other)).status_code == 200
            page = (await s.client.get(s.url + "/metrics")).text
            assert 'requests_over_quota_total{model_name="smollm2",quota="requests-per-minute"} 3.0' in page
            await asyncio.to_thread(change, path, key, requests_per_minute=None)
            await served(s, key, 200)

    run(test())


def test_tokens_a_minute_of_prompts_at_once_and_of_answers_at_their_end(opened: Open, path: Path) -> None:
    key = make_key(path, tokens_per_minute=60)
    admin = make_key(path, admin=True)

    async def test() -> None:
        async with opened(keys=str(path)) as s:
            s.places = True
            asked = asyncio.create_task(complete(s, key, [9] * 20, max_tokens=30))
            work = await s.order()
            quota, wait = quota_of(await complete(s, key, [9] * 60))
            assert (quota, 10 <= wait <= 20) == ("tokens-per-minute", True), "40 are left, and come back one a second"
            s.say(work, [50] * 30)
            assert (await asked).status_code == 200
            quota, wait = quota_of(await complete(s, key, [9] * 40))
            assert (quota, 20 <= wait <= 30) == ("tokens-per-minute", True), "10 are left"
            quota, wait = quota_of(await complete(s, key, [9] * 1000))
            assert (quota, 40 <= wait <= 50) == ("tokens-per-minute", True), "a full minute's worth lets any prompt in"
            used = (await s.client.get(s.url + "/cluster/keys", headers=bearer(admin))).json()["keys"]
            mine = next(each for each in used if each["id"] == id_of(key))
            assert mine == {
                "id": id_of(key),
                "name": "someone",
                "group": id_of(key),
                "requests": 4,
                "prompt_tokens": 20,
                "output_tokens": 30,
                "over_quota": 3,
                "streams": 0,
            }

    run(test())


def test_what_the_cluster_refuses_costs_no_tokens(opened: Open, path: Path) -> None:
    key = make_key(path, tokens_per_minute=100)

    async def test() -> None:
        async with opened(keys=str(path)) as s:
            for n in range(1, 4):
                asked = asyncio.create_task(complete(s, key, [9] * 100))
                s.reject(await s.arrival(n), RejectReason.QUEUE_FULL)
                response = await asked
                assert (response.status_code, response.headers["x-moonpool-reason"]) == (429, "queue-full")

    run(test())


def test_streams_at_one_time(opened: Open, path: Path) -> None:
    key, other = make_key(path, streams=2), make_key(path)

    async def test() -> None:
        async with opened(keys=str(path)) as s:
            s.places = True
            first = asyncio.create_task(complete(s, key, max_tokens=3))
            works = [await s.order(1)]
            second = asyncio.create_task(complete(s, key, max_tokens=3, stream=True))
            works.append(await s.order(2))
            assert quota_of(await complete(s, key))[0] == "streams"
            third = asyncio.create_task(complete(s, other, max_tokens=3))
            works.append(await s.order(3))
            for work in works:
                s.say(work, [50] * 3)
            assert {(await each).status_code for each in (first, second, third)} == {200}
            pair = asyncio.create_task(complete(s, key, ["a", "b"], max_tokens=1))
            s.say(await s.order(4), [50])
            assert quota_of(await complete(s, key))[0] == "streams"
            s.say(await s.order(5), [50])
            assert (await pair).status_code == 200
            never = await complete(s, key, ["a", "b", "c"])
            assert (never.status_code, never.json()["error"]["param"]) == (400, "prompt")
            assert "2 streams" in never.text
            gone = asyncio.create_task(complete(s, key, ["a", "b"], max_tokens=9))
            await s.order(7)
            gone.cancel()
            await until(lambda: not any(each.streams for each in s.gateway.keyring.usage()))  # type: ignore[union-attr]

    run(test())


# ---- classes and limits

CLASSES = (
    PriorityClass("high", rank=0, slo=Slo(ttft=1.0)),
    PriorityClass("middle", rank=5),
    PriorityClass("low", rank=9),
)


def test_a_key_bounds_the_class_of_its_requests(opened: Open, path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain, middle = make_key(path), make_key(path, classes=("middle", "high", "gold"))
    low = make_key(path, classes=("low",))
    expected: list[tuple[str, object, str | None]] = [
        (plain, None, "low"),  # the default: the last, where none is called so
        (plain, "batch", "batch"),
        (plain, "middle", None),
        (plain, 5, None),
        (plain, -7, None),
        (plain, 100, "low"),
        (middle, None, "middle"),
        (middle, "high", "high"),
        (middle, "low", "low"),
        (middle, 0, "high"),
        (middle, 6, "low"),
        (low, "high", None),
        (low, "low", "low"),
    ]

    async def test() -> None:
        async with opened(answer=lambda work: [END], keys=str(path), classes=CLASSES) as s:
            arrived = 0
            for key, asked, given in expected:
                response = await complete(s, key, priority=asked)
                if given is None:
                    assert response.status_code == 403, (asked, response.text)
                    error = response.json()["error"]
                    assert (error["param"], error["code"]) == ("priority", "class_not_allowed")
                    continue
                assert response.status_code == 200, (asked, response.text)
                arrived += 1
                assert (await s.arrival(arrived)).priority == given, asked
            assert (await complete(s, middle, priority="gold")).status_code == 400
            assert f"not configured are named by API keys {id_of(middle)}" in caplog.text

    run(test())


def test_limits_of_a_key_go_before_those_of_a_class_and_behind_a_request_s(opened: Open, path: Path) -> None:
    key = make_key(path, slo_ttft=0.5, classes=("high",))

    async def test() -> None:
        async with opened(answer=lambda work: [END], keys=str(path), classes=CLASSES) as s:
            await complete(s, key)
            assert (await s.arrival(1)).slo == Slo(ttft=0.5)
            await s.post("/v1/completions", COMPLETION, x_slo_ttft_ms="250", x_slo_tpot_ms="40", **bearer(key))
            assert (await s.arrival(2)).slo == Slo(ttft=0.25, tbt=0.04)

    run(test())


# ---- what tenants share


def test_block_keys_differ_by_tenant_and_by_the_request_s_own_salt(opened: Open, path: Path) -> None:
    mine, others = make_key(path, group="us"), make_key(path)
    ours = make_key(path, group="us")
    prompt = [9] * 200

    async def test() -> None:
        async with opened(answer=lambda work: [END], keys=str(path)) as s:
            seen = []
            for key, salt in ((mine, ""), (ours, ""), (others, ""), (mine, "x"), (ours, "x"), (others, "x")):
                assert (await complete(s, key, prompt, cache_salt=salt)).status_code == 200
                seen.append((await s.arrival(len(seen) + 1)).chains[0].keys)
            a, b, c, d, e, f = (frozenset(keys) for keys in seen)
            assert len(a) == 3
            assert (a, d) == (b, e), "of one group"
            for one, other in ((a, c), (d, f), (a, d), (c, f), (a, f), (c, d)):
                assert not one & other
            salts = {(await s.order(n)).salt for n in range(1, 7)}
            assert len(salts) == 4
            for salt in salts:  # whoever learns one, and asks for it, still has keys of his own
                await complete(s, others, prompt, cache_salt=salt)
            for n in range(7, 11):
                assert not frozenset((await s.arrival(n)).chains[0].keys) & (a | d)

    run(test())


def test_salts_are_the_same_after_a_restart_and_at_another_gateway(opened: Open, path: Path) -> None:
    key = make_key(path)
    seen = []

    async def test() -> None:
        async with opened(answer=lambda work: [END], keys=str(path)) as s:
            await complete(s, key, [9] * 100)
            seen.append((await s.arrival()).chains)

    run(test())
    later = make_key(path, group=id_of(key))  # a key that takes the place of another keeps its KVCache

    async def again() -> None:
        async with opened(answer=lambda work: [END], keys=str(path)) as s:
            for n, each in enumerate((key, later), 1):
                assert (await complete(s, each, [9] * 100)).status_code == 200
                seen.append((await s.arrival(n)).chains)

    run(again())
    assert seen[0] == seen[1] == seen[2]


def test_an_answer_is_remembered_for_its_tenant_only(opened: Open, tokenizer: Tokenizer, path: Path) -> None:
    """The ids of an answer that are not what its text is tokenized to show whether it was recalled."""
    mine, others = make_key(path), make_key(path)
    text = "ab"
    ids = [i for letter in text for i in tokenizer.encode(letter, special_tokens=False)]
    assert ids != tokenizer.encode(text, special_tokens=False)

    async def test() -> None:
        async with opened(answer=lambda work: [*ids, END], keys=str(path)) as s:
            first = {"role": "user", "content": "Hi"}
            turn = {"messages": [first, {"role": "assistant", "content": text}, first]}
            assert (await s.post("/v1/chat/completions", {"messages": [first]}, **bearer(mine))).status_code == 200
            for key in (mine, others):
                assert (await s.post("/v1/chat/completions", turn, **bearer(key))).status_code == 200
            prompts = [list((await s.order(n)).tokens) for n in (2, 3)]
            assert has(prompts[0], ids)
            assert not has(prompts[1], ids)

    run(test())


def has(tokens: list[int], part: list[int]) -> bool:
    return any(tokens[at : at + len(part)] == part for at in range(len(tokens)))


# ---- what is told


def test_no_key_is_logged_and_metrics_name_no_tenant(
    opened: Open, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    key, gone = make_key(path, "acme"), make_key(path, "umbrella")
    caplog.set_level(logging.DEBUG)

    async def test() -> None:
        async with opened(answer=lambda work: [END], keys=str(path)) as s:
            assert (await complete(s, key)).status_code == 200
            assert (await complete(s, wrong(key))).status_code == 401
            await asyncio.to_thread(revoke, path, gone)
            await served(s, gone, 401)
            page = (await s.client.get(s.url + "/metrics")).text
            assert 'requests_unauthenticated_total{model_name="smollm2",reason="wrong"}' in page
            assert 'api_keys{model_name="smollm2"} 1.0' in page
            for told in ("acme", "umbrella", id_of(key), id_of(gone)):
                assert told not in page

    run(test())
    logged = "\n".join(each.getMessage() for each in caplog.records if each.name.startswith("moonpool"))
    assert f"key {id_of(key)}" in logged
    assert f"revoked: {id_of(gone)}" in logged
    for each in (key, wrong(key), gone):
        assert each.rpartition("-")[2] not in logged
