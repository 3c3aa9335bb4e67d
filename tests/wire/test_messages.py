from __future__ import annotations

import math

import msgspec
import msgspec.inspect as mi
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.core.actions import Replicate
from moonpool.core.vocabulary import Capacity, Incarnation, KeySpace, KeySpaceId, NodePeer, PartId, Peer
from moonpool.wire import codec
from moonpool.wire.messages import Envelope, Locate, Located, Message

NODES = [NodePeer(PartId(f"node-{i}"), Incarnation("1"), f"tcp://h:{i}", f"h:{i}", "") for i in range(20)]
COUNTS = Capacity.__struct_fields__
SPACE = KeySpace(KeySpaceId("aa" * 16), 16, 4, 4096)
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


def _unbounded(kind: mi.Type, seen: set[type]) -> list[str]:
    """Fields called `time_left`, or of a count of something, that take any number."""
    found: list[str] = []
    match kind:
        case mi.StructType(cls=cls, fields=fields) if cls not in seen:
            seen.add(cls)
            for field in fields:
                if isinstance(field.type, mi.FloatType) and field.name in ("time_left", "waited", "seconds"):
                    found += [f"{cls.__name__}.{field.name}"] * (field.type.le is None)
                if isinstance(field.type, mi.IntType) and field.name in ("attempt", "serial", "seq", *COUNTS):
                    found += [f"{cls.__name__}.{field.name}"] * (field.type.ge is None or field.type.le is None)
                found += _unbounded(field.type, seen)
        case mi.UnionType(types=types) | mi.TupleType(item_types=types):
            found += [name for each in types for name in _unbounded(each, seen)]
        case mi.VarTupleType(item_type=item):
            found += _unbounded(item, seen)
    return found


def test_times_and_counts_in_messages_have_an_end() -> None:
    assert not _unbounded(mi.type_info(Message), set())


@pytest.mark.parametrize("time_left", [math.nan, math.inf, -math.inf, 1e300])
def test_a_time_that_is_no_time_is_no_message(time_left: float) -> None:
    order = Replicate(NODES[0], SPACE, (), NODES[1], time_left)
    with pytest.raises(msgspec.ValidationError):
        codec.decode(codec.encode(Envelope(ME, "", order)))
