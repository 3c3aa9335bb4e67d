"""Keys files for tests, made as `moonpool keys` makes them."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from moonpool.gateway.keys.file import ApiKey, edit, without
from moonpool.gateway.keys.secret import draw_id, draw_key, hash_of, id_of


def make_key(path: Path, name: str = "someone", id_: str = "", **fields: Any) -> str:
    """Add a key to the file, which need not be there; the key as a client sends it."""
    id_ = id_ or draw_id()
    key = draw_key(id_)
    entry = ApiKey(id=id_, name=name, hash=hash_of(key), created=datetime.date(2026, 11, 30), **fields)
    edit(path, lambda file: replace(file, keys=(*file.keys, entry)), may_create=True)
    return key


def revoke(path: Path, key: str) -> None:
    edit(path, lambda file: without(file, id_of(key) or ""))


def change(path: Path, key: str, **fields: Any) -> None:
    edit(path, lambda file: replace(file, keys=tuple(_changed(each, key, fields) for each in file.keys)))


def _changed(entry: ApiKey, key: str, fields: dict[str, Any]) -> ApiKey:
    return replace(entry, **fields) if entry.id == id_of(key) else entry


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def wrong(key: str) -> str:
    """Another secret under the same id."""
    return key[:-4] + ("0000" if key[-4:] != "0000" else "1111")
