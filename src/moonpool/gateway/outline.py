"""How much structure a JSON body has, found out before it is parsed.

Eight megabytes of empty arrays make millions of objects, and the parser holds the interpreter lock until all are made.
"""

from __future__ import annotations

import numpy as np


def count_outside_strings(body: bytes | bytearray, marks: bytes) -> int:
    """How often the ASCII characters `marks` stand in `body` outside strings. Mostly without the interpreter lock."""
    plain = body.replace(b"\\\\", b"..").replace(b'\\"', b"..") if b"\\" in body else body
    letters = np.frombuffer(plain, np.uint8)
    in_string = np.logical_xor.accumulate(letters == ord('"'))
    return sum(int(np.count_nonzero((letters == mark) & ~in_string)) for mark in marks)


def exceeds(body: bytes | bytearray, marks: bytes, most: int) -> bool:
    """Whether there are more than `most` of `marks` outside strings."""
    return sum(map(body.count, marks)) > most and count_outside_strings(body, marks) > most
