"""Some of a trace's replays in another process: `python -m moonpool.trace.elsewhere JOB`, JSON in and out.

A process of its own, begun anew: a fork would take along whatever threads and sockets the caller has. It imports only
what a replay needs.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from moonpool.errors import TraceError
from moonpool.trace.hits import HitRatio, Replay, hit_ratios, load, rare_collection
from moonpool.trace.read import TraceFile

COMMAND = (sys.executable, "-P", "-m", "moonpool.trace.elsewhere")


class Job(msgspec.Struct, frozen=True):
    file: str
    skip_bad: bool
    block_tokens: int
    replays: tuple[Replay, ...]


def command(job: Job) -> tuple[str, ...]:
    return (*COMMAND, msgspec.json.encode(job).decode())


def read_answer(answer: bytes) -> tuple[HitRatio, ...]:
    """Raises msgspec.MsgspecError for what is none."""
    return msgspec.json.decode(answer, type=tuple[HitRatio, ...])


def main(argument: str) -> int:
    job = msgspec.json.decode(argument, type=Job)
    try:
        loaded = load(TraceFile(Path(job.file), job.skip_bad), job.block_tokens)
        with rare_collection():
            found = hit_ratios(loaded, job.replays)
    except TraceError as e:
        sys.stderr.write(f"{e}\n")
        return 1
    sys.stdout.buffer.write(msgspec.json.encode(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
