"""Keys, their hashes and their file: what is taken, what is refused, and what no edit may lose."""

from __future__ import annotations

import base64
import json
import os
import re
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from moonpool.errors import ConfigError
from moonpool.gateway.keys import file as module
from moonpool.gateway.keys.file import check_keys, edit, read, stamp_of, without
from moonpool.gateway.keys.secret import HASH, draw_id, draw_key, hash_of, id_of, is_hash_of
from tests.keys import make_key, revoke, wrong


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def test_a_hash_is_of_one_key_only() -> None:
    key = draw_key(draw_id())
    hashed = hash_of(key)
    assert re.fullmatch(HASH, hashed)
    assert is_hash_of(hashed, key)
    assert not is_hash_of(hashed, wrong(key))
    assert hash_of(key) != hashed, "the salt is another one"
    assert is_hash_of(hashed.replace("ln=14", "ln=15"), key) is False


def test_a_hash_is_scrypt_in_the_usual_form() -> None:
    """The test vector of RFC 7914 with these parameters has N=16384, r=8, p=1 and 64 bytes: here are its first 32."""
    digest = "7023bdcb3afd7348461c06cd81fd38ebfda8fbba904f8e3ea9b543f6545da1f2"
    text = base64.b64encode(bytes.fromhex(digest)).decode().rstrip("=")
    salt = base64.b64encode(b"SodiumChloride").decode().rstrip("=")
    assert is_hash_of(f"$scrypt$ln=14,r=8,p=1${salt}${text}", "pleaseletmein")


@pytest.mark.parametrize(
    "key", ["", "none", "mp-", "mp-0123456789-", "sk-0123456789-" + "0" * 48, "mp-0123456789-" + "Z" * 48]
)
def test_what_has_not_the_form_of_a_key_has_no_id(key: str) -> None:
    assert id_of(key) is None
    assert id_of("mp-0123456789-" + "0" * 48 + "\n") is None


def test_no_secret_is_in_the_file_and_nobody_else_may_read_it(path: Path) -> None:
    key = make_key(path, "acme", group="shared", classes=("high", "batch"), slo_ttft=2.0, streams=3)
    text = path.read_text()
    assert key.rsplit("-", 1)[1] not in text
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    (entry,) = read(path).keys
    assert (entry.id, entry.name, entry.group, entry.classes) == (id_of(key), "acme", "shared", ("high", "batch"))
    assert (entry.slo_ttft, entry.slo_tbt, entry.streams, entry.admin) == (2.0, None, 3, False)
    assert '"slo-ttft": 2' in text, "names are spelt as everywhere"
    revoke(path, key)
    assert read(path).keys == ()


def test_edits_at_one_time_lose_nothing(path: Path) -> None:
    make_key(path)
    script = (
        "import sys; from pathlib import Path; from tests.keys import make_key\n"
        "for _ in range(4): make_key(Path(sys.argv[1]))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    others = [subprocess.Popen([sys.executable, "-c", script, str(path)], env=environment) for _ in range(3)]
    for other in others:
        assert other.wait(60) == 0
    assert len(read(path).keys) == 13
    assert [each.name for each in path.parent.iterdir()] == ["keys.json"], "nothing is left behind"


def test_an_edit_that_fails_changes_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_key(path)
    before = path.read_bytes()

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError, match=r"cannot write .*: No space left"):
        make_key(path)
    assert path.read_bytes() == before
    assert [each.name for each in path.parent.iterdir()] == ["keys.json"]


def test_a_link_stays_a_link_and_an_owner_the_owner(path: Path, tmp_path: Path) -> None:
    make_key(path)
    link = tmp_path / "link.json"
    link.symlink_to(path)
    make_key(link)
    assert link.is_symlink()
    assert len(read(path).keys) == 2
    if os.geteuid() == 0:
        os.chown(path, 12345, 12345)
        make_key(path)
        assert (path.stat().st_uid, path.stat().st_gid) == (12345, 12345)


