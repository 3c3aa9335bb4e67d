"""Rounds of a life that ends by SIGKILL: what is found from the last one is checked, then put, demote, promote.

Arguments: directory, seed, rounds. One process forks a child a round (it has no threads of its own, so that is safe)
and kills it: at a random moment after the child has checked everything, or, one time in five, while it still starts.
It prints one JSON object: how many blocks were found and served, checksum failures met; or what went wrong.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

from tests.store.kit import bytes_of, keys_of
from tests.store.tiered import Tiered

KEYS = keys_of("crash", 40)
LONGEST_LIFE = 0.06
SHORTEST_START = 0.02
CHECK_SECONDS = 20.0


def live(directory: Path, seed: int, report: int) -> None:
    rng = random.Random(seed)
    with Tiered(directory, dram_blocks=8, ssd_blocks=24) as tiered:
        found = int(tiered.count("ssd_blocks"))
        served = [key for key in KEYS if check(tiered, rng, key)]
        line = {"found": found, "served": len(served), "damaged": int(tiered.count("ssd_checksum_failures"))}
        os.write(report, json.dumps(line).encode() + b"\n")
        while True:
            keys = rng.sample(KEYS, rng.randrange(1, 4))
            if rng.random() < 0.6:
                tiered.put(keys)
            else:
                check(tiered, rng, keys[0])


def check(tiered: Tiered, rng: random.Random, key: bytes) -> bool:
    data = tiered.get(key)
    if data is not None and data != bytes(bytes_of(key)):
        raise AssertionError(f"{key.hex()} is served with wrong bytes")
    return data is not None


def run_round(directory: Path, seed: int, life: float, may_start: bool) -> dict[str, int]:
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            live(directory, seed, writer)
        except BaseException as e:
            os.write(writer, json.dumps({"error": f"{type(e).__name__}: {e}"}).encode() + b"\n")
        os._exit(1)
    os.close(writer)
    with os.fdopen(reader, "rb") as said:
        line = said.readline() if may_start else b""
        time.sleep(life)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        last = said.read()
    answer: dict[str, int] = json.loads((line + last).splitlines()[-1] if line + last else "{}")
    return answer


def main(directory: str, seed: str, rounds: str) -> None:
    rng = random.Random(int(seed))
    total = {"rounds": 0, "found": 0, "served": 0, "damaged": 0}
    signal.alarm(int(CHECK_SECONDS) + int(rounds))
    for number in range(int(rounds)):
        may_start = rng.random() < 0.8
        life = rng.random() * (LONGEST_LIFE if may_start else SHORTEST_START)
        answer = run_round(Path(directory), rng.randrange(1 << 30), life, may_start)
        if "error" in answer:
            print(json.dumps({"round": number, **answer}))
            return
        total["rounds"] += 1
        for name, value in answer.items():
            total[name] += value
    print(json.dumps(total))


if __name__ == "__main__":
    main(*sys.argv[1:])
