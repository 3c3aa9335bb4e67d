"""Sets up peers, each in a virtual environment of its own; here Mooncake Store, that of `make bench-store`.

It lies in `peers` of Moonpool's cache directory and is made once. Its wheel wants three Debian libraries; where they
are not installed their packages are unpacked beside it, which changes nothing on the machine.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from moonpool.engine.model import home

VERSION = "0.3.13.post1"
PACKAGE = f"mooncake-transfer-engine-non-cuda=={VERSION}"
LIBRARIES = ("libibverbs1", "libnl-3-200", "libnl-route-3-200")
REMEDY = f"apt-get update && apt-get install {' '.join(LIBRARIES)}"
INSTALL_SECONDS = 900.0
TRY_SECONDS = 60.0


NETWORK_FAULTS = (
    "after connection broken by",
    "max retries exceeded",
    "read timed out",
    "connection reset",
    "connection aborted",
    "incompleteread",
    "http error 5",
    "http error 429",
)
"""What pip says, in small letters, where it could not fetch something; a package that the index does not have, or that
does not fit this machine, is another matter."""


class PeerMissingError(Exception):
    """The peer cannot be set up here; why, and what would help."""


class PeerUnreachableError(PeerMissingError):
    """It could not be fetched: that is the network's fault or the package index's."""


@dataclass(frozen=True, slots=True)
class Peer:
    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "venv" / "bin" / "python"

    @property
    def environment(self) -> Mapping[str, str]:
        """Of the peer's processes: its libraries, and nothing of ours but what a caller adds."""
        libraries = sorted({str(path.parent) for path in (self.folder / "libraries").rglob("*.so*")})
        given = os.environ.get("LD_LIBRARY_PATH")
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
        if libraries:
            environment["LD_LIBRARY_PATH"] = ":".join([*libraries, *([given] if given else [])])
        return environment


def set_up(console: Console) -> Peer:
    """Mooncake Store, ready to run. Raises PeerMissingError."""
    return made_once(f"mooncake-{VERSION}", lambda peer: _install(peer, console))


def made_once(name: str, install: Callable[[Peer], None]) -> Peer:
    """The peer that lies in `peers` under this name, installed unless it is already. Raises PeerMissingError."""
    peer = Peer(home() / "peers" / name)
    try:
        peer.folder.mkdir(parents=True, exist_ok=True)
        with locked(peer.folder / "lock"):
            if not (peer.folder / "installed").exists():
                install(peer)
                (peer.folder / "installed").touch()
    except OSError as error:
        raise PeerMissingError(f"cannot write to {peer.folder}: {error.strerror or error}") from error
    return peer


def new_environment(peer: Peer) -> list[str]:
    """Makes its virtual environment anew; the command of its pip. Raises PeerMissingError."""
    shutil.rmtree(peer.folder / "venv", ignore_errors=True)
    run_or_explain([sys.executable, "-m", "venv", str(peer.folder / "venv")], peer, "no virtual environment")
    return pip_of(peer)


def pip_of(peer: Peer) -> list[str]:
    return [str(peer.python), "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input"]


def _install(peer: Peer, console: Console) -> None:
    for leftover in ("libraries", "packages"):
        shutil.rmtree(peer.folder / leftover, ignore_errors=True)
    with console.status(f"Mooncake Store {VERSION}: a virtual environment of its own (once, 50 MB)"):
        pip = [*new_environment(peer), "install", "--only-binary", ":all:"]
        run_or_explain([*pip, "numpy", PACKAGE], peer, f"pip cannot install {PACKAGE}")
    if (lack := _what_lacks(peer)) is not None:
        with console.status("Mooncake Store: the Debian libraries that it needs"):
            _unpack_libraries(peer, lack)
        lack = _what_lacks(peer)
    if lack is not None:
        raise PeerMissingError(f"its module does not load ({lack}); try: {REMEDY}")


def _what_lacks(peer: Peer) -> str | None:
    """What keeps the store's module from loading."""
    tried = subprocess.run(
        [str(peer.python), "-c", "import mooncake.store"],
        env=peer.environment,
        capture_output=True,
        text=True,
        timeout=TRY_SECONDS,
        check=False,
    )
    return _last_line(tried.stderr) if tried.returncode else None


def _unpack_libraries(peer: Peer, lack: str) -> None:
    """Beside the peer, not into the system. Raises PeerMissingError."""
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise PeerMissingError(f"{lack}; it needs the libraries of Debian's {', '.join(LIBRARIES)}")
    packages = peer.folder / "packages"
    packages.mkdir()
    fetch = ["apt-get", "--quiet", "download", *LIBRARIES]
    try:
        run_or_explain(fetch, peer, "apt-get download failed", packages)
    except PeerMissingError:
        # A machine without package lists: fetch some, into a folder of our own.
        (packages / "lists" / "partial").mkdir(parents=True)
        own = ["-o", f"Dir::State::lists={packages}/lists", "-o", f"Dir::Cache={packages}"]
        run_or_explain(
            ["apt-get", "--quiet", *own, "update"], peer, f"{lack}; try: {REMEDY}; apt-get update failed", packages
        )
        run_or_explain([*fetch, *own], peer, f"{lack}; try: {REMEDY}; apt-get download failed", packages)
    for package in sorted(packages.glob("*.deb")):
        run_or_explain(
            ["dpkg-deb", "-x", str(package), str(peer.folder / "libraries")], peer, f"{package.name} is damaged"
        )
    shutil.rmtree(packages)


def run_or_explain(
    command: Sequence[str],
    peer: Peer,
    trouble: str,
    folder: Path | None = None,
    seconds: float = INSTALL_SECONDS,
) -> None:
    """Raises PeerMissingError, or PeerUnreachableError where the network failed or it is not done in `seconds`."""
    try:
        done = subprocess.run(
            command,
            env=peer.environment,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise PeerUnreachableError(f"{trouble}: not done after {seconds:g} s") from None
    if done.returncode:
        said = f"{done.stdout}\n{done.stderr}".lower()
        kind = PeerUnreachableError if any(fault in said for fault in NETWORK_FAULTS) else PeerMissingError
        raise kind(f"{trouble}: {_last_line(done.stderr or done.stdout)}")


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip() if lines else "no reason given"


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Two benches at a time: the second waits for what the first installs."""
    until = time.monotonic() + INSTALL_SECONDS
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > until:
                    raise PeerMissingError(
                        f"another process has been installing it for {INSTALL_SECONDS:g} s"
                    ) from None
                time.sleep(0.2)
            else:
                break
        yield
