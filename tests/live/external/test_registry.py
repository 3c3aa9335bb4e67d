"""Instances that come and go while the gateway runs."""

from __future__ import annotations

import pytest

from moonpool.core.vocabulary import PartId
from moonpool.errors import ConfigError
from moonpool.live.external.config import Instance

from .fake import answer_to, fakes
from .kit import front, instances, run

PROMPT = list(range(50, 90))


def test_one_that_is_added_serves_and_what_it_works_on_goes_on_when_it_is_taken_out() -> None:
    async def test() -> None:
        async with fakes(2) as servers:
            first, second = instances(servers)
            async with front([first]) as f:
                await f.instances.add(second)
                await f.until_there("vllm-0", "vllm-1")
                assert [i.id for i in f.instances.all] == ["vllm-0", "vllm-1"]
                servers[0].step = servers[1].step = 0.05
                under_way = [f.submit([*PROMPT, at], 30) for at in range(4)]
                for each in under_way:
                    await each.until(5)
                assert servers[1].bodies, "it gets requests"
                assert await f.instances.remove(second.id)
                await f.until_gone("vllm-1")
                for at, each in enumerate(under_way):
                    answer = await each.answer()
                    assert answer.tokens == answer_to([*PROMPT, at], 30)
                count = len(servers[1].bodies)
                await f.ask(PROMPT, 3)
                assert len(servers[1].bodies) == count
                # And again, by the same name.
                await f.instances.add(second)
                await f.until_there("vllm-1")

    run(test())


def test_what_cannot_be_served_from_is_not_added() -> None:
    async def test() -> None:
        async with fakes(2) as servers:
            first, second = instances(servers)
            async with front([first]) as f:
                for other, says in (
                    (Instance(first.id, second.url), "with the id vllm-0 already"),
                    (Instance(second.id, first.url), f"with the url {first.url} already"),
                ):
                    with pytest.raises(ConfigError, match=says):
                        await f.instances.add(other)
                servers[1].models = ["other"]
                with pytest.raises(ConfigError, match="it serves other, not tiny"):
                    await f.instances.add(second)
                assert [i.id for i in f.instances.all] == ["vllm-0"]
                servers[1].models = ["tiny"]
                await f.instances.add(second)
                assert not await f.instances.remove(PartId("vllm-9"))

    run(test())


def test_all_may_come_later() -> None:
    async def test() -> None:
        async with fakes(1) as servers, front([], there=False) as f:
            await f.until(lambda state: True, "the Conductor answers")
            await f.instances.add(instances(servers)[0])
            await f.until_there("vllm-0")
            assert (await f.ask(PROMPT, 4)).tokens == answer_to(PROMPT, 4)

    run(test())
