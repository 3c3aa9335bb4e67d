"""Tenants on a live cluster: what they share, what a restart keeps, how soon a key goes, and where none is told."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import openai
import pytest

from moonpool.bench.cluster import RunningCluster, running_cluster
from moonpool.core.blocks import block_keys
from moonpool.core.vocabulary import KeySpace
from moonpool.gateway.keys.file import read
from moonpool.gateway.keys.secret import id_of
from moonpool.wire import journal
from tests.keys import bearer, make_key, wrong
from tests.live.kit import BLOCK, HANG, eventually, pid_of, random_prompt
from tests.live.tenants import Tenants
from tests.replay.kit import moonpool_command

pytestmark = pytest.mark.live

PROMPT_TOKENS = 5 * BLOCK + 10


@pytest.fixture
def tenants(smollm2: object, tmp_path: Path) -> Iterator[Tenants]:
    file, kept = tmp_path / "keys.json", tmp_path / "journal"
    admin = make_key(file, "operator", admin=True)
    flags = ("--keys", str(file), "--journal", str(kept), "--log-level", "debug")
    with running_cluster("--engine", "timed", "--nodes", "2", *flags) as cluster:
        yield Tenants(cluster, file, kept, admin)


def test_two_tenants_share_no_block_and_a_group_shares_all(tenants: Tenants) -> None:
    prompt = random_prompt(PROMPT_TOKENS, seed=1)
    whole = len(prompt) // BLOCK
    mine, others = tenants.key("acme", group="acme"), tenants.key("umbrella")
    ours = tenants.key("acme-batch", group="acme")
    nothing = tenants.directory()

    assert tenants.cached(mine, prompt) == 0
    own = tenants.grows_by(nothing, whole)
    assert tenants.cached(mine, prompt) == whole * BLOCK
    assert tenants.cached(others, prompt) == 0, "another tenant computes all of it"
    theirs = tenants.grows_by(nothing | own, whole)
    assert tenants.cached(others, prompt) == whole * BLOCK
    assert tenants.cached(ours, prompt) == whole * BLOCK, "of one group"
    assert tenants.directory() == nothing | own | theirs

    assert tenants.cached(others, prompt, cache_salt="x") == 0
    salted = tenants.grows_by(nothing | own | theirs, whole)
    assert tenants.cached(mine, prompt, cache_salt="x") == 0, "the same salt of another tenant"
    assert tenants.cached(ours, prompt, cache_salt="x") == whole * BLOCK
    tenants.grows_by(nothing | own | theirs | salted, whole)

    parts = tenants.look("/cluster")["parts"]
    space = next(msgspec.convert(part["space"], KeySpace) for part in parts if part["kind"] == "prefill")
    for salt in ("", "x", "acme", "umbrella"):
        guessed = {key.hex() for key in block_keys(prompt, space, salt)}
        assert not guessed & tenants.directory(), "no salt that can be guessed leads there"


def test_a_restart_keeps_keys_and_what_is_cached_for_whom(tenants: Tenants) -> None:
    prompt = random_prompt(PROMPT_TOKENS, seed=2)
    mine, gone = tenants.key("acme"), tenants.key("umbrella")
    nothing = tenants.directory()
    tenants.complete(mine, prompt)
    own = tenants.grows_by(nothing, len(prompt) // BLOCK)
    before = pid_of(tenants.cluster, "gateway-0")
    os.kill(before, signal.SIGKILL)
    assert moonpool_command("keys", "revoke", str(id_of(gone)), "--keys", str(tenants.file)).returncode == 0
    late = make_key(tenants.file, "late")
    eventually(lambda: is_ready(tenants.cluster), "the gateway is back")
    assert pid_of(tenants.cluster, "gateway-0") != before
    assert (tenants.status(gone), tenants.status(late)) == (401, 200)
    eventually(lambda: own <= tenants.directory(), "the nodes have told the new Conductor what they have")
    assert tenants.cached(late, prompt) == 0
    assert tenants.cached(mine, prompt) == len(prompt) // BLOCK * BLOCK


def is_ready(cluster: RunningCluster) -> bool:
    try:
        return httpx.get(f"{cluster.url}/ready", timeout=HANG).status_code == 200
    except httpx.HTTPError:
        return False


def test_keys_with_the_official_client_and_the_commands(tenants: Tenants, monkeypatch: pytest.MonkeyPatch) -> None:
    eventually(lambda: "Bearer $MOONPOOL_API_KEY" in tenants.cluster.log(), "serve says how to ask")
    made = moonpool_command("keys", "add", "acme", "--keys", str(tenants.file), "--tokens-per-minute", "1000")
    key = made.stdout.strip()
    tenants.keys.append(key)
    eventually(lambda: tenants.status(key) == 200, "the key is taken")
    url = f"{tenants.cluster.url}/v1"
    with openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=HANG) as client:
        answer = client.completions.create(model="smollm2", prompt=random_prompt(900, seed=3), max_tokens=99)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 99
        with pytest.raises(openai.RateLimitError, match="tokens-per-minute of 1000") as refused:
            client.completions.create(model="smollm2", prompt=random_prompt(600, seed=4), max_tokens=9)
        assert 1 < int(refused.value.response.headers["retry-after"]) <= 36
        with (
            openai.OpenAI(base_url=url, api_key=wrong(key), max_retries=0, timeout=HANG) as other,
            pytest.raises(openai.AuthenticationError, match="wrong, or has been revoked"),
        ):
            other.models.list()
        assert moonpool_command("keys", "revoke", str(id_of(key)), "--keys", str(tenants.file)).returncode == 0
        until = time.monotonic() + 1.0
        while tenants.status(key) == 200:
            assert time.monotonic() < until, "it is still let in"
        with pytest.raises(openai.AuthenticationError):
            client.models.list()

    status = ("status", "--once", "--url", tenants.cluster.url)
    without = moonpool_command(*status)
    assert (without.returncode, "MOONPOOL_API_KEY" in without.stderr) == (1, True), without.stderr
    monkeypatch.setenv("MOONPOOL_API_KEY", tenants.admin)
    assert "decode-0" in moonpool_command(*status).stdout


def test_no_key_is_told_by_logs_journal_or_trace(tenants: Tenants, tmp_path: Path) -> None:
    key = tenants.key("acme")
    tenants.complete(key, random_prompt(PROMPT_TOKENS, seed=5), cache_salt="of-the-request")
    assert tenants.status(wrong(key)) == 401

    def kept() -> bytes:
        return b"".join(file.read_bytes() for file in journal.segments_in(tenants.journal))

    label = f"x-{time.monotonic_ns()}"
    httpx.post(
        f"{tenants.cluster.url}/v1/completions",
        json={"model": "smollm2", "prompt": "Hi", "max_tokens": 3},
        headers={**bearer(key), "x-request-id": label},
        timeout=HANG,
    )
    eventually(lambda: label.encode() in kept(), "the journal has it")
    trace = tmp_path / "trace.jsonl"
    recorded = moonpool_command("record", str(trace), "--journal", str(tenants.journal))
    assert recorded.returncode == 0, recorded.stderr
    log = tenants.cluster.log()
    assert f"key {id_of(key)}" in log, "the id says whose request it was"
    file = read(tenants.file)
    secrets = [each.rpartition("-")[2] for each in (*tenants.keys, wrong(key))]
    secrets += [file.secret, "of-the-request", *(each.hash for each in file.keys)]
    for secret in secrets:
        assert secret not in log
        assert secret.encode() not in kept()
        assert secret not in trace.read_text()
    assert str(id_of(key)).encode() not in kept(), "the scheduler knows nothing of tenants"
    assert json.loads(trace.read_text().splitlines()[0])["input_length"] == PROMPT_TOKENS
