"""What the blocks of a room are of: told by workers, kept with the blocks, and from whom it is not taken."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from moonpool.core.vocabulary import BlockKey, BlockMeta, NodePeer, RequestId
from moonpool.errors import PoolError
from moonpool.messenger.questions import DescribeBlocks, Described, packed
from moonpool.store.client import NodeClient
from moonpool.store.messages import TellTokens

from .kit import SECONDS, SPACE, Conductor, bytes_of, eventually, fill, keys_of

Join = Callable[..., NodeClient]
SIZE = SPACE.block_tokens
K = keys_of("t", 3)
TOKENS = list(range(100, 100 + 3 * SIZE))
OTHERS = [7] * (3 * SIZE)
WHOLE = [BlockMeta.of(K[i - 1] if i else None, i, TOKENS[i * SIZE : (i + 1) * SIZE]) for i in range(3)]


def described(client: NodeClient, keys: list[BlockKey]) -> list[BlockMeta | None]:
    answer = client.ask(DescribeBlocks(SPACE.id, packed(keys))).result(SECONDS)
    assert isinstance(answer, Described)
    return list(answer.metas)


def test_a_block_is_known_with_its_tokens_from_the_first_moment_on(node: NodePeer, join: Join) -> None:
    client = join(node)
    with client.open_room(SPACE, K).result(SECONDS) as room:
        client.tell_tokens(room, TOKENS[: 2 * SIZE + 3])
        for index, key in enumerate(K):
            fill(client, room, index, bytes_of(key))
        # A part of a block's tokens says nothing of it.
        assert described(client, K) == [*WHOLE[:2], BlockMeta(K[1], 2)]
        client.tell_tokens(room, [*OTHERS[: 2 * SIZE], *TOKENS[2 * SIZE :], 5])
    # What was said first stays; what was not is said.
    assert described(client, K) == WHOLE


def test_of_a_hand_over_room_its_writer_and_its_reader_tell(conductor: Conductor, node: NodePeer, join: Join) -> None:
    writer, reader, stranger = join(node), join(node), join(node)
    conductor.reserve(node, "r", K)
    with writer.join_room(RequestId("r"), 1).result(SECONDS) as room:
        stranger.tell_tokens(room, OTHERS)
        assert described(stranger, K) == [None] * 3
        writer.tell_tokens(room, TOKENS[:SIZE])
        for index, key in enumerate(K):
            fill(writer, room, index, bytes_of(key))
        contents = reader.await_room(RequestId("r"), 1, SECONDS).result(SECONDS)
        assert contents is not None
        assert described(reader, K) == [WHOLE[0], BlockMeta(K[0], 1), BlockMeta(K[1], 2)]
        reader.tell_tokens(contents, TOKENS)
        assert described(reader, K) == WHOLE
    # The room is gone.
    contents.close()
    reader.tell_tokens(contents, OTHERS)
    assert described(reader, K) == WHOLE
    reader.audit().result(SECONDS)


def test_blocks_that_were_there_are_named_too(node: NodePeer, join: Join) -> None:
    client = join(node)
    for told in ([], TOKENS):
        with client.open_room(SPACE, K).result(SECONDS) as room:
            client.tell_tokens(room, told)
            for index, key in enumerate(K):
                if room.view(index) is not None:
                    fill(client, room, index, bytes_of(key))
    assert described(client, K) == WHOLE


def test_half_a_token_ends_the_connection(node: NodePeer, join: Join) -> None:
    client = join(node)
    room = client.open_room(SPACE, K).result(SECONDS)
    client._send(TellTokens(room.id, b"\x01\x02\x03"))
    eventually(lambda: client.is_gone, "the client is refused")
    with pytest.raises(PoolError, match="gone"):
        client.tell_tokens(room, TOKENS)
    assert described(join(node), K) == [None] * 3