def test_who_holds_the_lock_is_waited_for_but_not_for_ever(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = make_key(path)
    monkeypatch.setattr(module, "LOCK_SECONDS", 0.1)
    inside, door = threading.Event(), threading.Event()

    def stay(file: module.KeyFile) -> module.KeyFile:
        inside.set()
        assert door.wait(20)
        return without(file, id_of(key) or "")

    holder = threading.Thread(target=edit, args=(path, stay))
    holder.start()
    try:
        assert inside.wait(20)
        with pytest.raises(ConfigError, match="try again later"):
            make_key(path)
    finally:
        door.set()
        holder.join()
    assert read(path).keys == ()


def test_a_stamp_tells_every_edit(path: Path) -> None:
    assert stamp_of(path) is None
    stamps = set()
    for _ in range(3):
        make_key(path)
        stamps.add(stamp_of(path))
    path.chmod(0o400)
    stamps.add(stamp_of(path))
    assert len(stamps) == 4


def damaged(**changes: Any) -> str:
    entry = {"id": "0123456789", "name": "a", "hash": hash_of("x"), "created": "2026-11-30"} | changes
    return json.dumps({"secret": "0" * 64, "keys": [{k: v for k, v in entry.items() if v is not None}]})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no file of API keys"),
        ("{", "no file of API keys"),
        ("keys:\n- id: 1\n", "no file of API keys"),
        ('{"secret": "' + "0" * 64 + '", "kezs": []}', "kezs"),
        ('{"secret": "short"}', "secret"),
        (damaged(hash="plain-secret-of-somebody"), r"keys\[0\].hash"),
        (damaged(hash=hash_of("x").replace("ln=14", "ln=30")), r"keys\[0\].hash"),
        (damaged(id="X"), r"keys\[0\].id"),
        (damaged(id=None), "id"),
        (damaged(name="a b"), r"keys\[0\].name"),
        (damaged(created="yesterday"), r"keys\[0\].created"),
        (damaged(streams=0), r"keys\[0\].streams"),
        (damaged(**{"requests-per-minute": -1}), "requests-per-minute"),
        (damaged(**{"tokens-per-minute": 1.5}), "tokens-per-minute"),
        (damaged(**{"slo-ttft": 0}), "slo-ttft"),
        (damaged(**{"slo_ttft": 1}), "slo_ttft"),
        (damaged(classes="high"), "classes"),
        (damaged(admin="yes"), "admin"),
        ("[" * 100_000, "no file of API keys"),
        (damaged().replace("]", ", " + json.dumps(json.loads(damaged())["keys"][0]) + "]"), "two keys with one id"),
    ],
)
def test_a_damaged_file_is_one_line_without_what_is_in_it(path: Path, text: str, says: str) -> None:
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=says) as refused:
        read(path)
    message = str(refused.value)
    assert "\n" not in message
    assert str(path) in message
    assert "plain-secret" not in message
    with pytest.raises(ConfigError):
        edit(path, lambda file: file)
    assert path.read_text() == text


def test_what_is_no_file_for_one_reader_alone_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"is not there: `moonpool keys add NAME --keys .*keys.json` makes it"):
        read(path)
    with pytest.raises(ConfigError, match="is not there"):
        edit(path, lambda file: file)
    with pytest.raises(ConfigError, match="cannot write"):
        edit(path.parent / "nowhere" / "keys.json", lambda file: file, may_create=True)
    with pytest.raises(ConfigError, match="is no file"):
        read(path.parent)
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="is no file"):
        read(path)  # and does not wait for a writer
    path.unlink()
    make_key(path)
    for mode in (0o640, 0o604, 0o620, 0o602):
        path.chmod(mode)
        with pytest.raises(ConfigError, match=f"open to others .*chmod 600 {path}"):
            read(path)
    path.chmod(0o400)
    assert read(path).keys
    monkeypatch.setattr(module, "MAX_FILE_BYTES", 10)
    with pytest.raises(ConfigError, match="larger than 10 bytes"):
        read(path)


def test_the_number_of_keys_has_a_bound(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_KEYS", 2)
    make_key(path)
    make_key(path)
    with pytest.raises(ConfigError, match="has 2 keys, which is the limit"):
        make_key(path)
    assert len(read(path).keys) == 2


def test_keys_may_be_left_out_on_loopback_only(path: Path) -> None:
    for host in ("127.0.0.1", "localhost", "::1", "127.0.0.9"):
        assert check_keys(None, host) is None
    for host in ("0.0.0.0", "::", "10.0.0.1", "box.example", ""):
        with pytest.raises(ConfigError, match=r"needs API keys: make one with `moonpool keys add NAME --keys"):
            check_keys(None, host)
        with pytest.raises(ConfigError, match="is not there"):
            check_keys(str(path), host)
    key = make_key(path)
    revoke(path, key)
    found = check_keys(str(path), "0.0.0.0")
    assert found is not None
    assert found.keys == (), "a file without keys lets nobody in, which is safe"
