"""Envelopes as msgpack. Decoding yields msgspec types only; anything else is a `msgspec.MsgspecError`."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from moonpool.wire.messages import Envelope

T = TypeVar("T")

MAX_MESSAGE_BYTES = 16 << 20

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Envelope)


def encode(envelope: Envelope) -> bytes:
    return _encoder.encode(envelope)


def decode(data: bytes | memoryview) -> Envelope:
    return decoded(_decoder, data)


def decoded(decoder: msgspec.msgpack.Decoder[T], data: bytes | bytearray | memoryview) -> T:
    """What these bytes are; whatever is wrong with them is a `msgspec.MsgspecError`."""
    try:
        return decoder.decode(data)
    except RecursionError:
        # A field that no message has is skipped level by level, however many it has.
        raise msgspec.DecodeError("nested too deeply") from None
