"""An exchange whose generation ends together with its last token: the reader is told both."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from moonpool.core.vocabulary import RejectReason, RequestId, Slo
from moonpool.gateway.choice import Choice
from moonpool.gateway.cluster import Cluster
from moonpool.gateway.exchange import Exchange
from moonpool.gateway.generation import Cancelled, Ending, Generation, Job, Refused
from moonpool.gateway.problem import ApiError
from moonpool.gateway.replies import Shape
from moonpool.gateway.tokenizer import Tokenizer
from moonpool.wire.messages import Sampling, TokenOut

JOB = Job("label", (1, 2, 3), (), Sampling(seed=1, max_tokens=5), "", Slo(), "", 0.0, 600.0)
HANG = 10.0


@pytest.mark.parametrize(
    ("ending", "told"),
    [
        (Refused(RejectReason.TBT_SLO, "a step would take too long", 1.0), "too long"),
        (Cancelled("a test"), "cancelled"),
    ],
)
def test_a_refusal_that_comes_with_a_token_reaches_the_client(ending: Ending, told: str, tokenizer: Tokenizer) -> None:
    async def read() -> None:
        exchange = Exchange(cast(Cluster, None), None)
        generation = Generation(RequestId("r"), JOB, exchange.changed)
        exchange.choices.append(Choice(0, generation, tokenizer, ()))
        generation.fresh.append(TokenOut(RequestId("r"), 1, 0, 1000))
        generation.ending = ending
        exchange.changed()
        async with asyncio.timeout(HANG):
            await exchange.whole(cast(Shape, None))

    with pytest.raises(ApiError, match=told):
        asyncio.run(read())
