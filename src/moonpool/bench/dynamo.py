"""NVIDIA Dynamo as the peer of `make bench-core`: its wheel, in a virtual environment of its own.

It lies in `peers` of Moonpool's cache directory and is made once; what it measures is in `peer_dynamo.py`.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from moonpool.bench.peer import Peer, PeerMissingError, made_once, new_environment, run_or_explain

VERSION = "1.6.1"
PACKAGE = f"ai-dynamo-runtime=={VERSION}"
WORKERS = 16
REPETITIONS = 5
"""Of the index: a lookup of theirs waits for a thread of its own, which takes 20 to 270 µs here."""
SECONDS = 600.0


class PeerFigures(msgspec.Struct, frozen=True):
    """On one trace."""

    find_us: tuple[float, ...]
    """Of `RadixTree.find_matches` through its Python binding, the mean of each repetition."""
    store_us: tuple[float, ...]
    replayed: float
    """Requests a second of its offline replay, with the KV router."""


def set_up(console: Console) -> Peer:
    """Ready to run. Raises PeerMissingError."""

    def install(peer: Peer) -> None:
        with console.status(f"Dynamo {VERSION}: a virtual environment of its own (once, 60 MB)"):
            pip = [*new_environment(peer), "install", "--no-deps", "--only-binary", ":all:"]
            run_or_explain([*pip, PACKAGE], peer, f"pip cannot install {PACKAGE}")

    return made_once(f"dynamo-{VERSION}", install)


def measure(peer: Peer, trace: Path, block_tokens: int) -> PeerFigures:
    """Raises PeerMissingError where it does not run here."""
    script = Path(__file__).with_name("peer_dynamo.py")
    # -P: this module has the name of the peer's package, and lies beside the script.
    command = [str(peer.python), "-P", str(script), str(trace), str(WORKERS), str(block_tokens), str(REPETITIONS)]
    # It logs a line for each choice otherwise, which would be measured with it.
    environment: dict[str, Any] = {**peer.environment, "DYN_LOG": "error"}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise PeerMissingError(f"Dynamo did not end within {SECONDS:g} s") from None
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise PeerMissingError(f"Dynamo ended with {done.returncode}: {' '.join(last)}")
    return msgspec.json.decode(lines[-1], type=PeerFigures)
