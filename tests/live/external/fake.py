"""A small HTTP server that speaks as vLLM 0.32 does, with recorded shapes; and that fails as it is told to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from aiohttp import web

from moonpool.core.vocabulary import KeySpace

MODEL = "tiny"
BLOCK = 16
METRICS = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="tiny"}} {running}
vllm:num_requests_waiting{{engine="0",model_name="tiny"}} 0.0
vllm:{usage}{{engine="0",model_name="tiny"}} 0.25
vllm:cache_config_info{{block_size="16",enable_prefix_caching="True",num_gpu_blocks="{blocks}",engine="0"}} 1.0
"""


def next_token(tokens: Sequence[int]) -> int:
    """Depends on all before it: a stream that lost, repeated or swapped one goes wrong."""
    return (sum(at * token for at, token in enumerate(tokens, 1)) * 31 + len(tokens)) % 900 + 5


def answer_to(prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class FakeVllm:
    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        """Of the completions asked for."""
        self.headers: list[dict[str, str]] = []
        self.dropped = 0
        """Streams whose reader left."""
        self.running = 0
        self.port = 0
        self.models = [MODEL]
        self.status = 200
        """Of completions."""
        self.health = 200
        self.dies_after: int | None = None
        """Tokens, after which the connection breaks."""
        self.stops_after: int | None = None
        """Tokens, the last one being the end token."""
        self.hangs_after: int | None = None
        self.never_ends = ""
        """`more`: it goes on with tokens after the last one; `at once`: in the same event; `silent`: nothing comes."""
        self.breaks_off_after: int | None = None
        """Tokens, after which an error comes in the stream."""
        self.space: KeySpace | None = None
        """Of its connector, which tells that when it is asked."""
        self.step = 0.001
        self.per_token = 0.0
        """Seconds of computing a token of a prompt that is not cached."""
        self._cached: set[tuple[int, ...]] = set()
        """Prefixes of whole blocks."""
        self.blocks = 64
        self.usage_name = "kv_cache_usage_perc"
        self.cached_tokens: int | None = None
        """None: it does not tell."""
        self.gives_transfer = False
        """It has a connector that hands over by `kv_transfer_params`."""
        self.metrics: str | None = None
        """In place of what it measures."""
        self.moved_to: str | None = None
        """An address to which it refers whoever asks."""
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Again on the same port, after `stop`."""
        app = web.Application(client_max_size=1 << 26)
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/metrics", self._metrics),
                web.get("/v1/models", self._models),
                web.post("/v1/completions", self._completions),
            ]
        )
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _health(self, request: web.Request) -> web.Response:
        if self.moved_to is not None:
            raise web.HTTPTemporaryRedirect(f"{self.moved_to}{request.path}")
        return web.Response(status=self.health)

    async def _metrics(self, request: web.Request) -> web.Response:
        text = METRICS.format(running=float(self.running), usage=self.usage_name, blocks=self.blocks)
        return web.Response(text=text if self.metrics is None else self.metrics)

    async def _models(self, request: web.Request) -> web.Response:
        data = [{"id": name, "object": "model", "max_model_len": 512} for name in self.models]
        return web.json_response({"object": "list", "data": data})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        if self.moved_to is not None:
            raise web.HTTPTemporaryRedirect(f"{self.moved_to}{request.path}")
        body = await request.json()
        if "moonpool_key_space" not in body.get("kv_transfer_params", {}):
            self.bodies.append(body)
        self.headers.append(dict(request.headers))
        if self.status != 200:
            error = {"message": "as it was told to", "type": "BadRequestError", "param": None, "code": self.status}
            return web.json_response({"error": error}, status=self.status)
        if not body["stream"]:
            return web.json_response(self._whole(body))
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        self.running += 1
        try:
            await self._stream(request, response, body)
        except (ConnectionError, asyncio.CancelledError):
            self.dropped += 1
            raise
        finally:
            self.running -= 1
        return response

    def _whole(self, body: dict[str, Any]) -> dict[str, Any]:
        choice = _choice(body, next_token(body["prompt"]), "length", first=True)
        if body["kv_transfer_params"].get("moonpool_key_space"):
            told = {"moonpool_key_space": msgspec.to_builtins(self.space)} if self.space else None
            return {"choices": [choice], "kv_transfer_params": told}
        self._use(body["prompt"])
        usage: dict[str, Any] = {"prompt_tokens": len(body["prompt"])}
        if self.cached_tokens is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": self.cached_tokens}
        keeps = self.gives_transfer and body["kv_transfer_params"]["do_remote_decode"]
        transfer = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]], "remote_port": self.port}
        return {"choices": [choice], "usage": usage, "kv_transfer_params": transfer if keeps else None}

    async def _stream(self, request: web.Request, response: web.StreamResponse, body: dict[str, Any]) -> None:
        tokens = list(body["prompt"])
        cached = self._use(tokens)
        await asyncio.sleep(self.per_token * (len(tokens) - cached))
        for count in range(body["max_tokens"]):
            if count == self.dies_after:
                assert request.transport is not None
                request.transport.abort()
                raise ConnectionResetError
            if count == self.hangs_after:
                await asyncio.sleep(3600)
            if count == self.breaks_off_after:
                await _send(response, {"error": {"message": "EngineCore died", "code": 500}})
                break
            await asyncio.sleep(self.step)
            token = next_token(tokens)
            tokens.append(token)
            finish = "stop" if count + 1 == self.stops_after else "length" if count + 1 == body["max_tokens"] else None
            choice = _choice(body, token, finish, first=not count)
            if self.never_ends == "at once" and finish is not None:
                choice["token_ids"] += [7] * 100
            await _send(response, {"choices": [choice]})
            while self.never_ends and finish is not None:
                await asyncio.sleep(3600 if self.never_ends == "silent" else 0.001)
                await _send(response, {"choices": [_choice(body, token, None, first=False)]})
            if finish is not None:
                break
        usage: dict[str, Any] = {"prompt_tokens": len(body["prompt"])}
        self._use(tokens[:-1])
        if self.cached_tokens is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": self.cached_tokens}
        await _send(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")

    def _use(self, tokens: list[int]) -> int:
        """These are computed now. How many leading ones were."""
        prefixes = [tuple(tokens[:end]) for end in range(BLOCK, len(tokens), BLOCK)]
        cached = next((len(p) - BLOCK for p in prefixes if p not in self._cached), len(prefixes) * BLOCK)
        self._cached.update(prefixes)
        return cached


async def _send(response: web.StreamResponse, event: dict[str, Any]) -> None:
    event = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": MODEL, **event}
    await response.write(f"data: {json.dumps(event)}\n\n".encode())


def _choice(body: dict[str, Any], token: int, finish: str | None, *, first: bool) -> dict[str, Any]:
    choice = {"index": 0, "text": "x", "logprobs": None, "finish_reason": finish, "stop_reason": None}
    if first:
        choice["prompt_token_ids"] = body["prompt"]
    if body.get("logprobs") is not None:
        # The drawn one first, then the best; the drawn one may be one of these.
        top = {f"token_id:{token}": -1.5, "token_id:1": -0.5, "token_id:2": -0.75}
        choice["logprobs"] = {
            "text_offset": [0],
            "tokens": [f"token_id:{token}"],
            "token_logprobs": [-1.5],
            "top_logprobs": [top],
        }
    return {**choice, "token_ids": [token]}


@asynccontextmanager
async def fakes(count: int) -> AsyncIterator[list[FakeVllm]]:
    servers = [FakeVllm() for _ in range(count)]
    for server in servers:
        await server.start()
    try:
        yield servers
    finally:
        for server in servers:
            await server.stop()
