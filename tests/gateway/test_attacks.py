"""Attacks on API keys: odd requests, and a keys file that anything may happen to while the gateway runs."""

from __future__ import annotations

import asyncio
import json
import os
import random
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from moonpool.errors import ConfigError
from moonpool.gateway.keys.file import KeyFile, edit, read
from moonpool.gateway.keys.quota import Allowance, Quota
from tests.gateway.conftest import Open
from tests.gateway.kit import END, Stage, connected, run, until
from tests.keys import bearer, change, make_key, revoke
from tests.soak import often


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


# ---- requests


@pytest.mark.parametrize("end", ["%0A", "%0a", "%0D%0A", "%00", "%7F", "%0A%0A"])
def test_no_path_gets_past_a_check_by_a_line_s_end(opened: Open, path: Path, end: str) -> None:
    user = make_key(path)

    async def test() -> None:
        async with opened(answer=lambda work: [END], keys=str(path)) as s:
            for where in ("/cluster", "/cluster/keys", "/v1/models", "/health"):
                response = await s.client.get(s.url + where + end, headers=bearer(user))
                assert response.status_code == 404, (where, response.text[:200])
                assert response.json()["error"]["code"] == "not_found"
            plain = {**bearer(user), "content-type": "text/plain"}
            body = b'{"prompt": "Hi"}'
            answer = await s.client.post(s.url + "/v1/completions" + end, content=body, headers=plain)
            assert answer.status_code == 404, "else a page of another site could post it"

    run(test())


def test_other_spellings_of_cluster_paths_are_no_way_in(opened: Open, path: Path) -> None:
    user = make_key(path)
    spellings = [
        "/%63luster",
        "/cluster%2Fkeys",
        "/cluster/",
        "/cluster?a=/health",
        "/cluster/keys;a=1",
        "/health/../cluster",
        "/dashboard/../cluster",
        "/dashboard/%2e%2e/cluster",
        "/dashboard%2F..%2Fcluster",
        "//cluster",
        "/./cluster",
        "/CLUSTER",
        "/cluster#x",
        "http://127.0.0.1/cluster",
    ]

    async def test() -> None:
        async with opened(keys=str(path)) as s:
            for spelling in spellings:
                async with connected(s) as talk:
                    head = f"GET {spelling} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {user}\r\n\r\n"
                    await talk.send(head.encode())
                    status = int((await talk.answer()).split(b" ")[1])
                    assert status in (400, 401, 403, 404), spelling

    run(test())


def test_headers_that_two_parsers_would_read_differently_let_nobody_in(opened: Open, path: Path) -> None:
    user, admin = make_key(path), make_key(path, admin=True)
    heads = {
        "two keys": f"Authorization: Bearer {user}\r\nAuthorization: Bearer {admin}\r\n",
        "two in one": f"Authorization: Bearer {user}, Bearer {admin}\r\n",
        "folded": f"Authorization: Bearer\r\n {admin}\r\n",
        "space before the colon": f"Authorization : Bearer {admin}\r\n",
        "bare line feed": f"X: y\nAuthorization: Bearer {admin}\r\n",
        "bare carriage return": f"X: y\rAuthorization: Bearer {admin}\r\n",
        "underscore": f"Authorization_: Bearer {admin}\r\n",
        "a nul in it": f"Authorization: Bearer {admin}\0\r\n",
        "forwarded": f"X-Forwarded-Authorization: Bearer {admin}\r\nProxy-Authorization: Bearer {admin}\r\n",
        "other spaces": f"Authorization: Bearer\u00a0{admin}\r\n",
        "not ASCII": "Authorization: Bearer mp-\u00e9\u00ff\r\n",
        "48 KB": f"Authorization: Bearer {'a' * (48 << 10)}\r\n",
        "80 KB": f"Authorization: Bearer {'a' * (80 << 10)}\r\n",
        "two lengths": f"Authorization: Bearer {user}\r\nContent-Length: 0\r\nContent-Length: 5\r\n",
        "length and chunks": f"Authorization: Bearer {user}\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n",
    }

    async def test() -> None:
        async with opened(keys=str(path)) as s:
            for why, lines in heads.items():
                async with connected(s) as talk:
                    await talk.send(f"GET /cluster/keys HTTP/1.1\r\nHost: localhost\r\n{lines}\r\n".encode("latin-1"))
                    answer = await talk.answer()
                    assert int(answer.split(b" ")[1]) in (400, 401, 403, 431), (why, answer[:300])
            response = await s.client.get(s.url + "/cluster/keys", headers=bearer(admin))
            assert [each["streams"] for each in response.json()["keys"]] == [0, 0]

    run(test())


