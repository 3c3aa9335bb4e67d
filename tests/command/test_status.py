"""The status table."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import msgspec
import pytest
from rich.console import Console

from moonpool.command import status as command
from moonpool.errors import MoonpoolError

STATE = {
    "placement": "algorithm-1",
    "parts": [
        {
            "id": "decode-0",
            "kind": "decode",
            "health": "up",
            "node": "node-0",
            "running": 3,
            "queued": 1,
            "pages_free": 30,
            "capacity": {"pages": 136, "slots": 16, "something_new": 1},
        },
        {
            "id": "node-0",
            "kind": "node",
            "capacity": {"dram_bytes": 512 << 20},
            "used_bytes": 3 << 20,
            "blocks": {"dram": 9},
        },
        {},
    ],
    "requests": {"decoding": 3, "held": 0},
    "decisions": {"arrived": 12, "finished": 9, "rejected": {"queue-full": 2}},
    "counters": {"node-0": {"messenger_bytes_sent": 5 << 20}},
    "a_field_of_tomorrow": [1],
}


class Gateway(BaseHTTPRequestHandler):
    """Answers /cluster with `body` and notes what it was asked."""

    body = b""
    code = 200
    asked: list[tuple[str, str | None]] = []  # noqa: RUF012

    def do_GET(self) -> None:
        self.asked.append((self.path, self.headers.get("authorization")))
        self.send_response(self.code)
        self.send_header("content-length", str(len(self.body)))
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def gateway() -> Iterator[str]:
    Gateway.body, Gateway.code, Gateway.asked = json.dumps(STATE).encode(), 200, []
    server = HTTPServer(("127.0.0.1", 0), Gateway)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join(10)
    server.server_close()


def shown(state: command.State, width: int = 200) -> str:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(command.render(state, console))
    return capture.get()


def test_the_table_shows_load_and_kvcache_of_each_part(gateway: str) -> None:
    text = shown(command.fetch(gateway + "/"))
    decode, node = (
        next(line for line in text.splitlines() if line.split()[:1] == [name]) for name in ("decode-0", "node-0")
    )
    assert "106/136" in decode
    assert "3/512 MiB" in node
    assert "5.0 MiB" in node
    assert "requests now: 3 decoding" in text
    assert "12 arrived, 0 placed, 9 finished, 0 cancelled; refused: 2 queue-full" in text


def test_an_empty_state_is_a_table_too() -> None:
    assert "requests now: none" in shown(msgspec.json.decode(b"{}", type=command.State))


def test_a_key_is_sent(gateway: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONPOOL_API_KEY", "sesame")
    command.fetch(gateway)
    assert Gateway.asked == [("/cluster", "Bearer sesame")]


@pytest.mark.parametrize("once", [True, False], ids=["asked for", "no terminal"])
def test_once_prints_one_table(gateway: str, capsys: pytest.CaptureFixture[str], once: bool) -> None:
    assert command.status(gateway, once) == 0
    assert "decode-0" in capsys.readouterr().out
    assert len(Gateway.asked) == 1


@pytest.mark.parametrize(
    ("code", "body", "message"),
    [
        (401, b"", "answered 401 to /cluster: set MOONPOOL_API_KEY to an admin key"),
        (403, b"", "answered 403 to /cluster: the key in MOONPOOL_API_KEY is no admin key"),
        (500, b"", "answered 500"),
        (200, b"<html>", "no cluster answers at"),
    ],
)
def test_a_bad_answer_is_one_line(gateway: str, code: int, body: bytes, message: str) -> None:
    Gateway.code, Gateway.body = code, body
    with pytest.raises(MoonpoolError, match=message):
        command.fetch(gateway)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "nonsense", "ftp://127.0.0.1:1"])
def test_nobody_there_is_one_line_with_the_way_out(url: str) -> None:
    with pytest.raises(MoonpoolError, match="start one with `moonpool serve`, or say where it is with --url"):
        command.fetch(url)


def test_a_node_shows_its_ssd_tier() -> None:
    ssd = {"ssd_capacity_bytes": 20 << 30, "ssd_used_bytes": 3 << 30, "ssd_promotions": 7.0, "ssd_lost_volumes": 1.0}
    nodes = [{"id": f"node-{number}", "kind": "node"} for number in range(2)]
    state = msgspec.convert({"parts": nodes, "counters": {"node-0": ssd}}, command.State)
    assert "3.0/20.0 GiB, 7 hits, 1 lost" in shown(state)
    assert "SSD" not in shown(msgspec.convert({"parts": nodes}, command.State)), "where no node has one"


@pytest.mark.parametrize("width", [120, 80, 70, 40])
def test_a_narrow_terminal_loses_the_least_important_columns(width: int) -> None:
    node = {"id": "node-0", "health": "suspect", "node": "node-0", "rooms": 3, "blocks": {"dram": 9}}
    node |= {"kind": "node", "capacity": {"dram_bytes": 4 << 30}, "used_bytes": 1 << 30}
    decode = {"id": "decode-0", "health": "up", "node": "node-0", "running": 3, "queued": 1, "pages_free": 30}
    decode |= {"kind": "decode", "capacity": {"pages": 136}}
    ssd = {"ssd_capacity_bytes": 20 << 30, "ssd_used_bytes": 3 << 30, "ssd_promotions": 1234.0, "tcp_bytes_in": 5 << 20}
    text = shown(msgspec.convert({"parts": [node, decode], "counters": {"node-0": ssd}}, command.State), width)
    [head] = [line.split() for line in text.splitlines() if line.strip().startswith("part")]
    [row] = [line for line in text.splitlines() if line.strip().startswith("node-0")]
    assert head[:3] == ["part", "health", "node"]
    assert row.split()[:3] == ["node-0", "suspect", "node-0"]
    assert ("1024/4096 MiB" in row) == ("DRAM" in head)
    assert ("3.0/20.0 GiB, 1234 hits" in row) == ("SSD" in head) == (width > 40)
    assert "…" not in text
    assert max(len(line) for line in text.splitlines()) <= width
    dropped = set(command.DROPPED) - set(head)
    assert dropped == set(command.DROPPED[: len(dropped)])
    assert bool(dropped) == (width < 120)
