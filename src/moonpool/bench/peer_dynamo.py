"""What Dynamo takes for a trace; runs in Dynamo's virtual environment, without Moonpool (`bench/dynamo.py`).

Arguments: a Mooncake JSONL file, workers, tokens of a block, how often the index is filled. Prints one line of JSON.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from dynamo._core import RadixTree, run_mocker_trace_replay


def index(path: str, workers: int) -> tuple[float, float]:
    """Mean seconds of a lookup of each prompt, and of storing what the worker that computes it lacks."""
    tree = RadixTree()
    held: list[set[int]] = [set() for _ in range(workers)]
    finding = storing = 0.0
    with Path(path).open() as file:
        prompts = [json.loads(line)["hash_ids"] for line in file]
    for number, ids in enumerate(prompts):
        began = time.perf_counter()
        tree.find_matches(ids)
        finding += time.perf_counter() - began
        worker = number % workers
        first = next((at for at, block in enumerate(ids) if block not in held[worker]), len(ids))
        held[worker].update(ids)
        blocks = [{"block_hash": block, "tokens_hash": block} for block in ids[first:]]
        stored = {"parent_hash": ids[first - 1] if first else None, "blocks": blocks}
        event = json.dumps({"event_id": number, "dp_rank": 0, "data": {"stored": stored}}).encode()
        began = time.perf_counter()
        tree.apply_event(worker, event)
        storing += time.perf_counter() - began
    return finding / len(prompts), storing / len(prompts)


def main() -> None:
    path, workers, block_tokens, times = sys.argv[1], *map(int, sys.argv[2:5])
    indexed = [index(path, workers) for _ in range(times)]
    began = time.perf_counter()
    done = run_mocker_trace_replay([path], num_workers=workers, router_mode="kv_router", trace_block_size=block_tokens)
    seconds = time.perf_counter() - began
    requests = done.summary["num_requests"]
    find_us, store_us = ([each[at] * 1e6 for each in indexed] for at in (0, 1))
    print(json.dumps({"find_us": find_us, "store_us": store_us, "replayed": requests / seconds}))


if __name__ == "__main__":
    main()
