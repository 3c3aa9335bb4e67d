"""Stands between Messenger and a data server and cuts connections."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

PIECE = 1 << 16
SECONDS = 20.0


class Proxy:
    def __init__(
        self, target: str, cut_after: int | None, cut_back_after: int | None, delay: Callable[[], float] = lambda: 0.0
    ) -> None:
        host, _, port = target.rpartition(":")
        self.there = self.back = 0
        """Bytes that went to the server, and that came back, over all connections."""
        self.cuts = 0
        self._delay = delay
        self._target = host, int(port)
        self._limits = {"there": cut_after, "back": cut_back_after}
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._start(self._accept)

    def cut_some(self, is_cut: Callable[[], bool]) -> None:
        """Of the youngest connections, those for which it says so."""
        for sock in self._sockets[-4:]:
            if is_cut():
                _reset(sock)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(SECONDS)
        for sock in [*self._sockets, self._listener]:
            sock.close()

    def _start(self, target: object, *args: object) -> None:
        thread = threading.Thread(target=target, args=args)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(self._target)
            self._sockets += [near, far]
            self._start(self._pump, near, far, "there")
            self._start(self._pump, far, near, "back")

    def _pump(self, source: socket.socket, sink: socket.socket, way: str) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := source.recv(PIECE):
                if way == "back":
                    time.sleep(self._delay())
                sink.sendall(data)
                passed += len(data)
                with self._lock:
                    setattr(self, way, getattr(self, way) + len(data))
                    limit = self._limits[way]
                    is_cut = limit is not None and passed > limit and not self.cuts
                    self.cuts += is_cut
                if is_cut:
                    _reset(source)
                    _reset(sink)
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


def _reset(sock: socket.socket) -> None:
    """The other side is told at once, whatever is on its way to it."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


@contextlib.contextmanager
def proxy(
    target: str,
    cut_after: int | None = None,
    cut_back_after: int | None = None,
    delay: Callable[[], float] = lambda: 0.0,
) -> Iterator[Proxy]:
    """Cuts the first connection that has carried so many bytes, to the server or back. `delay`: of each piece back."""
    between = Proxy(target, cut_after, cut_back_after, delay)
    try:
        yield between
    finally:
        between.close()
