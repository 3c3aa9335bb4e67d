from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from moonpool.messenger.channel import Channel


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = Channel(socket.create_connection(listener.getsockname()))
        two = Channel(listener.accept()[0])
    yield one, two
    one.close()
    two.close()
