"""Replay against an endpoint of a few lines: what it sends when, what it makes of every kind of answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from moonpool.bench.dialect import PROBED, Dialect, Wish, find_dialect
from moonpool.bench.endpoint import CONTEXT, Endpoint, base_of
from moonpool.bench.prompts import Prompts, Words, ids_below
from moonpool.bench.replay import Replay, Rules
from moonpool.bench.tally import Tally
from moonpool.bench.turns import Pace, turns
from moonpool.core.vocabulary import Slo
from moonpool.errors import ConfigError, MoonpoolError
from moonpool.trace.request import TraceRequest
from tests.bench.fake_endpoint import Answering, FakeEndpoint, Serve, fake_endpoint, prompt_tokens, serve_at_once

BLOCK = 16
TEXT = Words(tuple(b" w%d" % number for number in range(300)), b"")
DIALECT = Dialect("m")
RULES, PACE = Rules(), Pace()


def some(count: int, gap: float = 0.005) -> list[TraceRequest]:
    return [TraceRequest(gap * at, 20 + at, 3, (1, 100 + at)) for at in range(count)]


async def replayed(
    serve: Serve,
    requests: Sequence[TraceRequest],
    rules: Rules = RULES,
    pace: Pace = PACE,
    timeout: float = 30.0,
    stop_after: float | None = None,
) -> tuple[Tally, FakeEndpoint]:
    async with fake_endpoint(serve) as fake, Endpoint(base_of(fake.url), timeout=timeout) as endpoint:
        run = Replay(endpoint, DIALECT, Prompts(ids_below(), BLOCK, 0), rules)
        if stop_after is not None:
            asyncio.get_running_loop().call_later(stop_after, run.stop)
        return await run.run(turns(requests, pace, BLOCK, 0)), fake


async def asked_for(serve: Serve, wish: Wish, models: int = 200) -> Dialect:
    async with fake_endpoint(serve, models) as fake, Endpoint(base_of(fake.url)) as endpoint:
        return await find_dialect(endpoint, wish)


def wish(**changes: Any) -> Wish:
    return msgspec.structs.replace(Wish("", "completions", ids_below(), None), **changes)


# What is sent


def test_requests_are_sent_when_they_are_due_whatever_became_of_others() -> None:
    count, all_here = 30, asyncio.Event()

    async def serve(body: dict[str, Any], answering: Answering) -> None:
        # Who waits for an answer before the next request waits for ever.
        seen.append(body)
        if len(seen) == count:
            all_here.set()
        await all_here.wait()
        await serve_at_once(body, answering)

    seen: list[dict[str, Any]] = []
    tally, _ = asyncio.run(replayed(serve, some(count)))
    assert (tally.completed, tally.failed) == (count, 0)
    assert tally.live("x", DIALECT).client.most_streams == count
    # The first was answered when the last had come: that counts for it, whoever was to blame.
    assert tally.outcomes.ttft[tally.outcomes.arrived.argmin()] >= 0.005 * (count - 1)


def test_lengths_and_beginnings_are_the_traces() -> None:
    tally, fake = asyncio.run(replayed(serve_at_once, some(5)))
    bodies = sorted(fake.bodies, key=lambda body: len(body["prompt"]))
    assert [len(body["prompt"]) for body in bodies] == [20, 21, 22, 23, 24]
    assert len({tuple(body["prompt"][:BLOCK]) for body in bodies}) == 1
    assert len({tuple(body["prompt"][BLOCK : BLOCK + 4]) for body in bodies}) == 5
    assert {(body["max_tokens"], body["min_tokens"], body["ignore_eos"]) for body in bodies} == {(3, 3, True)}
    live = tally.live("x", DIALECT)
    assert (live.prompt_tokens, live.output_tokens, live.wrong_prompts, live.short_answers) == (110, 15, 0, 0)
    assert tally.outcomes.cached_tokens.tolist() == [1] * 5
    assert tally.outcomes.computed_tokens.sum() == 105


def test_the_limits_go_along_where_they_are_wanted() -> None:
    _, fake = asyncio.run(replayed(serve_at_once, some(1), Rules(slo=Slo(2.0, 0.05))))
    assert (fake.headers[0]["x-slo-ttft-ms"], fake.headers[0]["x-slo-tpot-ms"]) == ("2000.000", "50.000")


def test_no_more_streams_than_allowed_and_waiting_counts() -> None:
    under_way, most = 0, 0

    async def serve(body: dict[str, Any], answering: Answering) -> None:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.02)
        under_way -= 1
        await serve_at_once(body, answering)

    tally, _ = asyncio.run(replayed(serve, some(12, gap=0.0), Rules(most_streams=3)))
    assert most <= 3
    assert tally.completed == 12
    assert tally.full
    assert tally.outcomes.ttft.max() >= 0.08, "the last ones waited for three others, from when they were due"
    assert tally.lag.most >= 0.06


def test_a_turn_waits_for_the_answer_before_it() -> None:
    async def serve(body: dict[str, Any], answering: Answering) -> None:
        await asyncio.sleep(0.05)
        ends.append(asyncio.get_running_loop().time())
        await serve_at_once(body, answering)

    ends: list[float] = []
    conversation = [TraceRequest(0.0, 16 * (at + 1), 1, tuple(range(at + 1))) for at in range(4)]
    tally, fake = asyncio.run(replayed(serve, conversation, pace=Pace(sessions=True, think=0.02)))
    assert all(came > end for came, end in zip(fake.arrived[1:], ends, strict=False))
    assert tally.live("x", DIALECT).held == 3
    assert tally.outcomes.ttft.max() < 1.0, "what it waited for others is no latency of its own"
    assert tally.outcomes.arrived.max() >= 0.15


# What is made of it


def test_every_kind_of_failure_is_one_request_and_has_its_name() -> None:
    async def serve(body: dict[str, Any], answering: Answering) -> None:
        event = {"choices": [{"index": 0, "text": "a", "token_ids": [1]}]}
        match len(body["prompt"]) - 20:
            case 0:
                answering.plain(
                    429, {"error": {"message": "full"}}, {"x-moonpool-reason": "tbt-slo", "retry-after": "3"}
                )
            case 1:
                answering.plain(429, {"error": {"message": "slow down", "code": "rate_limit"}})
            case 2:
                answering.plain(400, {"error": {"message": "This model's maximum context length is 10 tokens."}})
            case 3:
                answering.plain(500, {"oh": "no"})
            case 4:
                answering.begin()
                answering.event(event)  # and then nothing: it breaks off
            case 5:
                answering.begin()
                answering.event(event)
                answering.event({"error": {"message": "late", "code": "deadline"}})
                answering.end()
            case 6:
                answering.begin()
                answering.event(b"{nonsense")
            case 7:
                pass  # hangs up
            case 8:
                await asyncio.sleep(30.0)
            case _:
                await serve_at_once(body, answering)

    tally, _ = asyncio.run(replayed(serve, some(12), timeout=2.0))
    assert tally.outcomes.refusals() == {"tbt-slo": 1, "rate_limit": 1, CONTEXT: 1}
    assert tally.errors == {
        "HTTP 500": 1,
        "connection lost": 2,
        "deadline": 1,
        "no proper events": 1,
        "timed out": 1,
    }
    assert (tally.completed, len(tally.outcomes)) == (3, 12)
    assert tally.first_error


def test_reasons_that_are_made_up_for_each_request_are_counted_together() -> None:
    async def serve(body: dict[str, Any], answering: Answering) -> None:
        answering.plain(429, {"error": {"message": "no", "code": f"no-{len(body['prompt'])}"}})

    tally, _ = asyncio.run(replayed(serve, some(80, gap=0.0)))
    refusals = tally.outcomes.refusals()
    assert (len(refusals), refusals["other"], tally.refused) == (65, 16, 80)


def test_nobody_listens() -> None:
    async def run() -> Tally:
        async with Endpoint("http://127.0.0.1:1/v1") as endpoint:
            return await Replay(endpoint, DIALECT, Prompts(ids_below(), BLOCK, 0), Rules()).run(
                turns(some(3), Pace(), BLOCK, 0)
            )

    assert asyncio.run(run()).errors == {"connection refused": 3}


def test_tokens_that_share_an_event_have_nothing_between_them() -> None:
    async def serve(body: dict[str, Any], answering: Answering) -> None:
        answering.begin()
        answering.event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})  # no token
        for text in ("a", "b"):
            answering.event({"choices": [{"delta": {"content": text}}]})
            await asyncio.sleep(0.05)
        answering.event({"choices": [{"delta": {}, "finish_reason": "length"}]})
        answering.event({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 5}})
        answering.end()

    tally, _ = asyncio.run(replayed(serve, [TraceRequest(0.0, 20, 8)]))
    live = tally.live("x", DIALECT)
    assert live.output_tokens == 5, "as the endpoint counts"
    assert (live.intervals.p50, live.intervals.most >= 0.045) == (0.0, True)
    assert (live.wrong_prompts, live.short_answers, live.knows_cached) == (1, 1, False)


def test_the_warm_up_is_sent_and_not_measured() -> None:
    tally, fake = asyncio.run(replayed(serve_at_once, some(10, gap=0.01), Rules(warm_up=0.045)))
    assert (len(fake.bodies), len(tally.outcomes), tally.live("x", DIALECT).warm_up) == (10, 5, 5)
    assert tally.outcomes.arrived.min() == pytest.approx(0.005, abs=1e-6)


def test_interrupted_it_keeps_what_is_over() -> None:
    async def serve(body: dict[str, Any], answering: Answering) -> None:
        if len(body["prompt"]) >= 25:
            await asyncio.sleep(30.0)
        await serve_at_once(body, answering)

    requests = [*some(8), TraceRequest(1000.0, 9, 1)]
    tally, fake = asyncio.run(replayed(serve, requests, stop_after=2.0))
    assert (len(fake.bodies), tally.completed, tally.failed) == (8, 5, 0)
    assert tally.live("x", DIALECT).cut_off == 3


def test_a_trace_that_can_no_longer_be_read_ends_the_run() -> None:
    def broken() -> Any:
        yield TraceRequest(0.0, 9, 1)
        raise MoonpoolError("the file has changed")

    with pytest.raises(MoonpoolError, match="has changed"):
        asyncio.run(replayed(serve_at_once, broken()))


# What an endpoint takes


def picky(*refused: str, ids: bool = True, extra: int = 0, forces: bool = True) -> Serve:
    """Takes none of these fields, nor token ids unless told; adds `extra` tokens to a prompt."""

    async def serve(body: dict[str, Any], answering: Answering) -> None:
        if not ids and not isinstance(body.get("prompt", ""), str):
            answering.plain(400, {"error": {"message": "prompt must be a string"}})
            return
        for name in refused:
            if name in body:
                answering.plain(400, {"error": {"message": f"Unknown parameter: {name!r}"}})
                return
        answering.begin()
        count = body["max_tokens"] if forces else 1
        for _ in range(count):
            answering.event({"choices": [{"text": " w"}]})
        if "stream_options" in body:
            answering.event({"usage": {"prompt_tokens": prompt_tokens(body) + extra, "completion_tokens": count}})
        answering.end()

    return serve


def test_fields_that_an_endpoint_refuses_are_left_out() -> None:
    found = asyncio.run(asked_for(picky("return_token_ids", "min_tokens"), wish()))
    assert found.fields == ("ignore_eos", "stream_options")
    assert (found.model, found.as_ids, found.context_tokens) == ("m", True, 4096)
    bare = asyncio.run(asked_for(picky("return_token_ids", "min_tokens", "ignore_eos", "stream_options"), wish()))
    assert bare.fields == ()
    assert any("not verified" in note for note in bare.notes)
    assert any("neither ignore_eos nor min_tokens" in note for note in bare.notes)
    assert any("does not force" in note for note in asyncio.run(asked_for(picky(forces=False), wish())).notes)


def test_text_where_no_ids_are_taken_and_what_the_endpoint_adds() -> None:
    found = asyncio.run(asked_for(picky(ids=False, extra=3), wish(text=TEXT)))
    assert (found.as_ids, found.extra_tokens) == (False, 3)
    chat = asyncio.run(asked_for(picky(extra=12), wish(api="chat", text=TEXT)))
    assert (chat.path, chat.extra_tokens) == ("/chat/completions", 12)
    with pytest.raises(MoonpoolError, match=r"prompt must be a string.*--tokenizer"):
        asyncio.run(asked_for(picky(ids=False), wish()))


def test_another_tokenizer_is_found_out() -> None:
    async def serve(body: dict[str, Any], answering: Answering) -> None:
        answering.begin()
        answering.event({"usage": {"prompt_tokens": 2 * prompt_tokens(body), "completion_tokens": 4}})
        answering.end()

    with pytest.raises(MoonpoolError, match=f"{PROBED[0]} became {2 * PROBED[0]}.*--tokenizer"):
        asyncio.run(asked_for(serve, wish()))


def test_an_endpoint_that_cannot_be_used_says_why() -> None:
    async def locked(body: dict[str, Any], answering: Answering) -> None:
        answering.plain(401, {"error": {"message": "who are you?"}})

    with pytest.raises(MoonpoolError, match=r"401.*--api-key"):
        asyncio.run(asked_for(locked, wish()))
    with pytest.raises(MoonpoolError, match=r"403.*--api-key"):
        asyncio.run(asked_for(serve_at_once, wish(), models=403))
    with pytest.raises(MoonpoolError, match="no model 'other'; it has m"):
        asyncio.run(asked_for(serve_at_once, wish(model="other")))
    with pytest.raises(MoonpoolError, match="--model"):
        asyncio.run(asked_for(serve_at_once, wish(), models=404))
    assert asyncio.run(asked_for(serve_at_once, wish(model="mine"), models=404)).model == "mine"


def test_an_url_is_taken_with_and_without_its_v1() -> None:
    for given in ("http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/", "h:1"):
        assert base_of(given) == "http://h:1/v1"
    assert base_of("https://h/api") == "https://h/api/v1"
    for bad in ("ftp://h", "http://", "http://h:x", "http://me:secret@h"):
        with pytest.raises(ConfigError, match="--url"):
            base_of(bad)
