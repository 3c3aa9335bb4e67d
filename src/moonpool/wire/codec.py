"""Envelopes as msgpack. Decoding yields msgspec types only; anything else is a `msgspec.MsgspecError`."""

from __future__ import annotations

import msgspec

from moonpool.wire.messages import Envelope

MAX_MESSAGE_BYTES = 16 << 20

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Envelope)


def encode(envelope: Envelope) -> bytes:
    return _encoder.encode(envelope)


def decode(data: bytes | memoryview) -> Envelope:
    return _decoder.decode(data)