def test_a_page_size_of_thousands_of_digits_is_a_mistake(opened: Open) -> None:
    async def test() -> None:
        async with opened() as s:
            for limit in ("000000001" + "9" * 5000, "0000000010", "9" * 5000):
                response = await s.client.get(s.url + "/v1/caching", params={"limit": limit})
                assert (response.status_code, response.json()["error"]["param"]) == (400, "limit")

    run(test())


# ---- quotas


def test_streams_are_given_back_however_requests_end(opened: Open, path: Path) -> None:
    key = make_key(path, streams=4, requests_per_minute=100_000, tokens_per_minute=300)
    rounds = often(120, 20)

    async def one(s: Stage, rng: random.Random) -> int:
        bodies: list[dict[str, Any]] = [
            {"prompt": "Hi", "max_tokens": 4},
            {"prompt": "Hi", "max_tokens": 4, "stream": True},
            {"prompt": ["Hi"] * rng.randint(1, 6), "max_tokens": 2},
            {"prompt": "Hi", "max_tokens": -1},
            {"prompt": [5] * 4000},
            {"prompt": [5] * 200, "max_tokens": 4},
            {"prompt": "Hi", "priority": "first"},
        ]
        body, seconds = rng.choice(bodies), rng.choice((0.002, 0.01, 0.03, 30.0))
        try:
            response = await s.client.post(s.url + "/v1/completions", json=body, headers=bearer(key), timeout=seconds)
        except httpx.TimeoutException:
            return 0
        return response.status_code

    async def test() -> None:
        rng = random.Random(7)
        async with opened(answer=lambda work: [5] * work.sampling.max_tokens, keys=str(path)) as s:
            assert s.gateway.keyring is not None
            came = set(await asyncio.gather(*(one(s, rng) for _ in range(rounds))))
            assert came <= {0, 200, 400, 429}
            assert {200, 400, 429} <= came
            await until(lambda: s.gateway.keyring.usage()[0].streams == 0)  # type: ignore[union-attr]
            s.gateway.keyring.check_integrity()
            assert s.gateway.seats.taken == 0

    run(test())


def test_after_hours_a_quota_is_a_minute_s_worth_and_no_more() -> None:
    quota = Quota(Allowance(requests_per_minute=60, tokens_per_minute=1 << 40, streams=1), 0.0)
    quota.take(0.0, requests=60, tokens=1 << 50)
    for now in (36_000.0, 360_000.0, 1e9):
        assert quota.over(now, requests=60, streams=1) is None
        quota.take(now, requests=60)
        found = quota.over(now, requests=1)
        assert found is not None
        assert 0.9 < found.wait < 1.1
    assert quota.over(36_000.0 + 1e9, tokens=1 << 40) is None


@pytest.mark.parametrize("limit", [-1, 0, 1.5, (1 << 40) + 1, 1 << 70, True, "9"])
@pytest.mark.parametrize("quota", ["requests-per-minute", "tokens-per-minute", "streams"])
def test_quotas_that_are_none_are_refused(path: Path, quota: str, limit: object) -> None:
    make_key(path)
    kept = json.loads(path.read_text())
    kept["keys"][0][quota] = limit
    path.write_text(json.dumps(kept))
    with pytest.raises(ConfigError, match="is no file of API keys"):
        read(path)


# ---- the file


def test_a_damaged_file_is_read_or_refused_and_nothing_else(path: Path) -> None:
    rng = random.Random(11)
    make_key(path, "acme", classes=("a", "b"), streams=4, slo_ttft=1.5)
    make_key(path, "umbrella", admin=True, group="both")
    sound = path.read_bytes()
    refused = longest = 0
    for _ in range(often(2000)):
        data = bytearray(sound)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(data))
            match rng.randrange(4):
                case 0:
                    data[at] = rng.randrange(256)
                case 1:
                    del data[at : at + rng.randint(1, 40)]
                case 2:
                    data[at:at] = rng.choice((b'"', b"{", b"[", b"\\ud800", b"1e999", b"null", b"\xff", b"9" * 5000))
                case _:
                    del data[at:]
            data = data or bytearray(b" ")
        path.write_bytes(data)
        try:
            assert isinstance(read(path), KeyFile)
        except ConfigError as e:
            refused += 1
            longest = max(longest, len(str(e)))
    assert refused > 100
    assert longest < 1000


