"""External instances from the gateway: streams, hits, failures. The servers are small ones that speak as vLLM does."""

from __future__ import annotations

import asyncio

import pytest

from moonpool.core.vocabulary import PartId, RejectReason
from moonpool.errors import ConfigError
from moonpool.gateway.generation import Refused
from moonpool.live.external import adapter
from moonpool.live.external.config import Instance, PoolUse

from .fake import BLOCK, answer_to, fakes
from .kit import front, instances, run

PROMPT = [11 + at % 7 for at in range(5 * BLOCK + 3)]


def prompt(seed: int, tokens: int = 3 * BLOCK + 1) -> list[int]:
    return [(seed * 131 + at * 17) % 800 + 20 for at in range(tokens)]


def test_a_stream_comes_whole_and_says_what_was_cached() -> None:
    async def work() -> None:
        async with fakes(1) as servers:
            servers[0].cached_tokens = 2 * BLOCK
            async with front(instances(servers)) as gate:
                answer = await gate.ask(PROMPT, 8, logprobs=2, top_k=5, min_tokens=3)
                assert answer.tokens == answer_to(PROMPT, 8)
                assert answer.finish == "length"
                # As the server told it at the end, not as was thought at the first token.
                assert answer.cached_tokens == 2 * BLOCK
                assert answer.drawn[0].logprob == -1.5
                assert answer.drawn[0].top == ((1, -0.5), (2, -0.75))
                (body,) = servers[0].bodies
                assert body["prompt"] == PROMPT
                assert body["seed"] == 7
                assert (body["max_tokens"], body["min_tokens"], body["top_k"]) == (8, 3, 5)
                assert "cache_salt" not in body
                assert "priority" not in body

    run(work())


def test_an_end_token_ends_it() -> None:
    async def work() -> None:
        async with fakes(1) as servers:
            servers[0].stops_after = 3
            async with front(instances(servers)) as gate:
                answer = await gate.ask(PROMPT, 8)
                assert (answer.finish, answer.tokens) == ("stop", answer_to(PROMPT, 3))
                one = await gate.ask(prompt(1), 1)
                assert (one.finish, one.tokens) == ("length", answer_to(prompt(1), 1))

    run(work())


def test_salt_key_and_rank_go_along() -> None:
    async def work() -> None:
        async with fakes(1) as servers:
            (instance,) = instances(servers, api_key="secret", priorities=True)
            async with front([instance]) as gate:
                await gate.ask(PROMPT, 2, salt="tenant")
                assert servers[0].bodies[0]["cache_salt"] == "tenant"
                assert servers[0].bodies[0]["priority"] == 0
                assert servers[0].headers[0]["Authorization"] == "Bearer secret"

    run(work())


def test_what_was_sent_to_a_server_counts_as_a_hit_there() -> None:
    """Three conversations on three servers: each next turn goes where the last one was."""

    async def work() -> None:
        async with fakes(3) as servers, front(instances(servers)) as gate:
            for server in servers:
                server.per_token = 0.002
            firsts = [prompt(seed) for seed in range(3)]
            answers = await asyncio.gather(*(gate.ask(first, BLOCK) for first in firsts))
            homes = [next(s for s in servers if s.bodies[-1]["prompt"] == first) for first in firsts]
            assert len({server.port for server in homes}) == 3
            for first, answer, home in zip(firsts, answers, homes, strict=True):
                turn = [*first, *answer.tokens, 1, 2, 3]
                await gate.until(lambda state: _blocks(state) >= 4 * 3, "the blocks are known")
                again = await gate.ask(turn, 2)
                assert home.bodies[-1]["prompt"] == turn
                # Prompt and answer, but the last token, which has no KV there yet.
                assert again.cached_tokens == 4 * BLOCK
            # Another salt shares nothing.
            assert (await gate.ask(firsts[0], 2, salt="other")).cached_tokens == 0

    run(work())


def test_a_full_cache_forgets_what_was_used_longest_ago() -> None:
    async def work() -> None:
        async with fakes(1) as servers:
            servers[0].blocks = 8
            async with front(instances(servers)) as gate:
                for seed in range(3):  # of 3 whole blocks each
                    await gate.ask(prompt(seed), 2)
                known = (await gate.part("vllm-0.cache"))["capacity"]["dram_bytes"]
                assert known == 8 * BLOCK * 1000
                assert (await gate.ask(prompt(2), 2)).cached_tokens == 3 * BLOCK
                # Of the first one the beginning went last.
                assert (await gate.ask(prompt(0), 2)).cached_tokens == 2 * BLOCK

    run(work())


