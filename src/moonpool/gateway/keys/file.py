"""The keys file: JSON, for its owner alone, written by `moonpool keys` and by hand, read by every gateway.

{"secret": "…", "keys": [{"id": "3f9a0c12de", "name": "acme", "hash": "$scrypt$…", "created": "2026-11-30", …}]}
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import os
import secrets
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from moonpool.errors import ConfigError
from moonpool.gateway.keys.quota import Allowance
from moonpool.gateway.keys.secret import HASH, ID
from moonpool.wire.security import is_loopback

MAX_FILE_BYTES = 16 << 20
MOST_KEYS = 10_000
LOCK_SECONDS = 5.0
MOST_SAID = 200
"""Characters of what is wrong: it may have a name that stands in the file."""
NAME = r"[A-Za-z0-9][A-Za-z0-9@._+-]{0,63}"

Name = Annotated[str, Meta(pattern=rf"^{NAME}\Z")]
Seconds = Annotated[float, Meta(gt=0, le=1e9)]
Amount = Annotated[int, Meta(ge=1, le=1 << 40)]
Stamp = tuple[int, ...]
"""Two that differ: the file is another one, or has been written to."""


class ApiKey(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, rename="kebab"):
    """One key. What is None or empty is not in the file."""

    id: Annotated[str, Meta(pattern=rf"^{ID}\Z")]
    name: Name
    """For people: whose it is."""
    hash: Annotated[str, Meta(pattern=rf"^{HASH}\Z")]
    created: datetime.date
    admin: bool = False
    """It may look at the cluster and change it."""
    group: Name | None = None
    """Keys of one group share KVCache. None: the key's id, so that it shares with nobody."""
    classes: Annotated[tuple[Name, ...], Meta(max_length=64)] = ()
    """Priority classes that its requests may name; the first is for those that name none."""
    slo_ttft: Seconds | None = None
    slo_tbt: Seconds | None = None
    requests_per_minute: Amount | None = None
    tokens_per_minute: Amount | None = None
    """Of prompts and answers together."""
    streams: Amount | None = None
    """At one time."""

    @property
    def allowed(self) -> Allowance:
        return Allowance(self.requests_per_minute, self.tokens_per_minute, self.streams)


class KeyFile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    secret: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
    """What the salts of KVCache are derived from, so that nobody can guess a tenant's."""
    keys: Annotated[tuple[ApiKey, ...], Meta(max_length=MOST_KEYS)] = ()


def check_keys(path: str | None, host: str) -> KeyFile | None:
    """The keys that a gateway at `host` begins with; None: it asks for none. Raises ConfigError."""
    if path is not None:
        return read(Path(path))
    if not is_loopback(host):
        raise ConfigError(
            f"--host {host} is open to the network and needs API keys: make one with "
            "`moonpool keys add NAME --keys keys.json` and give --keys keys.json; or stay on 127.0.0.1"
        )
    return None


def read(path: Path) -> KeyFile:
    """Raises ConfigError: what is wrong with the file, and never what stands in it."""
    try:
        with _opened(path) as fd:
            data = b"".join(iter(lambda: os.read(fd, 1 << 20), b""))
    except FileNotFoundError:
        raise ConfigError(f"{path} is not there: `moonpool keys add NAME --keys {path}` makes it") from None
    except OSError as e:
        raise ConfigError(f"cannot read {path}: {e.strerror}") from None
    try:
        file = msgspec.json.decode(data, type=KeyFile)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as e:
        raise ConfigError(f"{path} is no file of API keys: {str(e)[:MOST_SAID]}") from None
    if len({key.id for key in file.keys}) < len(file.keys):
        raise ConfigError(f"{path} has two keys with one id: take one of them out")
    return file


def stamp_of(path: Path) -> Stamp | None:
    """None: nothing can be found there."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def edit(path: Path, change: Callable[[KeyFile], KeyFile], *, may_create: bool = False) -> None:
    """Put what `change` makes of the file in its place: all or nothing, one edit at a time. Raises ConfigError."""
    path = path.resolve()  # a link stays one
    try:
        with _alone(path.parent):
            is_new = may_create and not path.exists()
            file = change(KeyFile(secret=secrets.token_hex(32)) if is_new else read(path))
            if len(file.keys) > MOST_KEYS:
                raise ConfigError(f"{path} has {MOST_KEYS} keys, which is the limit: revoke some, or begin another")
            _put(path, msgspec.json.format(msgspec.json.encode(file), indent=2) + b"\n")
    except OSError as e:
        raise ConfigError(f"cannot write {path}: {e.strerror}") from None


def without(file: KeyFile, id_: str) -> KeyFile:
    return replace(file, keys=tuple(key for key in file.keys if key.id != id_))


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    """Only a file that nobody else may read or write, and that never waits. Raises ConfigError, OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"{path} is no file")
        if mode := stat.S_IMODE(status.st_mode) & 0o077:
            raise ConfigError(f"{path} is open to others (mode bits {mode:03o}): chmod 600 {path}")
        if status.st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{path} is larger than {MAX_FILE_BYTES} bytes: no file of API keys")
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """The lock is the directory's: the file itself is another one after each edit."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        deadline = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    message = f"another command has had {directory} locked for {LOCK_SECONDS:g} s: try again later"
                    raise ConfigError(message) from None
                time.sleep(0.02)
        yield
    finally:
        os.close(fd)


def _put(path: Path, data: bytes) -> None:
    fd, made = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # mode 0600
    try:
        with os.fdopen(fd, "wb") as out:
            if os.geteuid() == 0 and path.exists():  # or the gateway's user could not read what root has written
                os.fchown(fd, path.stat().st_uid, path.stat().st_gid)
            out.write(data)
            out.flush()
            os.fsync(fd)
        Path(made).replace(path)
    except BaseException:
        Path(made).unlink(missing_ok=True)
        raise
