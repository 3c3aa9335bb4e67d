"""What others call themselves, and what they say, in a log."""

from __future__ import annotations

import logging
import sys

import msgspec
import pytest

from moonpool.core.events import Registered
from moonpool.core.vocabulary import Incarnation, PartId, PartKind, Peer
from moonpool.live.process import log_to_stderr
from moonpool.wire import codec
from moonpool.wire.legible import MOST_CHARS, legible
from moonpool.wire.messages import Envelope


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("vllm worker-3 (übrig)", "vllm worker-3 (übrig)"),
        ("a\nforged line\r\x1b[2J\0", "a\\nforged line\\r\\x1b[2J\\x00"),
        ("right\u202eleft\u2028", "right\\u202eleft\\u2028"),
        ("half a character \ud800", "half a character \\ud800"),
        ("x" * 100, "x" * 16 + "… (100 characters)"),
    ],
    ids=["a name", "control characters", "odd ones", "half a one", "long"],
)
def test_what_others_say_is_one_line_of_limited_length(text: str, shown: str) -> None:
    assert legible(text, 16 if len(text) == 100 else 64) == shown


@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
def test_an_event_of_the_log_is_one_line_whatever_is_in_it(
    as_json: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(logging, "captureWarnings", lambda wanted: None)
    before = root.level, logging.getLogger("moonpool").level
    try:
        log_to_stderr("node-0", "info", as_json)
        logging.getLogger("moonpool.test").warning(
            "%s left", "evil\n12:00:00 info all is well\x1b[2J" + "x" * (1 << 20)
        )
    finally:
        root.setLevel(before[0])
        logging.getLogger("moonpool").setLevel(before[1])
    sys.stderr.flush()
    out = capsys.readouterr().err
    assert out.count("\n") == 1
    assert out.endswith("\n")
    assert out[:-1].isprintable()
    assert len(out) < MOST_CHARS + 200


def test_a_part_with_an_endless_name_is_no_part() -> None:
    def sent(**changed: str) -> bytes:
        peer = msgspec.structs.replace(Peer(PartId("node-0"), Incarnation("1"), "tcp://127.0.0.1:9"), **changed)
        return codec.encode(Envelope(peer, Incarnation(""), Registered(PartKind.NODE, peer)))

    assert codec.decode(sent()).sender.id == "node-0"
    for field in ("id", "incarnation", "address"):
        with pytest.raises(msgspec.ValidationError, match="length"):
            codec.decode(sent(**{field: "x" * (1 << 20)}))
