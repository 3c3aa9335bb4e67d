"""The board: what the node shows there, and what a client may make of it while blocks come and go."""

from __future__ import annotations

import mmap
import struct
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from moonpool.core.vocabulary import BlockKey, KeySpaceId, NodePeer
from moonpool.store import Client, key_of
from moonpool.store.board import LEAST_ENTRIES, WAYS, Board, BoardView, space_tag

from .kit import BLOCK, SPACE, Conductor, bytes_of, eventually, keys_of

Connect = Callable[..., Client]
HERE = KeySpaceId("aa")
TAG = space_tag(HERE)


@pytest.fixture
def board() -> Iterator[Board]:
    board = Board(1 << 20)
    yield board
    board.close()


@pytest.fixture
def view(board: Board) -> BoardView:
    return BoardView(board.fd, board.entries)


def test_what_is_shown_is_seen_until_it_is_hidden(board: Board, view: BoardView) -> None:
    one, two = keys_of("k", 2)
    board.show([((HERE, one), 4096, 100)])
    seen = view.find(TAG, one)
    assert seen is not None
    assert (seen.offset, seen.nbytes) == (4096, 100)
    assert view.find(TAG, two) is None
    assert view.find(space_tag(KeySpaceId("bb")), one) is None
    board.show([((HERE, two), 8192, 100)])
    assert view.is_still(seen)
    board.hide(HERE, one)
    assert not view.is_still(seen)
    assert view.find(TAG, one) is None


def test_a_block_that_went_and_came_back_is_another_sight(board: Board, view: BoardView) -> None:
    """Its bytes may have been anything in between, even where it comes back to the same place."""
    (key,) = keys_of("k", 1)
    board.show([((HERE, key), 4096, 100)])
    seen = view.find(TAG, key)
    assert seen is not None
    board.hide(HERE, key)
    board.show([((HERE, key), 4096, 100)])
    assert not view.is_still(seen)
    assert view.find(TAG, key) is not None


def test_a_full_bucket_leaves_the_rest_off_the_board(board: Board, view: BoardView) -> None:
    same_bucket = [BlockKey(struct.pack("<2Q", 3, high)) for high in range(WAYS + 1)]
    for at, key in enumerate(same_bucket):
        board.show([((HERE, key), at * 4096, 100)])
    assert [view.find(TAG, key) is not None for key in same_bucket] == [True] * WAYS + [False]
    board.hide(HERE, same_bucket[-1])
    board.hide(HERE, same_bucket[0])
    board.show([((HERE, same_bucket[-1]), 4096 * WAYS, 100)])
    assert view.find(TAG, same_bucket[-1]) is not None
    resident = {(HERE, key): (at * 4096, 100) for at, key in enumerate(same_bucket) if at}
    board.check_integrity(resident)
    del resident[HERE, same_bucket[1]]
    with pytest.raises(AssertionError):
        board.check_integrity(resident)


def test_a_client_cannot_write_on_it(board: Board) -> None:
    with pytest.raises(PermissionError):
        mmap.mmap(board.fd, LEAST_ENTRIES)


def test_no_block_is_taken_for_another_while_blocks_come_and_go(conductor: Conductor, connect: Connect) -> None:
    """The arena holds 8 of 24 blocks: each put evicts what a reader may just be copying."""
    node = conductor.start_node("node-0", dram_bytes=8 * BLOCK)
    writer, reader = (connect(node, "near").space(SPACE) for _ in range(2))
    keys = keys_of("k", 24)
    over = threading.Event()

    def write() -> None:
        try:
            for turn in range(600):
                key = keys[turn * 7 % len(keys)]
                writer.put(key, bytes_of(key))
        finally:
            over.set()

    thread = threading.Thread(target=write)
    thread.start()
    target, found, at = np.empty(BLOCK, np.uint8), 0, 0
    while not over.is_set():
        key = keys[(at := at + 1) % len(keys)]
        if reader.get_into(key, target):
            found += 1
            assert np.array_equal(target, bytes_of(key))
    thread.join()
    assert found


def test_what_is_read_from_the_board_counts_as_used(conductor: Conductor, connect: Connect) -> None:
    """With room for 8 blocks, the first one outlives those that were put after it and not read."""
    node = conductor.start_node("node-0", dram_bytes=8 * BLOCK)
    pool = connect(node, "near")
    space = pool.space(SPACE)
    keys = keys_of("k", 12)
    for key in keys[:8]:
        space.put(key, bytes_of(key))
    hits = pool.stats()["hit_blocks"]
    target = np.empty(BLOCK, np.uint8)
    for _ in range(3):
        assert space.get_into(keys[0], target)
    eventually(lambda: pool.stats()["hit_blocks"] == hits + 3, "the node hears of three reads")
    for key in keys[8:]:
        space.put(key, bytes_of(key))
    assert space.exists_many(keys[:5]) == [True, False, False, False, False]


def test_a_buffer_may_be_given_without_a_list_around_it(node: NodePeer, connect: Connect) -> None:
    for way in ("near", "far"):
        space = connect(node, way).space(SPACE)
        space.put(key_of("k"), bytes_of(b"k"))
        target = np.zeros((SPACE.runs, SPACE.run_bytes), np.uint8)
        assert space.get_into(key_of("k"), target)
        assert np.array_equal(target.reshape(-1), bytes_of(b"k"))
