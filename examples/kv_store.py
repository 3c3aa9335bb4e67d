"""The pool alone, as the KV store under an engine of your own: one process puts KVCache, others get it.

    python examples/kv_store.py                     starts a Conductor and two nodes for itself, and ends them
    python examples/kv_store.py --node ADDRESS      uses a running node: the path of its socket, or host:port of its
                                                    data address (with the token in MOONPOOL_CLUSTER_TOKEN)

Every role is a process of its own, as it would be in earnest: this file is run again with `--role`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from moonpool.store import BlockMeta, Client, PoolError, Space

MODEL = "examples/kv_store 1"
LAYERS, BLOCK_TOKENS, BLOCK_BYTES = 16, 64, 1 << 20
PROMPT = list(range(32 * BLOCK_TOKENS))
OTHER_PROMPT = PROMPT[: 24 * BLOCK_TOKENS] + [7] * (8 * BLOCK_TOKENS)
"""The same beginning, another end."""
START_SECONDS = 30.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--node", metavar="ADDRESS", action="append", help="a running node; twice for two of one cluster"
    )
    parser.add_argument("--role", choices=["writer", "reader"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        (write if options.role == "writer" else read)(options.node[0])
        return
    with contextlib.ExitStack() as stack:
        nodes = options.node or stack.enter_context(own_pool())
        run("writer", nodes[0])
        for node in nodes:
            run("reader", node)


def write(address: str) -> None:
    with connect(address) as pool:
        space = kv_of(pool)
        keys = space.keys_of(PROMPT)
        metas = [
            BlockMeta.of(keys[index - 1] if index else None, index, tokens_of(PROMPT, index))
            for index in range(len(keys))
        ]
        blocks = [computed(key) for key in keys]
        began = time.perf_counter()
        stored = space.put_many(keys, blocks, metas)
        seconds = time.perf_counter() - began
        say("writer", pool, f"put {sum(stored)} new blocks of {BLOCK_BYTES >> 20} MiB in {seconds * 1e3:.0f} ms")


def read(address: str) -> None:
    with connect(address) as pool:
        space = kv_of(pool)
        keys = space.keys_of(OTHER_PROMPT)
        await_directory(space, keys[0])
        began = time.perf_counter()
        with space.get(keys) as blocks:
            seconds = time.perf_counter() - began
            hit = next((index for index, block in enumerate(blocks) if block is None), len(blocks))
            for key, block in zip(keys[:hit], blocks, strict=False):
                if not np.array_equal(block, computed(key)):
                    sys.exit(f"block {key.hex()} is not what was put")
        say(
            "reader",
            pool,
            f"{hit} of {len(keys)} blocks of its prompt were there, each byte right, {seconds * 1e3:.1f} ms",
        )
        one_layer = np.empty(space.layer_bytes, np.uint8)
        space.get_into(keys[0], [one_layer], layers=(3, 1))
        say("reader", pool, f"layer 3 of the first block alone: {one_layer.nbytes >> 10} KiB")
        say("reader", pool, f"the first block is on {space.replicas(keys[0])} node(s)")


def kv_of(pool: Client) -> Space:
    """Whatever shapes the KVCache of a model goes into its space's name: equal keys then mean equal bytes."""
    return pool.space(MODEL, block_bytes=BLOCK_BYTES, layers=LAYERS, block_tokens=BLOCK_TOKENS)


def computed(key: bytes) -> np.ndarray:
    """What an engine would compute for this block."""
    return np.random.default_rng(int.from_bytes(key, "little")).integers(0, 256, BLOCK_BYTES, np.uint8)


def tokens_of(prompt: list[int], index: int) -> list[int]:
    return prompt[index * BLOCK_TOKENS : (index + 1) * BLOCK_TOKENS]


def await_directory(space: Space, key: bytes) -> None:
    """Another node knows of a block as soon as the Conductor has heard of it: in a moment."""
    until = time.monotonic() + START_SECONDS
    while not space.exists(key) and time.monotonic() < until:
        time.sleep(0.01)


def say(role: str, pool: Client, what: str) -> None:
    print(f"{role} (process {os.getpid()}, {pool.node}): {what}", flush=True)


def connect(address: str) -> Client:
    token = os.environ.get("MOONPOOL_CLUSTER_TOKEN")
    try:
        return Client.connect(address, token=token, name="kv_store", timeout=START_SECONDS, start_timeout=START_SECONDS)
    except PoolError as e:
        sys.exit(f"kv_store: {e}")


def run(role: str, node: str) -> None:
    status = subprocess.run([sys.executable, __file__, "--role", role, "--node", node], check=False).returncode
    if status:
        sys.exit(status)


@contextlib.contextmanager
def own_pool() -> Iterator[list[str]]:
    """A Conductor and two nodes on this machine, until the block ends: the nodes' sockets."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="mp-") as folder, contextlib.ExitStack() as stack:
        stack.enter_context(part("conductor", "--control-port", str(port)))
        for name in ("node-0", "node-1"):
            stack.enter_context(
                part(
                    "node",
                    "--id",
                    name,
                    "--conductor",
                    f"127.0.0.1:{port}",
                    "--run-dir",
                    folder,
                    "--dram-per-node",
                    "128MiB",
                )
            )
        print("a pool of its own: a Conductor and two nodes of 128 MiB, and no engine", flush=True)
        yield [str(Path(folder) / f"{name}.sock") for name in ("node-0", "node-1")]


@contextlib.contextmanager
def part(*command: str) -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-m", "moonpool", *command, "--log-level", "warning"])
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


if __name__ == "__main__":
    main()
