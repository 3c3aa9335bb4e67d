"""A user's buffers as plain bytes, without copying: whatever has the buffer protocol, and torch CPU tensors."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from moonpool.errors import PoolError
from moonpool.messenger.transfer import Bytes

Buffer = Any
"""bytes, bytearray, memoryview, a numpy array, a torch tensor, …: contiguous, in this machine's memory."""

PAGE_BYTES = 4096
_UINT8 = np.dtype(np.uint8)


def as_bytes(buffer: Buffer) -> Bytes:
    """The same memory, flat. Raises PoolError for what has no bytes in one piece."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(buffer, torch.Tensor):
        return _tensor_bytes(buffer, torch.uint8)
    try:
        if isinstance(buffer, np.ndarray):
            if _is_flat(buffer):
                return buffer
            if not buffer.flags.c_contiguous:
                raise BufferError("it is not contiguous: np.ascontiguousarray makes it so")
            # By way of the plain memory: formats of other packages (bfloat16) have no buffer of their own, and what
            # numpy derives from its array (a matrix) cannot be flat.
            return np.asarray(buffer).reshape(-1).view(np.uint8)
        return np.frombuffer(memoryview(buffer).cast("B"), np.uint8)
    except (TypeError, ValueError, BufferError) as e:
        raise PoolError(
            f"a {type(buffer).__name__} is no buffer for the pool ({e}): give contiguous bytes, a numpy array or a "
            "torch tensor on the CPU"
        ) from None


def _is_flat(buffer: Buffer) -> bool:
    """It is what `as_bytes` makes of others."""
    return type(buffer) is np.ndarray and buffer.dtype == _UINT8 and buffer.ndim == 1 and buffer.strides == (1,)


def as_pieces(buffers: Sequence[Buffer] | Buffer, nbytes: int, writable: bool = False) -> list[Bytes]:
    """Raises PoolError unless they have exactly so many bytes together (and can be written to)."""
    if not isinstance(buffers, (list, tuple)):
        # One buffer, whose elements would otherwise pass for buffers.
        buffers = [buffers]
    if len(buffers) == 1 and not writable and _is_flat(buffers[0]) and buffers[0].nbytes == nbytes:
        # As nearly always; a batch has many of them.
        return [buffers[0]]
    pieces = [as_bytes(buffer) for buffer in buffers]
    total = sum(piece.nbytes for piece in pieces)
    if total != nbytes:
        buffers_given = "1 buffer" if len(pieces) == 1 else f"{len(pieces)} buffers"
        raise PoolError(f"{total} bytes in {buffers_given}, where {nbytes} bytes are needed")
    if writable and not all(piece.flags.writeable for piece in pieces):
        raise PoolError("a buffer to read into is read-only: give a bytearray or an array that can be written")
    return pieces


def part_of(pieces: Sequence[Bytes], start: int, stop: int) -> list[Bytes]:
    """Bytes `start` to `stop` of all of them together."""
    found, at = [], 0
    for piece in pieces:
        chosen = piece[max(0, start - at) : max(0, stop - at)]
        if chosen.nbytes:
            found.append(chosen)
        at += piece.nbytes
    return found


def private_bytes(nbytes: int) -> Bytes:
    """Fresh memory that begins with a page, as blocks of an arena do."""
    memory = np.empty(nbytes + PAGE_BYTES, np.uint8)
    start = -memory.ctypes.data % PAGE_BYTES
    return memory[start : start + nbytes]


def _tensor_bytes(tensor: Any, uint8: Any) -> Bytes:
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise PoolError("a tensor for the pool must be contiguous and on the CPU: give tensor.contiguous().cpu()")
    try:
        flat: Bytes = tensor.detach().reshape(-1).view(uint8).numpy()
    except (RuntimeError, TypeError) as e:
        # One whose bytes are not its values, such as a conjugate that is still to be taken.
        raise PoolError(f"a tensor is no buffer for the pool ({e}): give tensor.clone()") from None
    return flat
