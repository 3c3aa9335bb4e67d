"""Answers of a peer that was let in and does not keep to the protocol."""

from __future__ import annotations

import time

import pytest

from moonpool.core.vocabulary import BlockMeta, KeySpace
from moonpool.errors import TransferError
from moonpool.messenger import asking
from moonpool.messenger.channel import Channel
from moonpool.messenger.questions import GetBlocks, Given, Refused
from moonpool.messenger.waiting import RefusedError

from .kit import SECONDS, SPACE, keys_of

REQUEST = GetBlocks(KeySpace(SPACE, 16, 1, 4096), keys_of("a", 1)[0], 0, 1, SECONDS)


@pytest.mark.parametrize(
    "answer",
    [
        Given(b"\1", bytes(7)),
        Given(b"\1", bytes(8), copies=bytes(7)),
        Given(b"\1", bytes(8), metas=(BlockMeta(),)),
        Given(b"\1", b""),
        Given(b"\2", bytes(8)),
        Given(b"", b""),
    ],
)
def test_an_answer_that_does_not_add_up_is_no_refusal(ends: tuple[Channel, Channel], answer: Given) -> None:
    with pytest.raises(TransferError) as caught:
        get(ends, answer)
    assert not isinstance(caught.value, RefusedError)


def test_a_refusal_is(ends: tuple[Channel, Channel]) -> None:
    with pytest.raises(RefusedError, match="no such blocks"):
        get(ends, Refused("no such blocks"))


def get(ends: tuple[Channel, Channel], answer: Given | Refused) -> None:
    one, two = ends
    until = time.monotonic() + SECONDS
    two.send_header(answer, until)
    asking.get(one, REQUEST, placed, landed, until)


def placed(given: Given) -> list[None]:
    raise AssertionError("nothing of it is to be kept")


def landed(number: int, sums: object) -> None:
    raise AssertionError("nothing came")
