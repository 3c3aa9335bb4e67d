"""What `make bench-store` must show, computed from its figures."""

from __future__ import annotations

from moonpool.bench.figures import BATCH, KIB, LOCAL, MIB, OURS, PEER, REMOTE, Case, Figures
from moonpool.bench.limits import SOCKETS_SUMMED, SOCKETS_VERIFIED
from moonpool.bench.result import Bar, bar
from moonpool.bench.ssd import PLACE as SSD
from moonpool.bench.ssd import RAW_READ, RAW_WRITE

REMOTE_TIMES = 2.0
LOCAL_TIMES = 1.5
LIMIT_SHARE = 0.8
VIEW_TIMES = 1.5
EXISTS_TIMES = 1.0


def bars(figures: Figures, lack: str) -> list[Bar]:
    """`lack`: why the peer was not measured; empty where it was."""
    return [
        *_against_peer(figures, lack),
        *_against_sockets(figures),
        _views(figures),
        *_exists(figures, lack),
        *_against_disk(figures),
    ]


def _against_peer(figures: Figures, lack: str) -> list[Bar]:
    remote = [(64 * KIB, BATCH), (MIB, 1), (MIB, BATCH), (8 * MIB, 1), (8 * MIB, BATCH)]
    wanted = [(Case(REMOTE, do, size, batch), REMOTE_TIMES) for do in ("put", "get") for size, batch in remote]
    wanted += [(Case(LOCAL, "get", MIB, batch), LOCAL_TIMES) for batch in (1, BATCH)]
    return [
        bar(f"{case.place}: {case}, times Mooncake Store", figures.ratio(case), target, reason=lack)
        for case, target in wanted
    ]


def _against_sockets(figures: Figures) -> list[Bar]:
    return [
        bar(f"{case.place}: {case}, of {limit}", figures.share(case, limit), LIMIT_SHARE)
        for do, limit in (("put", SOCKETS_SUMMED), ("get", SOCKETS_VERIFIED))
        for case in (Case(REMOTE, do, 8 * MIB, BATCH),)
    ]


def _views(figures: Figures) -> Bar:
    """By the median call."""
    small, large = (figures.series(Case(LOCAL, "view", size, 1), OURS) for size in (64 * KIB, 8 * MIB))
    value = large.percentile_us(50) / small.percentile_us(50) if small and large else None
    return bar("same host: zero-copy get of 8 MiB, times that of 64 KiB", value, VIEW_TIMES, at_most=True)


def _exists(figures: Figures, lack: str) -> list[Bar]:
    """By the median call."""
    found = []
    for place in (LOCAL, REMOTE):
        case = Case(place, "exists", 64 * KIB, 1)
        ours, theirs = figures.series(case, OURS), figures.series(case, PEER)
        value = theirs.percentile_us(50) / ours.percentile_us(50) if ours and theirs else None
        found.append(
            bar(f"{place}: exists, single, times faster than Mooncake Store", value, EXISTS_TIMES, reason=lack)
        )
    return found


def _against_disk(figures: Figures) -> list[Bar]:
    return [
        bar(f"{SSD}: {case}, of the {limit}", figures.share(case, limit), LIMIT_SHARE)
        for do, limit in (("put", RAW_WRITE), ("get", RAW_READ))
        for case in (Case(SSD, do, 8 * MIB, 1), Case(SSD, do, 8 * MIB, BATCH))
    ]
