"""`moonpool gateway --instances` as a user starts it, before a small server that speaks as vLLM does."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from moonpool.bench.cluster import RunningCluster, free_port
from tests.keys import bearer, make_key

from ..kit import HANG, complete, output_ids, random_prompt
from .fake import FakeVllm, answer_to

pytestmark = pytest.mark.live


@pytest.fixture
def server() -> Iterator[FakeVllm]:
    """In a thread of its own."""
    made, loop = FakeVllm(), asyncio.new_event_loop()
    made.models = ["smollm2"]
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    asyncio.run_coroutine_threadsafe(made.start(), loop).result(HANG)
    yield made
    asyncio.run_coroutine_threadsafe(made.stop(), loop).result(HANG)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def command(folder: Path, content: dict[str, object], port: int) -> list[str]:
    file = folder / "vllm.yaml"
    file.write_text(yaml.safe_dump(content))
    flags = ("--instances", str(file), "--port", str(port), "--journal", "off")
    return [sys.executable, "-P", "-m", "moonpool", "gateway", *flags]


def test_it_serves_openai_s_api_from_the_servers(server: FakeVllm, smollm2: Path, tmp_path: Path) -> None:
    content = {"model": "smollm2", "tokenizer": str(smollm2), "instances": [{"url": server.url}]}
    port, log = free_port(), tmp_path / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(command(tmp_path, content, port), stdout=out, stderr=out, stdin=subprocess.DEVNULL)
    gateway = RunningCluster(process, f"http://127.0.0.1:{port}", log)
    try:
        gateway.wait_ready()
        prompt = random_prompt(40, 1)
        answer = complete(gateway, prompt, 5)
        assert output_ids(answer) == answer_to(prompt, 5)
        models = httpx.get(f"{gateway.url}/v1/models", timeout=HANG).json()["data"]
        assert [model["id"] for model in models] == ["smollm2"]
        server.status = 400
        body = {"model": "smollm2", "prompt": "hello", "max_tokens": 3}
        refused = httpx.post(f"{gateway.url}/v1/completions", json=body, timeout=HANG)
        assert refused.status_code == 400
        assert "as it was told to" in refused.json()["error"]["message"]
        assert refused.headers["x-moonpool-reason"] == "unservable"
        metrics = gateway.get("/metrics").decode()
        assert "refused_by_server" in metrics
    finally:
        assert gateway.stop() == 0


def test_servers_are_registered_and_taken_out_with_an_admin_key(
    server: FakeVllm, smollm2: Path, tmp_path: Path
) -> None:
    content = {"model": "smollm2", "tokenizer": str(smollm2), "allowed-addresses": ["127.0.0.1"]}
    port, log = free_port(), tmp_path / "log"
    keys = tmp_path / "keys.json"
    key = bearer(make_key(keys, admin=True))
    words = [*command(tmp_path, content, port), "--keys", str(keys)]
    with log.open("wb") as out:
        process = subprocess.Popen(words, stdout=out, stderr=out, stdin=subprocess.DEVNULL)
    gateway = RunningCluster(process, f"http://127.0.0.1:{port}", log)
    try:
        until(lambda: is_up(gateway.url))
        url = f"{gateway.url}/cluster/instances"
        one = {"url": server.url, "id": "late"}
        assert httpx.get(url, headers=key, timeout=HANG).json() == {"instances": []}
        assert httpx.post(url, json=one, timeout=HANG).status_code == 401
        refused = httpx.post(url, json={"url": "http://10.0.0.1"}, headers=key, timeout=HANG)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "instance_refused")
        assert httpx.post(url, data={"url": server.url}, headers=key, timeout=HANG).status_code == 415
        added = httpx.post(url, json=one, headers=key, timeout=HANG)
        assert (added.status_code, added.json()) == (201, {"id": "late", "url": server.url, "role": "both"})
        gateway.wait_ready()
        prompt = random_prompt(40, 1)
        body = {"model": "smollm2", "prompt": prompt, "max_tokens": 5, "temperature": 0, "return_token_ids": True}
        answer = httpx.post(f"{gateway.url}/v1/completions", json=body, headers=key, timeout=HANG).json()
        assert output_ids(answer) == answer_to(prompt, 5)
        assert httpx.delete(f"{url}/late", timeout=HANG).status_code == 401
        assert httpx.delete(f"{url}/late", headers=key, timeout=HANG).status_code == 204
        assert httpx.delete(f"{url}/late", headers=key, timeout=HANG).status_code == 404
        assert httpx.get(url, headers=key, timeout=HANG).json() == {"instances": []}
        assert httpx.put(url, headers=key, timeout=HANG).status_code == 405
    finally:
        assert gateway.stop() == 0


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + HANG
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.05)


def is_up(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=HANG).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"model": "other"}, "vllm-0 at {url}: it serves smollm2, not other"),
        ({"tokenizer": "no/such/tokenizer/here"}, "no/such/tokenizer/here"),
        ({"instances": [{"url": "nowhere"}]}, "instances[0]: url 'nowhere' must be like http://host:8000"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(
    server: FakeVllm, smollm2: Path, tmp_path: Path, changed: dict[str, object], says: str
) -> None:
    content = {"model": "smollm2", "tokenizer": str(smollm2), "instances": [{"url": server.url}], **changed}
    ended = subprocess.run(command(tmp_path, content, free_port()), capture_output=True, text=True, timeout=HANG)
    assert ended.returncode == 2, ended.stderr
    last = ended.stderr.splitlines()[-1]
    assert last.startswith("moonpool: ")
    assert says.format(url=server.url) in last