@pytest.mark.parametrize("how", ["dies_after", "breaks_off_after"])
def test_a_server_that_dies_in_a_stream_is_gone_on_from_elsewhere(how: str) -> None:
    async def work() -> None:
        async with fakes(2) as servers, front(instances(servers)) as gate:
            setattr(servers[0], how, 5)
            setattr(servers[1], how, None)
            asked = [gate.submit(prompt(seed), 12) for seed in range(4)]
            for seed, pending in enumerate(asked):
                answer = await pending.answer()
                assert answer.tokens == answer_to(prompt(seed), 12)
                assert answer.finish == "length"
            assert gate.cluster.totals["resubmissions"] >= 1
            resumed = [body for body in servers[1].bodies if len(body["prompt"]) > len(prompt(0))]
            # With the tokens that it had (the last may come too late for that), and other draws than its first ones.
            assert all(len(body["prompt"]) - len(prompt(0)) + body["max_tokens"] == 12 for body in resumed)
            assert all(body["seed"] != 7 for body in resumed)

    run(work())


def test_a_server_whose_metrics_are_none_is_taken_out_alone() -> None:
    async def work() -> None:
        async with fakes(2) as servers, front(instances(servers)) as gate:
            servers[0].metrics = "vllm:num_requests_running many\n"
            await gate.until_gone("vllm-0")
            assert (await gate.ask(prompt(0), 3)).tokens == answer_to(prompt(0), 3)
            servers[0].metrics = None
            await gate.until_there("vllm-0", "vllm-1")

    run(work())


@pytest.mark.parametrize("how", ["more", "at once", "silent"])
def test_a_server_that_finds_no_end_is_left(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "END_SECONDS", 0.2)

    async def work() -> None:
        async with fakes(1) as servers, front(instances(servers)) as gate:
            servers[0].never_ends = how
            async with asyncio.timeout(20):
                answer = await gate.ask(prompt(0), 3)
            assert answer.tokens == answer_to(prompt(0), 3)
            assert answer.finish == "length"
            await gate.until(lambda state: servers[0].dropped > 0, "its connection is closed")

    run(work())


def test_nobody_is_sent_elsewhere_by_a_server() -> None:
    async def work() -> None:
        async with fakes(3) as servers, front(instances(servers[:2])) as gate:
            servers[0].moved_to = servers[2].url
            answers = await asyncio.gather(*(gate.ask(prompt(seed), 3) for seed in range(4)))
            assert [a.tokens for a in answers] == [answer_to(prompt(seed), 3) for seed in range(4)]
            await gate.until_gone("vllm-0")
            assert not servers[2].bodies

    run(work())


def test_a_dead_server_leaves_the_cluster_and_comes_back() -> None:
    async def work() -> None:
        async with fakes(2) as servers, front(instances(servers)) as gate:
            assert (await gate.ask(prompt(0), 2)).finish == "length"
            await servers[0].stop()
            await gate.until_gone("vllm-0")
            await gate.until_gone("vllm-0.cache")
            answers = await asyncio.gather(*(gate.ask(prompt(seed), 3) for seed in range(1, 5)))
            assert [a.tokens for a in answers] == [answer_to(prompt(seed), 3) for seed in range(1, 5)]
            await servers[0].start()
            await gate.until_there("vllm-0", "vllm-1")
            # Its cache is empty now.
            assert not (await gate.part("vllm-0.cache"))["blocks"]["dram"]

    run(work())


@pytest.mark.parametrize("pool", ["no", "estimated"])
def test_what_a_dead_server_has_computed_is_in_the_pool(pool: PoolUse) -> None:
    async def work() -> None:
        known = 4 if pool == "estimated" else 0
        async with fakes(2) as servers, front(instances(servers, pool=pool)) as gate:
            answer = await gate.ask(prompt(0), BLOCK)
            home = next(at for at, server in enumerate(servers) if server.bodies)
            await servers[home].stop()
            await gate.until_gone(f"vllm-{home}")
            again = await gate.ask([*prompt(0), *answer.tokens, 1, 2], 2)
            assert again.finish == "length"
            assert again.cached_tokens == known * BLOCK
            state = await gate.state()
            assert state["decisions"]["fetched_blocks"] == known

    run(work())


def test_what_clients_do_wrong_never_takes_a_server_down() -> None:
    async def work() -> None:
        async with fakes(1) as servers, front(instances(servers)) as gate:
            incarnation = (await gate.part("vllm-0"))["incarnation"]
            servers[0].status = 400
            answer = await gate.ask(PROMPT, 4)
            assert isinstance(answer.ending, Refused)
            assert answer.ending.reason is RejectReason.UNSERVABLE
            assert "as it was told to" in answer.ending.message
            for seed in range(8):
                await gate.ask(prompt(seed), 4)
            servers[0].status = 200
            assert (await gate.ask(PROMPT, 4)).tokens == answer_to(PROMPT, 4)
            assert (await gate.part("vllm-0"))["incarnation"] == incarnation
            # Nobody is asked twice for what he does not take.
            assert len(servers[0].bodies) == 10

    run(work())


