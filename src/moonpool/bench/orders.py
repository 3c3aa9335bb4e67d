"""A measuring process's side of `process.Worker`: orders in, answers out, a line of JSON each."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

Answer = Callable[[dict[str, Any]], None]


@contextlib.contextmanager
def answering() -> Iterator[Answer]:
    """Standard output is for answers alone: whatever else is printed, by whichever library, goes to standard error."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)

        def answer(result: dict[str, Any]) -> None:
            answers.write(json.dumps(result) + "\n")
            answers.flush()

        yield answer


def carry_out_orders(carry_out: Callable[[dict[str, Any]], dict[str, Any]], answer: Answer) -> None:
    """Say that this process is ready, then answer each order, until the end of standard input."""
    answer({"ready": True})
    for line in sys.stdin:
        try:
            result = carry_out(json.loads(line))
        except Exception as error:
            traceback.print_exc()
            result = {"error": f"{type(error).__name__}: {error}"}
        answer(result)
