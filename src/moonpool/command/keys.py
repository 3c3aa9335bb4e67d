"""`moonpool keys`: API keys of gateways, in a file that they follow while they run."""

from __future__ import annotations

import datetime
import re
import sys
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from moonpool.command.settings import duration
from moonpool.errors import ConfigError
from moonpool.gateway.keys.file import NAME, ApiKey, KeyFile, edit, read, without
from moonpool.gateway.keys.secret import draw_id, draw_key, hash_of, id_of

FILE_COLUMNS = 160
"""Where the output is no terminal."""


class Wanted(Struct, frozen=True):
    """What a new key is to be. None, and no text: not given."""

    name: str
    admin: bool
    group: str | None
    classes: str | None
    slo_ttft: str | None
    slo_tbt: str | None
    requests_per_minute: int | None
    tokens_per_minute: int | None
    streams: int | None


class Listed(Struct, frozen=True, rename="kebab"):
    """What `list --json` tells of a key."""

    id: str
    name: str
    created: datetime.date
    admin: bool
    group: str
    classes: tuple[str, ...]
    slo_ttft: float | None
    slo_tbt: float | None
    requests_per_minute: int | None
    tokens_per_minute: int | None
    streams: int | None


def add(path: Path, wanted: Wanted) -> int:
    """Draw a key, keep its hash, print it: the only time that it is to be seen. Raises ConfigError."""
    key = ApiKey(
        id=draw_id(),
        name=_name("NAME", wanted.name),
        hash="",
        created=datetime.datetime.now(datetime.UTC).date(),
        admin=wanted.admin,
        group=None if wanted.group is None else _name("--group", wanted.group),
        classes=tuple(_name("--class", name.strip()) for name in (wanted.classes or "").split(",") if name.strip()),
        slo_ttft=_seconds("--slo-ttft", wanted.slo_ttft),
        slo_tbt=_seconds("--slo-tbt", wanted.slo_tbt),
        requests_per_minute=wanted.requests_per_minute,
        tokens_per_minute=wanted.tokens_per_minute,
        streams=wanted.streams,
    )
    secret = draw_key(key.id)
    key = replace(key, hash=hash_of(secret))

    def append(file: KeyFile) -> KeyFile:
        if any(other.id == key.id for other in file.keys):
            raise ConfigError("the id that was drawn is taken: try again")
        return replace(file, keys=(*file.keys, key))

    edit(path, append, may_create=True)
    print(f"{path} has key {key.id} for {key.name}. It cannot be shown again:", file=sys.stderr)
    print(secret)
    return 0


def list_(path: Path, as_json: bool) -> int:
    """Raises ConfigError."""
    listed = [_listed(key) for key in read(path).keys]
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(listed)).decode() + "\n")
        return 0
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(width=FILE_COLUMNS, highlight=False)
    table = Table(box=SIMPLE, padding=(0, 1), collapse_padding=True, pad_edge=False)
    columns = ("id", "name", "created", "group", "admin", "classes", "ttft", "tbt", "requests/min", "tokens/min")
    for name in (*columns, "streams"):
        table.add_column(name, no_wrap=True)
    for key in listed:
        shares = key.group if key.group != key.id else ""
        limits = [_shown(value) for value in (key.requests_per_minute, key.tokens_per_minute, key.streams)]
        slos = ["" if value is None else f"{value:g}s" for value in (key.slo_ttft, key.slo_tbt)]
        admin = "yes" if key.admin else ""
        table.add_row(key.id, key.name, str(key.created), shares, admin, ",".join(key.classes), *slos, *limits)
    console.print(table if listed else f"{path} has no keys", soft_wrap=not listed)
    return 0


def revoke(path: Path, id_: str) -> int:
    """Raises ConfigError."""
    if (whole := id_of(id_)) is not None:
        raise ConfigError(f"this is a whole key: name it by its id alone, {whole}")

    def leave_out(file: KeyFile) -> KeyFile:
        if all(key.id != id_ for key in file.keys):
            shown = f"with the id {id_!r}" if len(id_) <= 64 else "with this id"
            raise ConfigError(f"{path} has no key {shown}: `moonpool keys list --keys {path}` shows their ids")
        return without(file, id_)

    edit(path, leave_out)
    print(f"{id_} is revoked: gateways that read {path} refuse it within a second", file=sys.stderr)
    return 0


def _name(where: str, text: str) -> str:
    if not re.fullmatch(NAME, text):
        raise ConfigError(
            f"{where} {text[:80]!r}: must have 1 to 64 letters, digits and @ . _ + -, a letter or digit first"
        )
    return text


def _seconds(flag: str, text: str | None) -> float | None:
    if text is None:
        return None
    try:
        seconds = duration(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= 1e9:
        raise ConfigError(f"{flag} {text[:80]!r}: must be a duration like 30s or 200ms, above 0")
    return seconds


def _listed(key: ApiKey) -> Listed:
    known = {name: getattr(key, name) for name in Listed.__struct_fields__ if name != "group"}
    return Listed(**known, group=key.group or key.id)


def _shown(value: int | None) -> str:
    return "" if value is None else f"{value:,}"
