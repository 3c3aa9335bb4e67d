from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.core.vocabulary import Incarnation, KeySpaceId, NodePeer, PartId, Peer
from moonpool.wire import codec
from moonpool.wire.messages import Envelope, Locate, Located

NODES = [NodePeer(PartId(f"node-{i}"), Incarnation("1"), f"tcp://h:{i}", f"h:{i}", "") for i in range(20)]
ME = Peer(PartId("conductor"), Incarnation("1"), "tcp://h:1")


@settings(max_examples=50)
@given(st.lists(st.lists(st.sampled_from(NODES), unique=True, max_size=20), max_size=30))
def test_holders_survive_their_journey(holders: list[list[NodePeer]]) -> None:
    sent = Envelope(ME, "", Located.of(7, holders))
    body = codec.decode(codec.encode(sent)).body
    assert isinstance(body, Located)
    assert body.serial == 7
    assert [sorted(nodes, key=NODES.index) for nodes in body.holders()] == [
        sorted(nodes, key=NODES.index) for nodes in holders
    ]


def test_keys_that_are_not_whole_are_not_asked_for() -> None:
    assert Locate(ME, 1, KeySpaceId("s"), b"k" * 16 + b"l" * 16).unpacked() == [b"k" * 16, b"l" * 16]
    assert Locate(ME, 1, KeySpaceId("s"), b"k" * 17).unpacked() == [b"k" * 16]
