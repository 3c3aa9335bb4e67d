"""Copies that go past the processor's cache: numpy's bytes, nothing beside them, and none where none can be."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.store.copying import ALONE_BYTES, copier, copy
from moonpool.store.past_cache import copy_past_cache

MEMORY = np.frombuffer(np.random.default_rng(7).bytes(1 << 16), np.uint8)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 200), st.integers(0, 200), st.integers(0, 2000))
def test_it_copies_any_size_from_anywhere_to_anywhere(start: int, target_start: int, nbytes: int) -> None:
    copy_lines = copy_past_cache()
    assert copy_lines is not None, "llvmlite is among what the tests need"
    target = np.full(4096, 99, np.uint8)
    expected = target.copy()
    expected[target_start : target_start + nbytes] = MEMORY[start : start + nbytes]
    copy_lines(target[target_start : target_start + nbytes], MEMORY[start : start + nbytes])
    assert np.array_equal(target, expected)


@pytest.mark.parametrize("is_short", [True, False])
def test_it_writes_neither_beyond_its_target_nor_into_what_is_read_only(is_short: bool) -> None:
    copy_lines = copy_past_cache()
    assert copy_lines is not None
    target = np.zeros(999 if is_short else 1000, np.uint8)
    target.flags.writeable = is_short
    with pytest.raises(ValueError, match="cannot be copied"):
        copy_lines(target, MEMORY[:1000])
    assert not target.any()


def test_large_copies_alone_go_past_the_cache() -> None:
    assert copier(ALONE_BYTES - 1) is copy
    assert copier(ALONE_BYTES) is copy_past_cache()


def test_without_llvmlite_they_go_the_usual_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llvmlite.binding", None)
    copy_past_cache.cache_clear()
    try:
        assert copier(ALONE_BYTES) is copy
    finally:
        copy_past_cache.cache_clear()
