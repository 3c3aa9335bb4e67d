"""The open-loop client and what `make bench-overload` makes of its answers."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable
from io import StringIO

import pytest
from rich.console import Console

from moonpool.bench.open_loop import Answer, Asked, Client, Lengths, poisson, prompt_of
from moonpool.bench.overload_figures import (
    Comeback,
    by_bucket,
    by_class,
    class_bars,
    overload_bars,
    percentile,
    row_of,
    share_taken,
    table,
)
from moonpool.core.vocabulary import Slo

BUCKETS = (Lengths(1, 10, 0.5), Lengths(11, 100, 0.5))
LIMITS = Slo(1.0, 0.125)

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def asked(bucket: int = 0, priority: str = "", due: float = 0.0) -> Asked:
    return Asked(due, bucket, (1, 2, 3), 4, LIMITS, priority)


def served(ttft: float, *intervals: float, bucket: int = 0, priority: str = "") -> Answer:
    return Answer(asked(bucket, priority), 0.0, 2.0, 200, "", None, ttft, intervals, completed=True)


def refused(after: float, retry_after: float | None = 3.0, bucket: int = 0, priority: str = "") -> Answer:
    return Answer(asked(bucket, priority), 0.0, after, 429, "ttft-slo", retry_after)


def test_an_answer_attains_by_its_first_token_and_its_slowest_tenth() -> None:
    assert served(1.0, *[0.125] * 30).attains
    assert not served(1.01, *[0.01] * 30).attains
    assert served(0.5, *[0.01] * 27, 0.0625, 0.125, 0.1875).attains, "the mean of the three slowest is at the limit"
    assert not served(0.5, *[0.01] * 27, 0.0625, 0.125, 0.25).attains
    assert not Answer(asked(), 0.0, 1.0, 200, ttft=0.1).attains, "it broke off"
    assert not refused(0.01).attains


def test_rows_tell_what_was_accepted_and_what_of_it_attained() -> None:
    answers = [served(0.5, 0.05), served(2.0, 0.05), refused(0.010), refused(0.030, None), refused(0.020, 7.0)]
    answers += [served(0.5, 0.05, bucket=1), Answer(asked(1), 0.0, 0.1, 503, "no-instance")]
    rows = dict(by_bucket(answers, BUCKETS))
    short = rows["1-10"]
    assert (short.sent, short.accepted, short.attained, short.failed) == (5, 2, 1, 0)
    assert short.reasons == {"ttft-slo": 3}
    assert short.answered_ms == pytest.approx((20.0, 30.0))
    assert short.retry_after == (3.0, 3.0, 7.0)
    assert short.without_advice == 1
    assert rows["11-100"].failed == 1, "an error is no refusal"
    assert rows["all"].attained_of_accepted == 2 / 4
    out = StringIO()
    Console(file=out, width=200).print(table("a title", list(rows.items()), [LIMITS, LIMITS]))
    assert "1.00 s, 12" in out.getvalue()


def test_percentiles_are_of_what_was_measured() -> None:
    assert [percentile(range(1, 101), p) for p in (50, 99, 100)] == [50, 99, 100]
    assert percentile([5.0], 99) == 5.0


def test_bars_hold_only_where_all_is_well() -> None:
    good = row_of([served(0.5, 0.05)] * 19 + [served(2.0)] + [refused(0.04)] * 200)
    again = [Comeback(0.0, refused(0.01)), Comeback(1.0, served(0.1)), Comeback(0.5, refused(0.01))]
    assert all(b["holds"] for b in overload_bars("timed", good, again))
    bad = row_of([served(0.5, 0.05)] * 18 + [served(2.0)] * 2 + [refused(0.04)] * 200 + [refused(0.06, None)] * 3)
    useless = [Comeback(0.0, served(0.1)), Comeback(1.0, served(0.1))]
    assert not any(b["holds"] for b in overload_bars("timed", bad, useless))
    nothing = overload_bars("timed", row_of([served(0.5, 0.05)]), [])
    assert [b["holds"] for b in nothing] == [True, None, True, None]
    assert share_taken(again, 0.5) == 0.0


def test_the_high_class_is_compared_with_itself() -> None:
    usual = dict(by_class([served(0.5, priority="high")] * 4 + [refused(0.01, priority="low")]))["high"]
    calm = row_of([served(0.5, priority="high")] * 8)
    pressed = row_of([served(0.5, priority="high")] * 8 + [refused(0.01, priority="high")])
    assert class_bars("timed", usual, calm)[0]["holds"]
    assert not class_bars("timed", usual, pressed)[0]["holds"]


def test_arrivals_have_the_rate_and_lengths_that_were_asked_for() -> None:
    limits = (Slo(1.0), Slo(2.0))
    made = poisson(50.0, 100.0, BUCKETS, (2, 8), limits, random.Random(1), [("high", 0.25), ("low", 0.75)])
    assert len(made) == pytest.approx(5000, rel=0.1)
    assert all(a.due < b.due for a, b in itertools.pairwise(made))
    assert all(BUCKETS[a.bucket].shortest <= len(a.prompt) <= BUCKETS[a.bucket].longest for a in made)
    assert all(a.slo is limits[a.bucket] for a in made)
    assert {a.output_tokens for a in made} == set(range(2, 9))
    assert sum(a.priority == "high" for a in made) == pytest.approx(len(made) / 4, rel=0.15)
    again = poisson(50.0, 100.0, BUCKETS, (2, 8), limits, random.Random(1), [("high", 0.25), ("low", 0.75)])
    assert made == again


async def offered(serve: Serve, requests: list[Asked]) -> list[Answer]:
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        return await Client(f"http://127.0.0.1:{port}", "model").offer(requests)


def test_requests_are_sent_when_they_are_due_whatever_became_of_others() -> None:
    count, arrived, heads = 20, asyncio.Event(), list[str]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append((await reader.readuntil(b"\r\n\r\n")).decode())
        if len(heads) == count:
            arrived.set()
        await arrived.wait()  # who waits for an answer before the next request waits for ever
        writer.write(b"HTTP/1.1 429 \r\nRetry-After: 7\r\nX-Moonpool-Reason: queue-full\r\n\r\n{}")
        writer.close()

    answers = asyncio.run(offered(serve, [asked(due=0.005 * n) for n in range(count)]))
    assert [(a.status, a.reason, a.retry_after) for a in answers] == [(429, "queue-full", 7.0)] * count
    assert answers[0].answered >= 0.005 * (count - 1), "counted from when it was due"
    assert all("x-slo-ttft-ms: 1000.000\r\nx-slo-tpot-ms: 125.000\r\n" in head for head in heads)


def test_streams_are_read_token_by_token() -> None:
    endings = iter([b"data: [DONE]\n\n", b'data: {"error": {"code": "deadline"}}\n\ndata: [DONE]\n\n', b""])

    def chunk(data: bytes) -> bytes:
        return b"%x\r\n%s\r\n" % (len(data), data)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        writer.write(chunk(b'data: {"choices": [{"index": 0, "token_ids": [5, 6]}]}\n\n'))
        writer.write(chunk(b'data: {"choices": [{"token_ids": [7]}]}\n\n'))
        if ending := next(endings):
            writer.write(chunk(ending) + chunk(b""))
        writer.close()

    one = [asked()]
    whole, failed, cut = (asyncio.run(offered(serve, one))[0] for _ in range(3))
    assert (whole.completed, len(whole.intervals), whole.reason) == (True, 2, "")
    assert (failed.completed, failed.reason) == (False, "deadline")
    assert not cut.completed
    assert whole.ttft is not None


def test_what_does_not_answer_is_no_answer() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    (answer,) = asyncio.run(offered(serve, [asked()]))
    assert (answer.status, answer.completed, answer.refused) == (0, False, False)
    assert answer.reason


def test_no_two_prompts_are_alike() -> None:
    rng = random.Random(0)
    assert prompt_of(50, rng)[:4] != prompt_of(50, rng)[:4]
