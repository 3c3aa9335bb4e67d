"""A node and one client's socket: what the client is slow to take, and what it says that makes no sense."""

from __future__ import annotations

import math
import select
import socket
from collections.abc import Callable, Iterator

import msgspec
import pytest

from moonpool.core.vocabulary import NodePeer
from moonpool.messenger.questions import Exists, Marks
from moonpool.store.client import NodeClient, enter
from moonpool.store.messages import (
    Ask,
    Call,
    Commit,
    Frames,
    LeaseEach,
    Measure,
    Measured,
    OpenEach,
    RefusedCall,
    RoomOpened,
    Told,
    answer_frames,
    frame,
)

from .kit import SECONDS, SPACE, keys_of

Join = Callable[..., NodeClient]
K = keys_of("k", 2)
PACKED = b"".join(K)


class Raw:
    """A client that says what it likes and hears when it likes."""

    def __init__(self, node: NodePeer) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(SECONDS)
        self.socket.connect(node.socket_path)
        self._frames: Frames[object] = answer_frames()  # type: ignore[assignment]
        enter(self.socket, self._frames, "raw", "1")  # type: ignore[arg-type]

    def say(self, *calls: Call) -> None:
        self.socket.sendall(b"".join(frame(call) for call in calls))

    def hear(self, count: int) -> list[object]:
        answers: list[object] = []
        while len(answers) < count and (data := self.socket.recv(1 << 16)):
            answers += self._frames.feed(data)
        return answers


@pytest.fixture
def raw(node: NodePeer) -> Iterator[Raw]:
    raw = Raw(node)
    yield raw
    raw.socket.close()


def test_a_client_that_takes_no_answers_is_not_listened_to_and_loses_none(node: NodePeer, join: Join, raw: Raw) -> None:
    said = 0
    while select.select([], [raw.socket], [], 0.2)[1]:
        raw.say(*(Measure(serial) for serial in range(said, said + 500)))
        said += 500
        assert said < 1_000_000, "the node listens for ever"
    # The others are served meanwhile.
    assert join(node).stats().result(SECONDS)["clients"] == 2
    answers = raw.hear(said)
    assert [answer.serial for answer in answers if isinstance(answer, Measured)] == list(range(said))


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (OpenEach(1, SPACE, PACKED, ({"parent": None},)), "Expected `array`, got `object`"),  # type: ignore[arg-type]
        (Commit(1, 99, b""), "no room 99 to commit"),
        (LeaseEach(1, msgspec.structs.replace(SPACE, runs=0), PACKED, 1.0, False), "Expected `int` >= 1"),
        (LeaseEach(1, msgspec.structs.replace(SPACE, run_bytes=0), PACKED, 1.0, False), "Expected `int` >= 1"),
        (LeaseEach(1, SPACE, PACKED, math.nan, False), "Expected `float`"),
        (LeaseEach(1, SPACE, b"short", 1.0, False), "no whole block keys"),
        (Ask(1, Exists(SPACE.id, b"short")), None),
    ],
    ids=["metas", "no room", "no runs", "empty runs", "no time", "short keys", "keys"],
)
def test_what_cannot_be_is_refused(node: NodePeer, raw: Raw, call: Call, reason: str | None) -> None:
    raw.say(call)
    heard = raw.hear(1)
    assert isinstance(heard[0], RefusedCall | Told)
    assert reason is None or (isinstance(heard[0], RefusedCall) and reason in heard[0].reason)
    raw.say(Ask(2, Exists(SPACE.id, PACKED)))
    assert raw.hear(1) == [Told(2, Marks(b"\0\0"))]


@pytest.mark.parametrize("checksums", [b"", b"x" * 63, b"x" * 72], ids=["none", "half of one", "too many"])
def test_a_commit_without_a_checksum_for_each_run_is_refused(raw: Raw, checksums: bytes) -> None:
    raw.say(OpenEach(1, SPACE, PACKED, ()))
    (room,) = raw.hear(1)
    assert isinstance(room, RoomOpened)
    raw.say(Commit(2, room.room, checksums), Ask(3, Exists(SPACE.id, PACKED)))
    refused, told = raw.hear(2)
    assert isinstance(refused, RefusedCall)
    assert "checksums" in refused.reason
    assert told == Told(3, Marks(b"\0\0"))


def test_a_client_with_an_endless_name_is_let_in_and_named_briefly(
    node: NodePeer, join: Join, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "moonpool.store.session")
    name = "me\n12:00:00 error the node is on fire\x1b[2J" + "x" * (1 << 20)
    client = NodeClient.connect(node.socket_path, name=name, incarnation=name)
    try:
        assert client.stats().result(SECONDS)["clients"] == 1
    finally:
        client.close()
    (joined,) = (record.getMessage() for record in caplog.records if record.getMessage().endswith(" joined"))
    assert joined.startswith("client me\\n12:00:00 error the node")
    assert joined.isprintable()
    assert len(joined) < 300
