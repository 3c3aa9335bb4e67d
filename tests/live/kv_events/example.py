"""The subscriber of docs/operations.md as a process of its own, which imports nothing of ours."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.docs.pages import file_of

RUN = """
import json, sys, threading

blocks = set()
threading.Thread(target=follow, args=(sys.argv[1], sys.argv[2], blocks), daemon=True).start()
for line in sys.stdin:
    print(json.dumps(sorted(blocks.copy())), flush=True)
"""


class Example:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def blocks(self) -> set[tuple[str, int]]:
        """As (medium, hash), as far as it has heard."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return {(medium, each) for medium, each in json.loads(self._process.stdout.readline())}


@contextlib.contextmanager
def example(folder: Path, address: str, replay_address: str) -> Iterator[Example]:
    script = folder / "follow.py"
    script.write_text(file_of("docs/operations.md", "follow.py") + RUN)
    # -I: neither this folder nor PYTHONPATH are looked at.
    process = subprocess.Popen(
        [sys.executable, "-I", str(script), address, replay_address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield Example(process)
    finally:
        process.kill()
        process.communicate()
