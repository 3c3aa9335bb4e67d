"""What goes into one end of a connection comes out of the other, however it is cut."""

from __future__ import annotations

import itertools
import threading
import time

import numpy as np
import pytest

from moonpool.errors import TransferError
from moonpool.messenger.channel import MAX_BUFFERS, PIECE_BYTES, Channel, greet
from moonpool.wire.security import data_key

SECONDS = 20.0


@pytest.mark.parametrize(
    "sizes",
    [
        [],
        [0],
        [5, 0, 7],
        [1] * (2 * MAX_BUFFERS + 3),
        [PIECE_BYTES - 1, 1, 1],
        [PIECE_BYTES + 1, 10, 2 * PIECE_BYTES, 0, 3],
        [64 << 10] * 100,
    ],
    ids=["nothing", "an empty one", "small ones", "many", "just a call's worth", "large and small", "blocks"],
)
def test_parts_come_one_behind_the_other(ends: tuple[Channel, Channel], sizes: list[int]) -> None:
    one, two = ends
    until = time.monotonic() + SECONDS
    content = np.random.default_rng(0).integers(0, 256, sum(sizes) + 1, np.uint8)
    bounds = np.cumsum([0, *sizes])
    parts = [content[start:end] for start, end in itertools.pairwise(bounds)]
    arrived = np.empty_like(content)
    receiver = threading.Thread(target=two.receive_into, args=(arrived, until))
    receiver.start()
    one.send_all(parts, until, more=True)
    one.send(content[-1:], until)
    receiver.join(SECONDS)
    assert np.array_equal(arrived, content)


def test_a_web_server_is_told_from_a_node(ends: tuple[Channel, Channel]) -> None:
    one, two = ends
    until = time.monotonic() + SECONDS
    two.send(b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain; charset=utf-8\r\n", until)
    with pytest.raises(TransferError, match="speaks HTTP: that is no node's data address"):
        greet(one, data_key(None), until)


def test_parts_that_nobody_takes_end_with_the_deadline(ends: tuple[Channel, Channel]) -> None:
    one, _ = ends
    part = np.zeros(PIECE_BYTES, np.uint8)
    with pytest.raises(TimeoutError):
        one.send_all([part] * 64, time.monotonic() + 0.3)
