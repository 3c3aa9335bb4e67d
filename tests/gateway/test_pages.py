"""Everything but completions; the official client; and how a gateway starts and ends."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import openai
import pytest

from moonpool.core.vocabulary import PartId
from moonpool.errors import ConfigError
from moonpool.gateway.config import GatewayConfig
from moonpool.gateway.front import host_name
from moonpool.gateway.problem import ApiError
from moonpool.gateway.seats import Seats
from moonpool.gateway.serve import listen, run_gateway
from moonpool.gateway.tokenizer import Tokenizer
from moonpool.wire.link import Link
from tests.gateway.conftest import Open
from tests.gateway.kit import CONTEXT, END, MODEL, Answer, Stage, chat_body, run, until
from tests.keys import bearer, make_key


def spelling(tokenizer: Tokenizer, text: str) -> Answer:
    ids = [*tokenizer.encode(text, special_tokens=False), END]
    return lambda work: ids


def test_models_and_health(opened: Open) -> None:
    async def test() -> None:
        async with opened() as s:
            get = s.client.get
            listed = (await get(s.url + "/v1/models")).json()
            assert [m["id"] for m in listed["data"]] == [MODEL]
            assert listed["data"][0]["max_model_len"] == CONTEXT
            assert (await get(f"{s.url}/v1/models/{MODEL}")).json()["id"] == MODEL
            missing = await get(s.url + "/v1/models/other/one")
            assert missing.status_code == 404
            assert missing.json()["error"]["code"] == "model_not_found"
            assert (await get(s.url + "/health")).status_code == 200
            assert (await get(s.url + "/ready")).json() == {"ready": True}
            assert (await get(s.url + "/version")).json()["version"]

    run(test())


def test_workers_that_have_no_node_yet_make_nothing_ready(opened: Open) -> None:
    async def test() -> None:
        async with opened() as s:
            s.announce(on=None)
            await until(lambda: s.gateway.cluster.fleet.lacks)
            ready = await s.client.get(s.url + "/ready")
            assert ready.status_code == 503
            assert "no prefill worker" in ready.text
            s.announce()
            await until(lambda: not s.gateway.cluster.fleet.lacks)
            assert (await s.client.get(s.url + "/ready")).status_code == 200

    run(test())


def test_tokenize_and_back(opened: Open, tokenizer: Tokenizer) -> None:
    async def test() -> None:
        async with opened() as s:
            body = (await s.post("/tokenize", {"model": MODEL, "prompt": "Grüße 😀", "return_token_strs": True})).json()
            ids = tokenizer.encode("Grüße 😀", special_tokens=True)
            assert body["tokens"] == ids
            assert (body["count"], body["max_model_len"]) == (len(ids), CONTEXT)
            assert len(body["token_strs"]) == len(ids)
            back = (await s.post("/detokenize", {"model": MODEL, "tokens": ids})).json()
            assert back == {"prompt": "Grüße 😀"}
            chat = (await s.post("/tokenize", {"messages": chat_body()["messages"]})).json()
            assert tokenizer.decode(chat["tokens"], skip_special=False).endswith("<|im_start|>assistant\n")
            assert chat["token_strs"] is None
            for bad, param in (
                ({"prompt": "a", "messages": []}, "prompt"),
                ({}, "prompt"),
                ({"prompt": 5}, "prompt"),
                ({"prompt": "a", "x": 1}, "x"),
            ):
                response = await s.post("/tokenize", bad)
                assert (response.status_code, response.json()["error"]["param"]) == (400, param)
            for tokens in (["a"], [-1], [49152], "a", None):
                response = await s.post("/detokenize", {"tokens": tokens})
                assert (response.status_code, response.json()["error"]["param"]) == (400, "tokens")

    run(test())


def test_metrics_of_gateway_and_parts(opened: Open, tokenizer: Tokenizer) -> None:
    async def test() -> None:
        async with opened(answer=spelling(tokenizer, "four words of text")) as s:
            s.cached_tokens = 3
            await s.complete([9] * 10, max_tokens=50)
            await s.complete([9] * 10, max_tokens=2)
            await s.complete(max_tokens=0)
            page = (await s.client.get(s.url + "/metrics")).text
            expected = {
                'moonpool:prompt_tokens_total{model_name="smollm2"}': 20,
                'moonpool:prefix_cache_queries_total{model_name="smollm2"}': 20,
                'moonpool:prefix_cache_hits_total{model_name="smollm2"}': 6,
                'moonpool:generation_tokens_total{model_name="smollm2"}': 7,
                'moonpool:time_to_first_token_seconds_count{model_name="smollm2"}': 2,
                'moonpool:inter_token_latency_seconds_count{model_name="smollm2"}': 5,
                'moonpool:e2e_request_latency_seconds_count{model_name="smollm2"}': 2,
                'moonpool:request_success_total{finished_reason="stop",model_name="smollm2"}': 1,
                'moonpool:request_success_total{finished_reason="length",model_name="smollm2"}': 1,
                'moonpool:http_requests_total{path="/v1/completions",status="400"}': 1,
                'moonpool:num_requests_running{model_name="smollm2"}': 0,
                'moonpool:kv_cache_usage_perc{model_name="smollm2"}': 0.25,
                'moonpool:node_bytes_in{node="node-0"}': 100,
                'moonpool:node_blocks{node="node-0"}': 2,
                'moonpool:decode_pages_free{decode="decode-0"}': 6,
                'moonpool:conductor_placed{conductor="conductor"}': 3,
                'moonpool:class_arrived{class="high"}': 5,
                'moonpool:class_queued{class="high"}': 1,
                'moonpool:class_queued{class="batch"}': 0,
            }
            values = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
            assert {name: float(values[name]) for name in expected} == expected
            s.describes = False
            began = time.monotonic()
            page = (await s.client.get(s.url + "/metrics")).text
            assert "moonpool:prompt_tokens_total" in page
            assert "node_bytes_in" not in page
            assert time.monotonic() - began < 25

    run(test())


def test_cluster_state(opened: Open) -> None:
    async def test() -> None:
        async with opened(answer=lambda work: [END]) as s:
            await s.complete()
            state = (await s.client.get(s.url + "/cluster")).json()
            assert state["decisions"]["placed"] == 3
            assert state["gateway"]["requests"] == 1
            assert state["gateway"]["seats_taken"] == 0
            s.describes = False
            response = await s.client.get(s.url + "/cluster")
            assert response.status_code == 503
            assert response.json()["error"]["code"] == "no_conductor"

    run(test())


def test_the_story_of_a_request(opened: Open) -> None:
    async def test() -> None:
        async with opened() as s:
            response = await s.client.get(s.url + "/cluster/requests/mine%2F1")
            assert response.json() == [{"request": "g-1", "outcome": "finished"}]
            for name in ("nobody", ""):
                response = await s.client.get(s.url + f"/cluster/requests/{name}")
                assert response.status_code == 404
                error = response.json()["error"]
                assert error["code"] == "request_not_found"
                assert repr(name) in error["message"]
            s.describes = False
            assert (await s.client.get(s.url + "/cluster/requests/mine%2F1")).status_code == 503

    run(test())


def test_pages_of_blocks(opened: Open) -> None:
    async def test() -> None:
        async with opened() as s:
            first = await s.client.get(s.url + "/cluster/blocks")
            assert (first.status_code, first.headers["content-type"]) == (200, "application/json")
            following = first.json()["next"]
            last = await s.client.get(s.url + "/cluster/blocks", params={"after": following})
            assert last.json() == {"blocks": [], "next": None}
            wrong = await s.client.get(s.url + "/cluster/blocks", params={"after": "elsewhere"})
            assert wrong.status_code == 400
            assert wrong.json()["error"]["param"] == "after"
            s.describes = False
            assert (await s.client.get(s.url + "/cluster/blocks")).status_code == 503

    run(test())


# ---- the official client


def test_the_openai_client(opened: Open, tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("Paris, of course.", special_tokens=False), END]

    async def test() -> None:
        async with opened(answer=lambda work: ids) as s:
            client = openai.AsyncOpenAI(base_url=s.url + "/v1", api_key="none", max_retries=0, timeout=20)
            async with client:
                messages: Any = [{"role": "user", "content": "Where?"}]
                chat: Any = await client.chat.completions.create(
                    model=MODEL, messages=messages, logprobs=True, top_logprobs=2, seed=3, max_completion_tokens=50
                )
                assert chat.choices[0].message.content == "Paris, of course."
                assert chat.system_fingerprint.startswith("fp_")
                content = chat.choices[0].logprobs.content
                assert "".join(t.token for t in content) == "Paris, of course."
                assert len(content[0].top_logprobs) == 2
                assert chat.usage.prompt_tokens_details.cached_tokens == 0
                stream: Any = await client.chat.completions.create(
                    model=MODEL, messages=messages, stream=True, stream_options={"include_usage": True}
                )
                chunks = [chunk async for chunk in stream]
                assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Paris, of course."
                assert chunks[-1].usage.completion_tokens == len(ids)
                text = await client.completions.create(
                    model=MODEL, prompt=["a", "b"], stop=["of"], logprobs=1, max_tokens=20
                )
                assert [c.text for c in text.choices] == ["Paris, ", "Paris, "]
                assert text.choices[0].logprobs is not None
                assert [m.id async for m in client.models.list()] == [MODEL]
                with pytest.raises(openai.NotFoundError, match="nosuch"):
                    await client.completions.create(model="nosuch", prompt="a")
                with pytest.raises(openai.BadRequestError, match="response_format"):
                    await client.chat.completions.create(
                        model=MODEL, messages=messages, response_format={"type": "json_object"}
                    )

    run(test())


# ---- parts


def test_seats_say_how_long_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    seats = Seats(4)
    with seats.take() as booking:
        booking.extend(3)
        with pytest.raises(ApiError) as refused, seats.take():
            pass
        assert refused.value.status == 429
    assert seats.taken == 0
    assert seats.wait_seconds(4) == 0
    for _ in range(60):  # two are freed every 8 s
        now += 8.0
        with seats.take() as booking:
            booking.extend(3)
    with seats.take() as booking:
        booking.extend(3)
        assert seats.wait_seconds(1) == pytest.approx(2.0, rel=0.05)
        assert seats.wait_seconds(2) == pytest.approx(4.0, rel=0.05)
    seats.check_integrity()


def test_host_names() -> None:
    names = {"a.B:80": "a.b", "[::1]:8": "::1", "[::1]": "::1", "::1": "::1", "h": "h", "h:": "h", "": ""}
    assert {host: host_name(host) for host in names} == names


def test_a_taken_port_is_one_line(smollm2: Path) -> None:
    async def test() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            link = Link(PartId("gateway-0"), "127.0.0.1", 0, None)
            config = GatewayConfig(port=port, model_path=str(smollm2), served_model_name=MODEL)
            try:
                with pytest.raises(ConfigError, match=f"127.0.0.1:{port}") as told:
                    await run_gateway(link, "tcp://127.0.0.1:1", config)
                assert "\n" not in str(told.value)
            finally:
                link.close()
        with pytest.raises(ConfigError, match="cannot listen on nowhere"):
            listen("nowhere.invalid", 80)

    run(test())


def test_a_gateway_ends_quickly_with_a_stream_open(smollm2: Path) -> None:
    async def test() -> None:
        s = Stage()
        s.start()
        link = Link(PartId("gateway-0"), "127.0.0.1", 0, None)
        config = GatewayConfig(port=0, model_path=str(smollm2), served_model_name=MODEL)
        listener = listen("127.0.0.1", 0)
        s.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        life = asyncio.create_task(run_gateway(link, s.conductor.me.address, config, listener))
        s.places = True
        try:
            asked = asyncio.create_task(s.complete(max_tokens=100, stream=True))
            for _ in range(200):
                if asked.done():
                    assert asked.result().status_code == 503, "it was asked before the fleet was there"
                    asked = asyncio.create_task(s.complete(max_tokens=100, stream=True))
                if s.got("prefill-0", object):
                    break
                await asyncio.sleep(0.02)
            s.say(await s.order(), [50, 51, 52])
            idle = socket.create_connection(("127.0.0.1", listener.getsockname()[1]))
            await asyncio.sleep(0.1)
            began = time.monotonic()
            life.cancel()
            with pytest.raises(asyncio.CancelledError):
                await life
            assert time.monotonic() - began < 12.5
            assert '"error"' in (await asked).text
            await s.cancelled_everywhere()
            idle.close()
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", int(s.url.rsplit(":", 1)[1])), timeout=1)
        finally:
            life.cancel()
            await s.close()
            link.close()

    run(test())


def test_a_gateway_does_not_import_torch() -> None:
    program = "import sys, moonpool.gateway.serve; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0


def test_instances_cannot_be_registered_where_workers_serve(opened: Open, tmp_path: Path) -> None:
    key = bearer(make_key(tmp_path / "keys.json", admin=True))

    async def test() -> None:
        async with opened(keys=str(tmp_path / "keys.json")) as s:
            url = s.url + "/cluster/instances"
            for answer in (
                await s.client.get(url, headers=key),
                await s.client.post(url, json={}, headers=key),
                await s.client.delete(url + "/x", headers=key),
            ):
                assert (answer.status_code, "--instances" in answer.text) == (404, True)

    run(test())
