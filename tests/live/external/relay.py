"""A way between two ZMQ sockets of this host that can be cut, and mended."""

from __future__ import annotations

import contextlib
import socket
import threading
from pathlib import Path


class Relay:
    """`address` leads to where `to` does."""

    def __init__(self, path: Path, to: str) -> None:
        self.address = f"ipc://{path}"
        self._path = path
        self._to = to.removeprefix("ipc://")
        self._open: list[socket.socket] = []
        self.mend()

    def mend(self) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self._path))
        self._listener.listen()
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def cut(self) -> None:
        """What is on its way is lost, and nobody gets through."""
        self._path.unlink()
        for each in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        self._open.clear()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                here, _ = listener.accept()
                there = socket.socket(socket.AF_UNIX)
                there.connect(self._to)
                self._open += here, there
                for one, other in ((here, there), (there, here)):
                    threading.Thread(target=_pass_on, args=(one, other), daemon=True).start()


def _pass_on(one: socket.socket, other: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := one.recv(1 << 16):
            other.sendall(data)
