"""`make demo-vllm`: vLLM on CPUs, one server for prefill and one for decode, the pool beneath, one endpoint before."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from rich.console import Console

from moonpool.bench import vllm_cpu
from moonpool.bench.peer import PeerMissingError
from moonpool.bench.vllm_server import EXTERNAL_HITS, metric
from moonpool.bench.vllm_stand import Stand
from moonpool.engine.model import resolve
from moonpool.errors import MoonpoolError
from moonpool.interrupts import heed_interrupts

PORT = 8000
PROMPT_TOKENS = 500


def main() -> int:
    """Until Ctrl-C, or with `--once` until it has shown what it does; the exit status."""
    console = Console()
    heed_interrupts()
    try:
        peer, model = vllm_cpu.set_up(console), resolve("smollm2")
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mp-")))
            run_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mp-")))
            with console.status("two vLLM servers start (a minute)"):
                stand = Stand(folder, run_dir, model, peer, stack)
            with stand.gateway("prefill", "decode", port=PORT) as gateway:
                console.print(f"[b]{gateway.url}[/b] serves smollm2; prefill: {stand.urls[0]}, decode: {stand.urls[1]}")
                _show(gateway.url, stand.urls[1], console)
                if "--once" not in sys.argv:
                    console.print("`moonpool status` shows the parts. Ctrl-C ends it.")
                    signal.pause()
    except KeyboardInterrupt:
        pass
    except (PeerMissingError, MoonpoolError) as e:
        console.print(f"moonpool: {e}")
        return 1
    return 0


def _show(url: str, decode_url: str, console: Console) -> None:
    prompt = random.Random(1).choices(range(1000, 40000), k=PROMPT_TOKENS)
    for what in ("a prompt of 500 tokens", "the same prompt again"):
        before, began = _loaded(decode_url), time.monotonic()
        usage = _complete(url, prompt)["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        console.print(
            f"{what}: {time.monotonic() - began:.1f} s, {cached} tokens cached at prefill, "
            f"{_loaded(decode_url) - before:.0f} loaded from the pool at decode"
        )


def _complete(url: str, prompt: list[int]) -> dict[str, Any]:
    body = {"model": "smollm2", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def _loaded(url: str) -> float:
    """Tokens that this server says came from the pool."""
    return metric(url, EXTERNAL_HITS)


if __name__ == "__main__":
    raise SystemExit(main())
