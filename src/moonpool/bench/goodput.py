"""`make bench-goodput`: requests within their limits, live: separate pools around one KVCache beside coupled workers.

Clusters of the same number of machines, one after the other on the same cores, first on the timed engine as GPUs
(`goodput_timed.py`), then on the torch engine with a real model (`goodput_torch.py`). The load is a slice of the
conversation trace, open loop. Limits are fixed beforehand, the same for all. Beside each 90 % point stands what the
simulator says for the same requests.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from rich.console import Console

from moonpool.bench import goodput_timed, goodput_torch
from moonpool.bench.goodput_figures import Results, bars
from moonpool.bench.result import Bar, print_result
from moonpool.errors import MoonpoolError
from moonpool.interrupts import heed_interrupts

TRACE = Path("../shared/traces/conversation_trace.jsonl")
"""Beside the checkout."""
PARTS = ("timed", "torch")


def main() -> int:
    """The exit status."""
    began = time.monotonic()
    heed_interrupts()
    options, console = _options(), Console(width=170)
    if not options.quick and not options.trace.is_file():
        lack = f"there is no trace {options.trace}: give --trace conversation_trace.jsonl, or --quick"
        console.print(f"left out: {lack}", soft_wrap=True)
        print_result(bars(Results(), lack))
        return 0
    found: list[Bar] = []
    ratios: dict[str, float] = {}
    try:
        if "timed" in options.part:
            found += goodput_timed.measure(options, console)
        if "torch" in options.part:
            held, ratios = goodput_torch.measure(options, console)
            found += held
    except KeyboardInterrupt:
        return 130
    except MoonpoolError as e:
        console.print(f"moonpool: {e}", soft_wrap=True, markup=False)
        return 1
    print_result(found, seeds=options.seeds, ratios=ratios, minutes=round((time.monotonic() - began) / 60, 1))
    return 0


def _split(text: str) -> tuple[int, int]:
    prefill, decode = (int(word) for word in text.split(","))
    if min(prefill, decode) < 1:
        raise ValueError
    return prefill, decode


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="make bench-goodput", description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("--part", nargs="+", choices=PARTS, default=PARTS, help="to be measured (both)")
    parser.add_argument("--trace", type=Path, default=TRACE, help="Mooncake's conversation_trace.jsonl (%(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2], help="a slice of the trace each (1 2)")
    parser.add_argument("--split", type=_split, help="P,D: timed machines for both (what `moonpool plan` finds)")
    parser.add_argument("--profile", type=Path, help="of `moonpool calibrate --out`, with the torch part's flags")
    parser.add_argument("--no-peer", dest="peer", action="store_false", help="the torch part without vLLM")
    parser.add_argument("--out", type=Path, default=Path("build/bench-goodput"), help="folder of reports (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="a smoke test of two minutes; no figure means anything")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
