"""The simplest endpoints before two vLLM servers: what `make bench-vllm` measures the gateway against.

Arguments: a port, `round-robin` or `pair`, and the servers' URLs. Round-robin gives each request to the next server.
A pair does what vLLM's example proxies for prefill and decode do: the first server is asked for one token, and once it
has answered, the second one for the whole answer. Bytes pass as they are, so that a front takes little of the cores.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Literal

import aiohttp
import msgspec
from aiohttp import web

from moonpool.bench.cluster import free_port
from moonpool.bench.process import running, wait_until

Way = Literal["round-robin", "pair"]
MOST_BODY_BYTES = 64 << 20
START_SECONDS = 60.0


@contextlib.contextmanager
def front(way: Way, urls: Sequence[str], folder: Path) -> Iterator[str]:
    """Its URL, until the block ends. Raises MoonpoolError where it does not come up."""
    port, log = free_port(), folder / f"{way}.log"
    command = [sys.executable, "-P", "-m", "moonpool.bench.vllm_front", str(port), way, *urls]
    url = f"http://127.0.0.1:{port}"
    with running(command, log) as process:
        wait_until(lambda: _answers(url), process, log, START_SECONDS)
        yield url


def application(way: Way, urls: Sequence[str]) -> web.Application:
    turns = itertools.cycle(urls)

    async def models(request: web.Request) -> web.StreamResponse:
        async with request.app[_SESSION].get(urls[0] + request.path) as upstream:
            return await _passed_on(request, upstream)

    async def complete(request: web.Request) -> web.StreamResponse:
        session, body = request.app[_SESSION], await request.read()
        url = urls[-1] if way == "pair" else next(turns)
        if way == "pair":
            async with session.post(urls[0] + request.path, data=_only_first(body), headers=_JSON) as upstream:
                if upstream.status != 200:
                    return await _passed_on(request, upstream)
                await upstream.read()
        async with session.post(url + request.path, data=body, headers=_JSON) as upstream:
            return await _passed_on(request, upstream)

    app = web.Application(client_max_size=MOST_BODY_BYTES)
    app.cleanup_ctx.append(_session)
    app.add_routes([web.get("/v1/models", models), web.post("/v1/completions", complete)])
    return app


_SESSION = web.AppKey("session", aiohttp.ClientSession)
_JSON = {"content-type": "application/json"}


async def _session(app: web.Application) -> AsyncIterator[None]:
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        app[_SESSION] = session
        yield


def _only_first(body: bytes) -> bytes:
    """The same request, for one token."""
    wanted: dict[str, object] = msgspec.json.decode(body)
    wanted.pop("stream_options", None)
    return msgspec.json.encode(wanted | {"max_tokens": 1, "min_tokens": 1, "stream": False})


async def _passed_on(request: web.Request, upstream: aiohttp.ClientResponse) -> web.StreamResponse:
    response = web.StreamResponse(status=upstream.status, headers={"content-type": upstream.content_type})
    await response.prepare(request)
    async for data in upstream.content.iter_any():
        await response.write(data)
    await response.write_eof()
    return response


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False


if __name__ == "__main__":
    _port, _way, *_urls = sys.argv[1:]
    web.run_app(application("pair" if _way == "pair" else "round-robin", _urls), host="127.0.0.1", port=int(_port))
