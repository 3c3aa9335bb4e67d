"""What libraries keep of each shape of a product is bounded."""

from __future__ import annotations

import os
import subprocess
import sys

GROWTH = """
import random
import psutil, torch
from torch import nn
from moonpool.engine.linear import PackedLinear
from moonpool.engine.loading import bound_caches, keep_freed_memory
keep_freed_memory()
if {bounded}:
    bound_caches()
torch.set_num_threads(1)
linear = PackedLinear([nn.Linear(128, 512)])
hidden = torch.ones(600, 128)
process = psutil.Process()
def serve(lengths):
    for _ in range(lengths):
        linear(hidden[:chosen.randint(33, len(hidden))])
    return process.memory_full_info().uss
chosen = random.Random(1)
with torch.inference_mode():
    linear(hidden)
    print(-serve(100) + serve(300))
"""


def growth(bounded: bool) -> int:
    """Bytes that a process grows by over products of 300 counts of rows, after 100 that warm it up."""
    free = {name: value for name, value in os.environ.items() if not name.endswith("CACHE_CAPACITY")}
    script = GROWTH.format(bounded=bounded)
    run = subprocess.run([sys.executable, "-c", script], env=free, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    return int(run.stdout)


def test_a_worker_does_not_grow_with_every_length_of_prompt() -> None:
    assert growth(bounded=True) < growth(bounded=False) / 4
