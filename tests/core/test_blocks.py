from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import moonpool
from moonpool.core.blocks import block_keys, common_blocks, extend_keys, hit_limit, key_space_id
from moonpool.core.vocabulary import KeySpace, KeySpaceId

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=60)


def space(id_: str = "s", block_tokens: int = 4) -> KeySpace:
    return KeySpace(KeySpaceId(id_), block_tokens, 2, 64)


def test_only_whole_blocks_have_keys() -> None:
    keys = block_keys(range(11), space())
    assert len(keys) == 2
    assert all(len(key) == 16 for key in keys)
    assert block_keys(range(3), space()) == ()


@given(a=TOKENS, b=TOKENS, prefix=TOKENS)
def test_keys_are_equal_exactly_as_far_as_the_tokens_are(a: list[int], b: list[int], prefix: list[int]) -> None:
    first, second = prefix + a, prefix + b
    keys = block_keys(first, space()), block_keys(second, space())
    same = next((i for i, (x, y) in enumerate(zip(first, second, strict=False)) if x != y), None)
    equal = (min(len(first), len(second)) if same is None else same) // 4
    assert keys[0][:equal] == keys[1][:equal]
    assert not {*keys[0][equal:]} & {*keys[1][equal:]}
    assert common_blocks(*keys) == equal


@given(tokens=TOKENS, known=st.integers(0, 15), salt=st.text(max_size=3))
def test_a_chain_may_be_continued_anywhere(tokens: list[int], known: int, salt: str) -> None:
    whole = block_keys(tokens, space(), salt)
    assert extend_keys(whole[:known], tokens, space(), salt) == whole


def test_a_shorter_sequence_cuts_the_known_chain() -> None:
    assert extend_keys(block_keys(range(12), space()), range(9), space()) == block_keys(range(8), space())


@pytest.mark.parametrize("salts", [("", "a"), ("a", "b"), ("a\ud800", "a")])
def test_salts_and_key_spaces_share_nothing(salts: tuple[str, str]) -> None:
    tokens = range(40)
    first, second = (block_keys(tokens, space(), salt) for salt in salts)
    assert not {*first} & {*second}
    assert not {*block_keys(tokens, space("s"))} & {*block_keys(tokens, space("t"))}


def test_salt_and_space_are_not_confused() -> None:
    assert block_keys(range(4), space("ab"), "c") != block_keys(range(4), space("a"), "bc")


@pytest.mark.parametrize("bad", [-1, 2**32])
def test_ids_outside_u32_are_refused(bad: int) -> None:
    with pytest.raises(OverflowError):
        block_keys([bad] * 4, space())


def test_every_field_of_the_layout_changes_the_key_space() -> None:
    given_ = {
        "model_fingerprint": "m",
        "dtype": "float32",
        "block_tokens": 64,
        "layers": 2,
        "kv_heads": 3,
        "head_dim": 4,
        "lora": "",
        "tensor_parallel": 1,
        "layout": "x",
    }
    ids = {key_space_id(**given_)}  # type: ignore[arg-type]
    for name, value in given_.items():
        other = value + 1 if isinstance(value, int) else value + "'"
        ids.add(key_space_id(**{**given_, name: other}))  # type: ignore[arg-type]
    assert len(ids) == 1 + len(given_)


def test_known_values_stay_as_they_are() -> None:
    """Keys are shared between processes, versions and disks: a change here is a change of the format."""
    id_ = key_space_id(model_fingerprint="m", dtype="float32", block_tokens=64, layers=30, kv_heads=3, head_dim=64)
    assert id_ == "626b55c3a327de6f3b106809acbd5c98"
    assert [k.hex() for k in block_keys(range(8), space(), "salt")] == [
        "658222b2db54ea5664a62a76538f0996",
        "867cd990f9808e6100e7e4ac39053b92",
    ]


def test_keys_do_not_depend_on_the_process() -> None:
    code = (
        "from moonpool.core.blocks import *; from moonpool.core.vocabulary import KeySpace\n"
        "print([k.hex() for k in block_keys(range(64), KeySpace('s', 4, 2, 64), 'salt')])"
    )
    root = str(Path(moonpool.__file__).parents[1])
    seen = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": root},
            capture_output=True,
            check=True,
            text=True,
            timeout=60,
        ).stdout
        for seed in ("0", "1", "4711")
    }
    assert len(seen) == 1


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 0), (4, 0), (5, 1), (8, 1), (9, 2)])
def test_one_token_is_always_computed(tokens: int, blocks: int) -> None:
    assert hit_limit(tokens, 4) == blocks