@pytest.mark.parametrize("status", [429, 500])
def test_a_busy_or_broken_server_is_passed_over(status: int) -> None:
    async def work() -> None:
        async with fakes(2) as servers, front(instances(servers)) as gate:
            servers[0].status = status
            for seed in range(4):
                assert (await gate.ask(prompt(seed), 3)).tokens == answer_to(prompt(seed), 3)
            # Three faults in a row open the circuit; being busy is none.
            servers[0].status = 200
            await gate.until_there("vllm-0", "vllm-1")

    run(work())


def test_a_client_that_leaves_ends_the_request_at_the_server() -> None:
    async def work() -> None:
        async with fakes(1) as servers:
            servers[0].hangs_after = 2
            async with front(instances(servers)) as gate:
                pending = gate.submit(PROMPT, 50)
                await pending.until(2)
                pending.cancel()
                await gate.until(lambda state: not servers[0].running, "the server has dropped it")
                assert servers[0].dropped == 1
                await gate.until(lambda state: state["counters"]["vllm-0"]["jobs"] == 0, "it is gone")
                servers[0].hangs_after = None
                assert (await gate.ask(PROMPT, 3)).finish == "length"

    run(work())


def test_a_server_that_hangs_is_given_up() -> None:
    async def work() -> None:
        async with fakes(2) as servers, front(instances(servers, stall_seconds=1.0)) as gate:
            servers[0].hangs_after = 2
            for seed in range(2):
                assert (await gate.ask(prompt(seed), 6)).tokens == answer_to(prompt(seed), 6)
            assert gate.cluster.totals["resubmissions"] == 1

    run(work())


def test_load_of_others_is_seen_under_old_and_new_names() -> None:
    async def work() -> None:
        async with fakes(2) as servers:
            servers[1].usage_name = "gpu_cache_usage_perc"
            servers[0].running = 3
            async with front(instances(servers)) as gate:
                await gate.until(lambda state: _of(state, "vllm-0").get("running") == 3, "requests of others")
                for id_ in ("vllm-0", "vllm-1"):
                    await gate.until(lambda state, id_=id_: _of(state, id_).get("pages_free") == 48, "pages in use")

    run(work())


def test_costs_are_learned_for_each() -> None:
    async def work() -> None:
        async with fakes(2) as servers:
            servers[0].step, servers[1].step = 0.03, 0.004
            async with front(instances(servers)) as gate:
                await asyncio.gather(*(gate.ask(prompt(seed), 40) for seed in range(6)))
                await asyncio.gather(*(gate.ask(prompt(seed), 40) for seed in range(6, 12)))
                slow, fast = [(await gate.part(f"vllm-{at}"))["cost"] for at in range(2)]
                assert slow != fast
                # Of a step with one request.
                assert slow[3] + slow[4] > fast[3] + fast[4]

    run(work())


@pytest.mark.parametrize(
    ("changed", "says"), [({"models": ["other"]}, "it serves other, not tiny"), ({"health": 401}, "the API key")]
)
def test_a_wrong_model_or_key_is_a_mistake(changed: dict[str, object], says: str) -> None:
    async def work() -> None:
        async with fakes(1) as servers:
            for name, value in changed.items():
                setattr(servers[0], name, value)
            with pytest.raises(ConfigError, match=says):
                async with front(instances(servers)):
                    pass

    run(work())


def test_a_server_that_is_not_there_yet_joins_when_it_is() -> None:
    async def work() -> None:
        async with fakes(2) as servers:
            await servers[1].stop()
            served = [*instances(servers[:1]), Instance(id=PartId("late"), url=servers[1].url)]
            async with front(served, there=False) as gate:
                await gate.until_there("vllm-0")
                assert (await gate.ask(PROMPT, 2)).finish == "length"
                assert not await gate.part("late")
                await servers[1].start()
                await gate.until_there("late")

    run(work())


def _blocks(state: dict[str, object]) -> int:
    """Known to the directory."""
    parts: list[dict[str, dict[str, int]]] = state["parts"]  # type: ignore[assignment]
    return sum(part["blocks"]["dram"] for part in parts if "blocks" in part)


def _of(state: dict[str, object], id_: str) -> dict[str, object]:
    parts: list[dict[str, object]] = state["parts"]  # type: ignore[assignment]
    return next((part for part in parts if part["id"] == id_), {})
