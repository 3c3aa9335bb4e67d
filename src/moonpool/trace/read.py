"""Reads trace files, a line at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from moonpool.errors import TraceError
from moonpool.trace import azure, burstgpt, mooncake
from moonpool.trace.request import TraceFormat, TraceRequest

MAX_LINE_BYTES = 16 << 20
"""The longest prompt of a published trace has a line of 2 KB."""
BOM = b"\xef\xbb\xbf"
PACKED = {b"\x1f\x8b": "gunzip -k", b"\x28\xb5\x2f\xfd": "unzstd", b"PK\x03\x04": "unzip", b"BZh": "bunzip2 -k"}
"""How compressed files begin, and what unpacks them."""

Parse = Callable[[bytes], TraceRequest | None]


class TraceFile:
    """The requests of a file in its order; each iteration reads it anew, and what is below is of the latest one.

    A malformed line raises TraceError with its number; with `skip_bad` it is counted and left out. A file that cannot
    be read, is no trace or holds no request raises TraceError in any case.
    """

    def __init__(self, path: Path, skip_bad: bool = False) -> None:
        self.path = path
        self.skip_bad = skip_bad
        self.format: TraceFormat | None = None
        self.requests = 0
        self.skipped = 0
        self.first_skipped = ""
        """Its number and what is wrong with it."""
        self.failed = 0
        """Requests that had no answer when the trace was taken; they are left out."""
        self._parse: Parse | None = None

    def __iter__(self) -> Iterator[TraceRequest]:
        return (request for _, request in self.located())

    def located(self) -> Iterator[tuple[int, TraceRequest]]:
        """The same, each with the place at which its line begins, for `at`."""
        self.requests, self.skipped, self.first_skipped, self.failed = 0, 0, "", 0
        try:
            with self.path.open("rb") as file:
                yield from self._read(file)
        except OSError as e:
            raise TraceError(f"cannot read {self.path}: {e.strerror}") from None
        if not self.requests:
            left_out = f" ({self.skipped} malformed, the first: {self.first_skipped})" if self.skipped else ""
            raise TraceError(f"{self.path} holds no requests{left_out}")

    def at(self, places: Iterable[int]) -> Iterator[TraceRequest]:
        """The requests at these places that `located` has told, in this order, read once more.

        Raises TraceError where the file has changed since, or can no longer be read.
        """
        parse = self._parse
        assert parse is not None, "places are told by `located`"
        try:
            with self.path.open("rb") as file:
                for place in places:
                    file.seek(place)
                    try:
                        request = parse(file.readline(MAX_LINE_BYTES))
                    except ValueError:
                        request = None
                    if request is None:
                        raise TraceError(f"{self.path} has changed since it was first read; start again")
                    yield request
        except OSError as e:
            raise TraceError(f"cannot read {self.path}: {e.strerror}") from None

    def _read(self, file: BinaryIO) -> Iterator[tuple[int, TraceRequest]]:
        parse: Parse | None = None
        end = 0
        for number, line in enumerate(self._lines(file), 1):
            begin, end = end, end + len(line)
            if not line.strip():
                continue
            if parse is None:
                bare = line.removeprefix(BOM)
                parse = self._parse = self._parser(bare, number)
                if self.format is not TraceFormat.MOONCAKE:
                    continue
                begin, line = end - len(bare), bare
            try:
                request = parse(line)
            except ValueError as e:
                self._bad(number, e)
                continue
            if request is None:
                self.failed += 1
            else:
                self.requests += 1
                yield begin, request

    def _lines(self, file: BinaryIO) -> Iterator[bytes]:
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(line) > MAX_LINE_BYTES:
                raise TraceError(f"{self.path} line {number} is longer than {MAX_LINE_BYTES >> 20} MiB: not a trace")
            yield line

    def _parser(self, line: bytes, number: int) -> Parse:
        for begin, unpack in PACKED.items():
            if line.startswith(begin):
                raise TraceError(f"{self.path} is compressed; unpack it first ({unpack})")
        if line.lstrip().startswith(b"{"):
            self.format = TraceFormat.MOONCAKE
            return mooncake.parse
        for form, of_header in ((TraceFormat.AZURE, azure.parser), (TraceFormat.BURSTGPT, burstgpt.parser)):
            parse = of_header(line)
            if parse is not None:
                self.format = form
                return parse
        raise TraceError(
            f"{self.path} line {number} is neither a JSON object (Mooncake) nor the header of an Azure CSV, such as "
            f"`{','.join(azure.HEADER)}`, or of a BurstGPT CSV, `{','.join(burstgpt.HEADER)}`"
        )

    def _bad(self, number: int, error: ValueError) -> None:
        what = f"line {number}: {' '.join(str(error).split())}"
        if not self.skip_bad:
            raise TraceError(f"{self.path} {what} (--skip-bad leaves such lines out)") from None
        self.skipped += 1
        self.first_skipped = self.first_skipped or what
