"""What callers of the API give, held to what a node takes before anything is sent: a mistake costs its own call."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, SupportsFloat

from moonpool.core.blocks import block_keys
from moonpool.core.vocabulary import BlockKey, BlockMeta, KeySpace
from moonpool.errors import PoolError
from moonpool.messenger.questions import packed
from moonpool.store.rooms import check_metas

LONGEST_SECONDS = 86400.0
"""Of a wait or a timeout."""
MAX_INDEX = 1 << 32
MAX_PORT = 65535


def seconds(value: object, what: str) -> float:
    """Raises PoolError for what is no number."""
    if isinstance(value, SupportsFloat) and not isinstance(value, bool):
        number = float(value)
        if not math.isnan(number):
            return number
    raise PoolError(f"{what} is a number of seconds, not {value!r}")


def timeout(value: object) -> float:
    """Of a client's calls."""
    number = seconds(value, "timeout")
    if not 0 < number <= LONGEST_SECONDS:
        raise PoolError(f"timeout is more than 0 and at most {LONGEST_SECONDS:g} seconds, not {value!r}")
    return number


def seconds_until(value: object, now: float) -> float:
    """Until `wait_until`; 0 where it has passed. `now`: of time.monotonic()."""
    left = seconds(value, "wait_until") - now
    if left > LONGEST_SECONDS:
        raise PoolError(
            f"wait_until is {left:.3g} seconds from now, at most {LONGEST_SECONDS:g}: it is a time of "
            "time.monotonic(), not of time.time(); give time.monotonic() + 5 to wait for 5 seconds"
        )
    return max(0.0, left)


def whole(value: object, what: str) -> int:
    """Raises PoolError for what is no integer, of whatever library."""
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise PoolError(f"{what} is a whole number, not {value!r}") from None


def text(value: object, what: str) -> str:
    """Raises PoolError for what is no text, or none that can be sent."""
    if not isinstance(value, str) or not value:
        raise PoolError(f"{what} is a text, not {value!r}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise PoolError(f"{what} {value!r} is no text that can be encoded: it has half a character") from None
    return value


def listed(keys: Iterable[BlockKey]) -> list[BlockKey]:
    """Raises PoolError for what are no keys."""
    if isinstance(keys, Iterable) and not isinstance(keys, bytes | bytearray | memoryview | str | list | tuple):
        keys = list(keys)
    if not isinstance(keys, Sequence):
        raise PoolError(f"keys are a list of block keys, not a {type(keys).__name__}")
    packed(keys)
    return [*keys] if set(map(type, keys)) <= {bytes} else [BlockKey(bytes(key)) for key in keys]


def metas_of(space: KeySpace, keys: Sequence[BlockKey], metas: object) -> list[BlockMeta]:
    """One a key, or none at all; None among them stands for a block by itself."""
    if isinstance(metas, BlockMeta | str | bytes | dict) or not isinstance(metas, Iterable):
        raise PoolError(f"metas are a list of BlockMeta, one a key, not a {type(metas).__name__}")
    found = [_meta(meta) for meta in metas]
    if found:
        check_metas(space, keys, found)
    return found


def _meta(meta: object) -> BlockMeta:
    if meta is None:
        return BlockMeta()
    if not isinstance(meta, BlockMeta):
        raise PoolError(
            f"what goes with a block is a BlockMeta, not a {type(meta).__name__}: BlockMeta.of(parent, index, tokens)"
        )
    parts: tuple[Any, Any, Any] = meta.parent, meta.index, meta.tokens
    parent, index, tokens = parts
    if not isinstance(parent, bytes | None):
        raise PoolError(f"a meta's parent is the key of the block before it, as bytes, not {parent!r}")
    if not isinstance(tokens, bytes):
        raise PoolError(f"a meta's tokens are the bytes that BlockMeta.of makes, not a {type(tokens).__name__}")
    index = whole(index, "a meta's index")
    if not 0 <= index <= MAX_INDEX:
        raise PoolError(f"a meta's index, the block's place in its prompt, is 0 to {MAX_INDEX}, not {index}")
    return meta if type(meta.index) is int else BlockMeta(meta.parent, index, tokens)


def layers_of(space: KeySpace, layers: object) -> tuple[int, int]:
    """(first, count), all of them for None."""
    if layers is None:
        return 0, space.runs
    if not isinstance(layers, tuple | list) or len(layers) != 2:
        raise PoolError(f"layers {layers!r}: give (first, count)")
    first, chosen = (whole(number, "a number of layers") for number in layers)
    if first < 0 or chosen < 1 or first + chosen > space.runs:
        raise PoolError(f"layers ({first}, {chosen}): a block of this space has {space.runs}; give (first, count)")
    return first, chosen


def prompt_keys(tokens: object, space: KeySpace, salt: object) -> tuple[BlockKey, ...]:
    """`block_keys` of whatever holds the token ids of one prompt: a list, an array, a tensor."""
    shape = getattr(tokens, "shape", (0,))
    if isinstance(tokens, str | bytes | bytearray) or not isinstance(tokens, Iterable) or len(shape) != 1:
        what = f"a {type(tokens).__name__}" + (f" of shape {tuple(shape)}" if len(shape) != 1 else "")
        raise PoolError(f"a prompt's tokens are one-dimensional token ids, not {what}: tokenize a text, take one row")
    if not isinstance(salt, str):
        raise PoolError(f"a salt is a text, not {salt!r}")
    ids: Any = tokens if hasattr(tokens, "__getitem__") and not isinstance(tokens, dict) else list(tokens)
    try:
        return block_keys(ids, space, salt)
    except (TypeError, ValueError, OverflowError) as e:
        raise PoolError(f"token ids are whole numbers from 0 to {2**32 - 1}: {e}") from None


def address_of(address: object) -> tuple[str | Path, bool]:
    """A node's, and whether it is host:port (else the path of a socket). Raises PoolError for what can be neither."""
    if not isinstance(address, str | Path) or not str(address) or "\0" in str(address):
        raise PoolError(f"a node's address is the path of its socket, or host:port, not {address!r}")
    if isinstance(address, str):
        if "://" in address:
            raise PoolError(
                f"{address!r}: give host:port of the node's data address, without {address.partition('//')[0]}//"
            )
        if "/" not in address and ":" in address:
            host, _, port = address.rpartition(":")
            if not host or not (port.isascii() and port.isdigit() and 0 < int(port) <= MAX_PORT):
                raise PoolError(f"{address!r}: give host:port, with a port from 1 to {MAX_PORT}")
            return address, True
    path = Path(address)
    if path.exists() and not path.is_socket():
        what = "a folder" if path.is_dir() else "a file"
        inside = f", such as {found}" if (found := next(iter(sorted(path.glob("*.sock"))), None)) else ""
        raise PoolError(f"{address} is {what}, no node's socket: give the path of the socket{inside}")
    if isinstance(address, str) and "/" not in address and not path.exists() and path.suffix != ".sock":
        raise PoolError(f"{address!r}: give the path of a node's socket, or host:port; is the port missing?")
    return address, False