def test_whatever_happens_to_the_file_a_gateway_goes_on(opened: Open, path: Path, tmp_path: Path) -> None:
    """Replaced, cut off, emptied, deleted, a link, a link to itself, a directory, a pipe, open to others."""
    key = make_key(path)
    sound = path.read_bytes()

    def remove() -> None:
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)

    def put(data: bytes, mode: int = 0o600) -> None:
        remove()
        path.write_bytes(data)
        path.chmod(mode)

    def link(to: Path) -> None:
        remove()
        path.symlink_to(to)

    def directory() -> None:
        remove()
        path.mkdir()

    def pipe() -> None:
        remove()
        os.mkfifo(path, 0o600)

    faults = [
        lambda: put(sound[:-40]),
        lambda: put(b""),
        remove,
        lambda: link(path),
        lambda: link(tmp_path / "nowhere"),
        directory,
        pipe,
        lambda: put(sound, 0o644),
        lambda: put(b"[" * 100_000),
    ]

    async def test() -> None:
        async with opened(keys=str(path)) as s:
            keyring = s.gateway.keyring
            assert keyring is not None
            for fault in faults:
                fault()
                await until(lambda: keyring.fault)
                assert (await s.client.get(s.url + "/v1/models", headers=bearer(key))).status_code == 200
                metrics = (await s.client.get(s.url + "/metrics")).text
                assert "moonpool:api_keys_stale{" in metrics or "moonpool:api_keys_stale 1" in metrics
                put(sound)
                await until(lambda: not keyring.fault)
            other = tmp_path / "other.json"
            other.write_bytes(sound)
            other.chmod(0o600)
            link(other)
            revoke(path, key)
            await until(lambda: keyring.count == 0)
            assert (await s.client.get(s.url + "/v1/models", headers=bearer(key))).status_code == 401

    run(test())
    assert path.is_symlink()


def test_a_file_that_is_gone_before_the_first_look_is_news(opened: Open, path: Path) -> None:
    make_key(path)
    remove = path.unlink

    async def test() -> None:
        async with opened(keys=str(path)) as s:
            remove()
            await until(lambda: s.gateway.keyring.fault)  # type: ignore[union-attr]

    run(test())


def test_a_thousand_keys(opened: Open, path: Path) -> None:
    """They are followed as a few are."""
    key = make_key(path)
    one = read(path).keys[0]
    many = tuple(replace(one, id=f"{i:010x}", name=f"tenant-{i}") for i in range(999))
    edit(path, lambda file: replace(file, keys=(*file.keys, *many)))

    async def test() -> None:
        async with opened(keys=str(path)) as s:
            keyring = s.gateway.keyring
            assert keyring is not None
            assert keyring.count == 1000
            assert (await s.post("/tokenize", {"prompt": "Hi"}, **bearer(key))).status_code == 200
            change(path, key, requests_per_minute=1)
            edit(path, lambda file: replace(file, keys=file.keys[:500]))
            await until(lambda: keyring.count == 500)
            assert (await s.post("/tokenize", {"prompt": "Hi"}, **bearer(key))).status_code == 200
            assert (await s.post("/tokenize", {"prompt": "Hi"}, **bearer(key))).status_code == 429

    run(test())


@pytest.mark.parametrize("name", ["\u00e9t\u00e9", "a b", "", "-x", "x" * 65, "a\n", "\u0430cme", "a/b", "a\u202eb"])
def test_names_are_plain(path: Path, name: str) -> None:
    """Names stand in logs and tables: no letters that look like others, no line ends, nothing that turns text round."""
    make_key(path)
    for field in ("name", "group"):
        kept = json.loads(path.read_text())
        kept["keys"][0][field] = name
        path.write_text(json.dumps(kept))
        with pytest.raises(ConfigError):
            read(path)
        kept["keys"][0][field] = "fine"
        path.write_text(json.dumps(kept))
